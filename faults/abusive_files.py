"""Checkpoints that nobody would write, each made from a good one in its folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.checkpoint.sealed import add_seal
from halfstep.train.state import COMPONENTS

TENSORS, STATE, MANIFEST = FILES = ("rank-00000.safetensors", "rank-00000.json", "MANIFEST.json")
Craft = Callable[[Path], None]


def refit(generation: Path) -> None:
    """The manifest made to fit its files again, as somebody would who knows how."""
    manifest = json.loads((generation / MANIFEST).read_text())
    for name in manifest["files"]:
        content = (generation / name).read_bytes()
        manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    seal(generation, manifest)


def seal(generation: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("seal", None)
    (generation / MANIFEST).write_bytes(add_seal(manifest))


def mutate(generation: Path, name: str, chance: random.Random, refitted: bool) -> None:
    """A few bytes of a file are others; with `refitted`, digests and seal fit, so that its parser gets to see them."""
    file = generation / name
    content = bytearray(file.read_bytes())
    # The beginning of a file of tensors is its table: most of the interest is there.
    most = len(content) if chance.random() < 0.5 else min(len(content), 2000)
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(most)] = chance.choice([chance.randrange(256), ord(chance.choice('09"{}[],:-e'))])
    file.write_bytes(content)
    if refitted and name != MANIFEST:
        refit(generation)
    elif refitted:
        _sealed_again(generation, bytes(content))


def _sealed_again(generation: Path, content: bytes) -> None:
    try:
        manifest = json.loads(content)
        seal(generation, manifest)
    except (ValueError, AttributeError, TypeError):
        return  # no longer anything that could be sealed


# -- tensors ---------------------------------------------------------------------------------------------------------


def _table(generation: Path) -> tuple[dict[str, Any], bytes]:
    content = (generation / TENSORS).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def _tensors(change: Callable[[dict[str, Any]], None], generation: Path) -> None:
    """The table of the tensors, changed."""
    table, numbers = _table(generation)
    change(table)
    _write(generation, json.dumps(table).encode(), numbers)


def _write(generation: Path, header: bytes, numbers: bytes = b"", length: int | None = None) -> None:
    told = struct.pack("<Q", len(header) if length is None else length)
    (generation / TENSORS).write_bytes(told + header + numbers)
    refit(generation)


def _first(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = table[next(name for name in table if name.startswith("weights/parameters/"))]
    return found


def _entry(**changes: Any) -> Craft:
    return partial(_tensors, lambda table: _first(table).update(changes))


def _moved(by: int) -> Craft:
    def move(table: dict[str, Any]) -> None:
        entry = _first(table)
        entry["data_offsets"] = [place + by for place in entry["data_offsets"]]

    return partial(_tensors, move)


def _twice(generation: Path) -> None:
    table, numbers = _table(generation)
    name = next(name for name in table if name != "__metadata__")
    text = json.dumps(table)[:-1] + f", {json.dumps(name)}: {json.dumps(table[name])}}}"
    _write(generation, text.encode(), numbers)


def _many(count: int, generation: Path) -> None:
    entry = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
    _write(generation, ("{" + ",".join(f'"{number}":{entry}' for number in range(count)) + "}").encode())


def _large_header(generation: Path) -> None:
    _write(generation, b'{"__metadata__":{"a":"' + b"x" * 99_000_000 + b'"}}')


# -- states ----------------------------------------------------------------------------------------------------------


def _state(change: Callable[[dict[str, Any]], None], generation: Path) -> None:
    state = json.loads((generation / STATE).read_text())
    change(state)
    _text(json.dumps(state), generation)


def _text(text: str, generation: Path) -> None:
    (generation / STATE).write_text(text)
    refit(generation)


def _number(word: str, generation: Path) -> None:
    """In place of the learning rate, which is a number that everybody believes."""
    state = json.loads((generation / STATE).read_text())
    state["optimizers"]["loss"]["param_groups"][0]["lr"] = "HERE"
    _text(json.dumps(state).replace('"HERE"', word), generation)


def _strides(strides: Any) -> Craft:
    def put(state: dict[str, Any]) -> None:
        parameters = state["weights"]["parameters"]
        parameters[next(iter(parameters))]["$strides"] = strides

    return partial(_state, put)


def _wrong_type(component: str, value: Any) -> Craft:
    return partial(_state, lambda state: state.update({component: value}))


# -- tables and things that are no files -----------------------------------------------------------------------------


def _manifest(change: Callable[[dict[str, Any]], None], generation: Path) -> None:
    manifest = json.loads((generation / MANIFEST).read_text())
    change(manifest)
    seal(generation, manifest)


def _outside(manifest: dict[str, Any]) -> None:
    manifest["files"]["../../../secret.json"] = manifest["files"].pop(STATE)


def _million(manifest: dict[str, Any]) -> None:
    manifest["world_size"] = 500_000
    manifest["files"] = {
        f"rank-{number:05d}.{kind}": [0, "0" * 64] for number in range(500_000) for kind in ("safetensors", "json")
    }


def _instead(make: Callable[[Path], None], generation: Path) -> None:
    (generation / STATE).unlink()
    make(generation / STATE)


def _linked_folder(generation: Path) -> None:
    elsewhere = generation.parents[2] / "elsewhere"
    generation.rename(elsewhere)
    generation.symlink_to(elsewhere)


def _to_secret(path: Path) -> None:
    secret = path.parents[3] / "secret.json"
    secret.write_text("{}")
    path.symlink_to(secret)


WRONG_TYPES: dict[str, Craft] = {
    f"{name} is {value!r}": _wrong_type(name, value) for name in COMPONENTS for value in (5, "text", [[1]], {"a": {}})
}
CRAFTED: dict[str, Craft] = {
    "header of 2^63": lambda generation: _write(generation, b"{}", length=2**63),
    "header of 99 MB": _large_header,
    "header of 0": lambda generation: _write(generation, b"", length=0),
    "overlapping offsets": _moved(-4),
    "offsets out of range": _moved(2**40),
    "negative offsets": _entry(data_offsets=[-4, 4]),
    "another type": _entry(dtype="F64"),
    "another shape": _entry(shape=[2**31, 2**31]),
    "empty, and 2^63 wide": _entry(shape=[0, 2**63]),
    "a hundred thousand sides": _entry(shape=[1] * 100_000),
    "a tensor that is there twice": _twice,
    "300,000 tensors": partial(_many, 300_000),
    "1,000,000 tensors": partial(_many, 1_000_000),
    "NaN": partial(_number, "NaN"),
    "1e999": partial(_number, "1e999"),
    "an integer of 5,000 digits": partial(_number, "9" * 5000),
    "100,000 levels": partial(_text, "[" * 100_000),
    "1,000 levels": partial(_state, lambda state: state.update(guards=json.loads("[" * 900 + "]" * 900))),
    "wrong strides": _strides([2**40, 1]),
    "strides that are words": _strides(["a", "b"]),
    "a path in the table": partial(_manifest, _outside),
    "a world size of 2^52": partial(_manifest, lambda manifest: manifest.update(world_size=2**52)),
    "1,000,000 files": partial(_manifest, _million),
    "a pipe": partial(_instead, os.mkfifo),
    "a folder": partial(_instead, Path.mkdir),
    "a link": partial(_instead, _to_secret),
    "a device": partial(_instead, lambda path: path.symlink_to("/dev/zero")),
    "a folder elsewhere": _linked_folder,
    **WRONG_TYPES,
}
