"""Files that run code when somebody reads them in the usual way: here they make a file, to show that they were run."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

TENSORS, STATE, MANIFEST, BESIDE = "rank-00000.safetensors", "rank-00000.json", "MANIFEST.json", ".metadata"


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self.call = function, given

    def __reduce__(self) -> Any:
        return self.call


class Payload(NamedTuple):
    content: Callable[[Path], bytes]
    """Given the file that is to be made."""
    place: str = TENSORS
    """In a checkpoint."""
    weights: str = "weights.safetensors"
    """Its name where weights are read."""


def _system(canary: Path) -> Calls:
    return Calls(os.system, f"touch {canary}")


def _pickled(protocol: int) -> Callable[[Path], bytes]:
    return lambda canary: pickle.dumps(_system(canary), protocol)


def _eval(canary: Path) -> bytes:
    return pickle.dumps(Calls(eval, f"open({str(canary)!r}, 'w').close()"))


def _exec(canary: Path) -> bytes:
    return pickle.dumps({"format": 1, "files": Calls(exec, f"open({str(canary)!r}, 'w').close()")})


def _posix(canary: Path) -> bytes:
    return f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()


def _inst(canary: Path) -> bytes:
    """The oldest way to call something: no instruction that is named for it."""
    return f"(S'touch {canary}'\nios\nsystem\n.".encode()


def _stack_global(canary: Path) -> bytes:
    """Module and function as texts that are put together at the last moment."""
    return b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94" + _text(f"touch {canary}") + b"\x85R."


def _text(words: str) -> bytes:
    return b"\x8c" + bytes([len(words)]) + words.encode()


def _nested(canary: Path) -> bytes:
    inner = io.BytesIO()
    torch.save(_system(canary), inner)
    return pickle.dumps({"storage": Calls(torch.storage._load_from_bytes, inner.getvalue())})


def _tar(canary: Path) -> bytes:
    """As torch saved before version 0.1.10."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickle.dumps(_system(canary), 2)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _torch(zipped: bool) -> Callable[[Path], bytes]:
    def saved(canary: Path) -> bytes:
        file = io.BytesIO()
        content = {"weight": torch.ones(3), "more": _system(canary)}
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        return file.getvalue()

    return saved


def _set_item(canary: Path) -> bytes:
    """Items that are set on what is not a plain dict."""
    return pickle.dumps(OrderedDict([("weight", _system(canary))]), 2)


def _padded(canary: Path) -> bytes:
    """The call comes after more text than is looked at."""
    return pickle.dumps({"about": ["x"] * 50_000, "then": _system(canary)}, 2)


PAYLOADS: dict[str, Payload] = {
    "protocol 0": Payload(_pickled(0)),
    "protocol 2": Payload(_pickled(2), weights="weights.pt"),
    "protocol 4": Payload(_pickled(4)),
    "protocol 5": Payload(_pickled(5), STATE),
    "builtins.eval": Payload(_eval, STATE, "weights.pth"),
    "builtins.exec": Payload(_exec, MANIFEST),
    "posix.system": Payload(_posix, MANIFEST),
    "INST": Payload(_inst, STATE),
    "STACK_GLOBAL": Payload(_stack_global),
    "torch.storage._load_from_bytes": Payload(_nested, weights="weights.bin"),
    "tar": Payload(_tar),
    "torch.save": Payload(_torch(True), weights="weights.pt"),
    "torch.save of old": Payload(_torch(False), weights="weights.pt"),
    "SETITEM": Payload(_set_item, BESIDE, "weights.pt"),
    "behind 100 kB": Payload(_padded, BESIDE),
}


def fires(content: bytes) -> None:
    """Read it as those would who do not care, in whatever way runs it."""
    for read in (_by_pickle, _by_torch):
        try:
            read(content)
        except Exception:  # one of the two is not its reader
            continue


def _by_pickle(content: bytes) -> None:
    pickle.loads(content)


def _by_torch(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:  # its oldest form is read from real files only
        file.write(content)
        file.flush()
        torch.load(file.name, weights_only=False)
