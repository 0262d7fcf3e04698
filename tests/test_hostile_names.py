"""Every command on names that would speak to a terminal: of files, classes, folders, recipes and settings."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from halfstep.cli.main import build

ESCAPE = "\x1b]0;PWNED\x07\x1b[31mRED\x1b[2J"
CLASSES = [f"a{ESCAPE}", "b\nFAKE LINE: Finished", "c\u202egnp.exe", "d[red]"]
BAD = ["x[/b].png", f"bad{ESCAPE}.png", "photo[copy]\n  do: rm.png", "[link=https:]y\u2066.png"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(
        build([str(words[0])]), [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "80"}
    )


def harmless(done: Result, *shown: str) -> None:
    """Nothing but lines to read, and none that a name made."""
    for text in (done.stdout, done.stderr):
        assert all(character == "\n" or character.isprintable() for character in text), repr(text)
        assert not any(line.startswith(("FAKE LINE", "  do: rm")) for line in text.splitlines())
    for words in shown:
        assert words in done.output


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draw = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for image in range(3):
                Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / f"{image}.png")
            bad = folder / BAD[number]
            bad.parent.mkdir(exist_ok=True)  # `x[/b].png` is `b].png` in the folder `x[`
            bad.write_bytes(b"not an image")
    return root


@pytest.fixture(scope="module")
def run(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run[/b]"
    settings = [
        "data.name=folder",
        f"data.path={photographs}",
        "data.val=val",
        "data.bad_samples=99",
        "data.classes=null",
    ]
    done = halfstep(
        "train",
        "classification_tiny",
        "--fp32",
        *settings,
        "data.bad_samples=99",
        "train.epochs=1",
        f"run.dir={folder}",
    )
    assert done.exit_code == 0, done.output
    harmless(done, "cannot use", "x[/b].png", "\\x1b]0;PWNED")
    assert b"\x1b" not in (folder / "train.log").read_bytes()
    return folder


def test_evaluate(run: Path) -> None:
    harmless(halfstep("evaluate", run, "--precision", "fp32"), "left out", "x[/b].png", "\\x1b]0;PWNED")


@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_predict(run: Path, photographs: Path, tmp_path: Path, number: int) -> None:
    done = halfstep("predict", run, photographs / "val" / CLASSES[number], "--out", tmp_path / "out[/b]\x1b[2J")
    assert done.exit_code == 0, done.output
    harmless(done, "left out", "3 images")


@pytest.mark.wording
def test_verify_and_export(run: Path, tmp_path: Path) -> None:
    harmless(halfstep("verify", run), "intact")
    harmless(halfstep("export", run, "--out", tmp_path / f"w[/b]{ESCAPE}.safetensors"), "tensors")


@pytest.mark.wording
def test_a_run_that_is_there_already(run: Path) -> None:
    done = halfstep("train", "classification_tiny", f"run.dir={run}")
    assert done.exit_code == 73
    harmless(done, "run[/b]")


def test_errors_name_what_was_given(tmp_path: Path) -> None:
    nowhere = tmp_path / "no\n  do: rm[/b]\x1b[2J"
    for words in (
        ["train", "unet", f"data.path={nowhere}"],
        ["train", "unet", f"model.name={ESCAPE}[/b]", f"data.path={tmp_path}"],
        ["train", f"un{ESCAPE}[/b]"],
        ["train", "unet", f"--{ESCAPE}[/b]", "1"],
        ["train", "unet", f"train.{ESCAPE}=1"],
        ["evaluate", nowhere],
        ["predict", nowhere],
        ["verify", nowhere],
        ["export", nowhere],
        ["replay", nowhere],
        ["recipes", f"x{ESCAPE}"],
        ["evaluate", "run", "one", f"too[/b]{ESCAPE}many\nFAKE LINE"],
    ):
        done = halfstep(*words)
        assert done.exit_code not in (0, 1), done.output
        harmless(done)


def test_a_recipe_of_others(tmp_path: Path) -> None:
    """Names of classes are free text; comments are shown with the recipe."""
    path = tmp_path / "own[b].yaml"
    path.write_text(
        "# \u202e look [/b]\n"
        'task: segmentation\nabout: "\\e[2J [/b] \\n FAKE LINE"\n'
        'data: {name: shapes, classes: 3, names: ["a\\e[2J", "b\\nFAKE LINE", "c[/b]"]}\ntrain: {epochs: 1}\n',
        encoding="utf-8",
    )
    for words in (["train", path, "--show"], ["recipes", path], ["recipes", "explain", path, "data.names"]):
        done = halfstep(*words)
        assert done.exit_code == 0, done.output
        harmless(done)


@pytest.mark.wording
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file system holds bytes, which need not be UTF-8."""
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    done = halfstep("evaluate", tmp_path / name)
    assert done.exit_code not in (0, 1)
    harmless(done, "caf\\udce9")
