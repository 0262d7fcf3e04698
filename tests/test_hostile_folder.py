"""A run's folder that somebody has been at: links, pipes and names that are none of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from halfstep.checkpoint.paths import CheckpointDir, list_generations
from halfstep.cli.main import build
from halfstep.files import LARGEST_JSON, read_json
from halfstep.printable import escape_unprintable
from halfstep.runs import verify

WORDS = ["segmentation_tiny", "data.samples=64", "train.steps=12", "train.batch_size=4", "checkpoint.every_steps=3"]
CLEAR = "\x1b[2J"


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "80"})


def train(folder: Path) -> Result:
    return halfstep("train", *WORDS, "train.seed=1", "train.ema=0.9", "run.pictures=0", "--fp32", f"run.dir={folder}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = train(folder)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _never_waits(forked_python: None) -> Iterator[None]:
    """A read of a pipe would wait for ever."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize("name", ["journal.jsonl", "train.log", "checkpoints", "recipe.yaml"])
def test_nothing_is_changed_through_a_link(run: Path, tmp_path: Path, name: str) -> None:
    (run / "result.json").unlink()
    elsewhere = (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(elsewhere)
    if elsewhere.is_dir():
        (elsewhere / "step-00000099.0099.tmp").mkdir()  # a resume sweeps these away
    else:
        elsewhere.write_bytes(elsewhere.read_bytes() + b"# mine")  # a resume cuts back to the last line
    before = {path: path.lstat().st_mtime_ns for path in [elsewhere, *elsewhere.rglob("*")]}
    content = elsewhere.read_bytes() if elsewhere.is_file() else b""
    done = train(run)
    assert done.exit_code == 77, done.output
    assert f"{run / name} is a link" in done.stderr
    assert {path: path.lstat().st_mtime_ns for path in [elsewhere, *elsewhere.rglob("*")]} == before
    assert (elsewhere.read_bytes() if elsewhere.is_file() else b"") == content


@pytest.mark.wording
@pytest.mark.parametrize("leads", ["nowhere", "to a checkpoint"])
def test_a_link_in_a_checkpoints_place_is_a_problem_and_no_crash(run: Path, leads: str) -> None:
    kept = list_generations(run / "checkpoints")[0].path
    for one in list_generations(run / "checkpoints")[1:]:
        shutil.rmtree(one.path)
    target = kept.rename(run / "elsewhere") if leads == "to a checkpoint" else Path("/nowhere")
    shutil.rmtree(kept, ignore_errors=True)
    (run / "checkpoints" / "step-00000001.0001").symlink_to(target)
    done = halfstep("verify", run)
    assert done.exit_code == 65
    assert "step-00000001.0001  damaged" in done.stdout
    assert "a link instead of a folder" in done.stdout
    assert "the only checkpoint is damaged" in done.stderr


def test_checkpoints_that_are_always_gone_end_the_search(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = CheckpointDir(run / "checkpoints" / "step-00000001.0001", 1, 1)
    asked = []
    monkeypatch.setattr("halfstep.checkpoint.paths.list_generations", lambda folder: asked.append(folder) or [gone])
    assert verify.verify_checkpoints(run).verdicts == []
    assert len(asked) == verify.TRIES


# -- pipes ------------------------------------------------------------------------------------------------------------


READ = ("task.json", "result.json", "journal.jsonl")


@pytest.mark.parametrize("names", [READ, *(pytest.param((name,), marks=pytest.mark.full) for name in READ)])
def test_a_pipe_holds_up_no_export(run: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    for which in ("best", "checkpoint"):
        out = tmp_path / f"{which}.safetensors"
        assert halfstep("export", run, "--weights", which, "--out", out).exit_code == 0
    assert halfstep("export", run, "--out", tmp_path / "x.safetensors").exit_code == 0


@pytest.mark.parametrize("name", ["result.json", "journal.jsonl", "train.log"])
def test_a_pipe_holds_up_no_training(run: Path, name: str) -> None:
    (run / "result.json").unlink()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    done = train(run)
    assert done.exit_code == (0 if name == "result.json" else 77), done.output


def test_json_is_read_from_files_alone(tmp_path: Path) -> None:
    file, link, pipe, huge = (tmp_path / name for name in ("file", "link", "pipe", "huge"))
    file.write_text('{"é": 1}', encoding="utf-8")
    link.symlink_to(file)
    os.mkfifo(pipe)
    huge.write_bytes(b" " * LARGEST_JSON + b"1")
    assert [read_json(path) for path in (file, link)] == [{"é": 1}, {"é": 1}]
    assert [read_json(path) for path in (pipe, huge, tmp_path, tmp_path / "absent")] == [None] * 4


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_of_others_are_not_listed_as_checkpoints(run: Path) -> None:
    (run / "checkpoints" / f"step-{CLEAR}.bad").mkdir()
    (run / "checkpoints" / "step-[red].bad").mkdir()
    done = halfstep("verify", run)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "found damaged" not in done.output
    assert json.loads(halfstep("verify", run, "--json").stdout)["set_aside"] == []


@pytest.mark.wording
def test_a_name_in_an_error_cannot_command_a_terminal(tmp_path: Path) -> None:
    done = halfstep("verify", tmp_path / f"a{CLEAR}b")
    assert done.exit_code == 65
    assert "\x1b" not in done.stderr
    assert r"a\x1b[2Jb" in done.stderr
    assert "\n  allowed: " in done.stderr, "lines stay lines"


def test_every_character_can_be_printed() -> None:
    assert escape_unprintable("a é 🚀\n\r\x00\x9b\u202e\udcff") == "a é 🚀\n" + r"\r\x00\x9b\u202e\udcff"
    assert escape_unprintable("") == ""


# -- what is exported -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["best", *(pytest.param(w, marks=pytest.mark.full) for w in ("last", "checkpoint"))])
def test_the_same_weights_are_the_same_bytes(run: Path, tmp_path: Path, which: str) -> None:
    files = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for file in files:
        assert halfstep("export", run, "--weights", which, "--out", file).exit_code == 0
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as opened:
        told = opened.metadata()
    assert (told["format"], told["metric"], told["averaged"]) == ("pt", "iou", "true")
    assert len(load_file(files[0])) > 10


@pytest.mark.wording
def test_no_folder_is_made_for_an_export(run: Path, tmp_path: Path) -> None:
    done = halfstep("export", run, "--out", tmp_path / "absent" / "x.safetensors")
    assert done.exit_code == 73
    assert f"there is no folder {tmp_path / 'absent'}" in done.stderr
    assert not (tmp_path / "absent").exists()
