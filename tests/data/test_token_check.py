"""`halfstep data check` of a folder of tokens, and the command that makes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from typer.testing import CliRunner

from halfstep.cli.main import build
from halfstep.data.check.tokens import check_tokens
from halfstep.data.tokenizing import write_tokens
from halfstep.errors import BadData
from tests.data.test_tokens import made, sentence


def findings(folder: Path) -> dict[str, tuple[str, ...]]:
    return {one.id: one.files for one in check_tokens(folder).findings}


def folder_of(texts: dict[str, str], root: Path) -> Path:
    root.mkdir()
    for name, text in texts.items():
        (root / name).write_text(text)
    return root


@pytest.fixture
def texts() -> dict[str, str]:
    return {f"{n:02d}.txt": "".join(sentence(100 * n + k) for k in range(10)) for n in range(30)}


def held_out(root: Path, out: Path) -> list[str]:
    report = write_tokens([root], "train:400", out, val=0.1)
    return json.loads("[" + ",".join((report.folder / "val.names.jsonl").read_text().splitlines()) + "]")


def test_sound_tokens(texts: dict[str, str], tmp_path: Path) -> None:
    held_out(folder_of(texts, tmp_path / "corpus"), tmp_path / "out")
    report = check_tokens(tmp_path / "out")
    assert report.ok
    assert report.findings == ()
    assert report.splits["train"].documents == 27
    assert report.splits["val"].tokens > 500
    assert 0 <= report.unused < 400


def test_held_out_text_in_train_is_found_whole_and_in_part(texts: dict[str, str], tmp_path: Path) -> None:
    names = held_out(folder_of(texts, tmp_path / "corpus"), tmp_path / "out")
    first, second, third = (Path(name).name for name in names)
    train = [name for name in texts if name not in (first, second, third)]
    planted = {
        **texts,
        train[0]: texts[first],  # a copy
        train[1]: "Before.\n" + texts[second] + "After.\n",  # the whole, inside another document
        train[2]: texts[train[2]] + texts[third][: len(texts[third]) // 3],
    }
    assert held_out(folder_of(planted, tmp_path / "planted"), tmp_path / "leaky") == names
    found = findings(tmp_path / "leaky")
    assert found.keys() == {"held-out-in-train", "held-out-partly"}
    assert {line.split()[0].rstrip(":") for line in found["held-out-in-train"]} == {
        first,
        second,
    }
    assert [line.partition(":")[0] for line in found["held-out-partly"]] == [third]
    assert not check_tokens(tmp_path / "leaky").ok


def test_duplicates_within_train_are_a_warning(texts: dict[str, str], tmp_path: Path) -> None:
    names = {Path(name).name for name in held_out(folder_of(texts, tmp_path / "corpus"), tmp_path / "out")}
    one, other = [name for name in texts if name not in names][:2]
    held_out(folder_of({**texts, other: texts[one]}, tmp_path / "twice"), tmp_path / "again")
    assert findings(tmp_path / "again") == {"duplicates": (f"{other} = {one}",)}
    assert check_tokens(tmp_path / "again").ok


def test_tokens_outside_the_vocabulary_empty_documents_and_lost_ends(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 50, 200).tolist()
    sound = made(tmp_path / "sound", tokens, [100, 200], vocabulary=50)
    assert set(findings(sound)) == {"held-out-in-train"}  # both sides are the same there
    beyond = made(tmp_path / "beyond", [*tokens, 50], [100, 201], vocabulary=50)
    assert findings(beyond)["outside-vocabulary"] == ("train", "val")
    empty = made(tmp_path / "empty", tokens, [100, 100, 200], vocabulary=50)
    assert findings(empty)["empty-document"] == ("train-1", "val-1")
    lost = made(tmp_path / "lost", [*tokens[:50], 0, *tokens[50:]], [201], vocabulary=50)
    assert findings(lost)["not-ended"] == ("train-0", "val-0")


def test_damage_is_found_by_digests(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(range(1, 100)), [99])
    content = bytearray((folder / "val-00000.bin").read_bytes())
    content[10] ^= 1
    (folder / "val-00000.bin").write_bytes(content)
    (folder / "tokenizer.json").write_text("{} ")
    found = findings(folder)
    assert found["shard-damaged"] == ("val-00000.bin",)
    assert found["tokenizer-changed"] == ("tokenizer.json",)
    (folder / "val.documents.bin").write_bytes(np.asarray([3], "<i8").tobytes())
    with pytest.raises(BadData):
        check_tokens(folder)


def test_the_commands(texts: dict[str, str], tmp_path: Path) -> None:
    root, out = folder_of(texts, tmp_path / "corpus"), tmp_path / "out"

    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(build(), ["data", *map(str, words)])
        return done.exit_code, done.output

    code, _ = run("tokens", root)
    assert code != 0
    code, said = run("tokens", root, "--tokenizer", "train:400", "--out", out, "--val", "0.1")
    assert code == 0, said
    assert f"halfstep train text_small --data_dir {out}" in said
    assert all(len(line) <= 80 or str(tmp_path) in line for line in said.splitlines())
    code, said = run("check", out, "--json")
    assert code == 0
    assert json.loads(said)["splits"]["train"]["documents"] == 27
    code, said = run("check", "text_small")
    assert code == 78
    assert "tokens" in said
    (out / "train-00000.bin").write_bytes(bytes(reversed((out / "train-00000.bin").read_bytes())))
    code, said = run("check", out)
    assert code == 65
    assert "shard-damaged" in said
