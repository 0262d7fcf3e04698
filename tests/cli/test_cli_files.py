"""`halfstep verify` and `halfstep export` as a person types them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from faults.crash_story import commit_together
from halfstep import distributed
from halfstep.checkpoint.commit import RankSnapshot, commit_checkpoint
from halfstep.checkpoint.paths import Disk, list_generations
from halfstep.checkpoint.reading import read_rank_state
from halfstep.cli.main import build
from halfstep.errors import USAGE, HalfstepError
from halfstep.runs.verify import VerifiedRun, verify_checkpoints
from halfstep.train.state import COMPONENTS

pytestmark = pytest.mark.usefixtures("forked_python")
ROOT = Path(__file__).parents[2]
SHORT = ["train.steps=12", "train.batch_size=4", "checkpoint.every_steps=3", "checkpoint.keep=4", "run.pictures=0"]
RUNS: dict[str, list[str]] = {
    "unet": ["segmentation_tiny", "data.samples=64", "train.ema=0.9"],
    "smp": ["segmentation_tiny", "data.samples=64", "model.name=smp-unet", "model.encoder=resnet18"],
    "timm": ["classification_tiny", "data.samples=80", "train.ema=0.9"],
}
OWN = """
import os, random
import torch
from tests.support import tiny_task

class Own(tiny_task.Tiny):
    def begin(self, recipe):
        super().begin(recipe)
        self.draw = random.Random(7)

    def loss(self, model, batch, metrics=None):
        batch = {**batch, "x": batch["x"] + %s}
        return super().loss(model, batch, metrics)
"""
OWN_RECIPE = """
task: own
precision: fp32
train: {steps: 12, batch_size: 16, num_workers: 0, seed: 5}
checkpoint: {every_steps: 3, keep: 4}
run: {pictures: 0}
"""


def halfstep(*words: object, width: int = 80) -> Result:
    command = [str(word) for word in words]
    return CliRunner().invoke(build(), command, catch_exceptions=False, env={"COLUMNS": str(width)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run of each kind, trained when it is first asked for."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def get(name: str) -> Path:
        if name not in made:
            done = halfstep("train", *RUNS[name], *SHORT, "--fp32", f"run.dir={root / name}")
            assert done.exit_code == 0, done.output
            made[name] = root / name
        return made[name]

    return get


@pytest.fixture
def copied(trained: Any, tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(trained("unet"), tmp_path / "run"))


def newest(run: Path, place: int = 0) -> Path:
    return list_generations(run / "checkpoints")[place].path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def content(run: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time and its digest."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return {str(f): (f.stat().st_mtime_ns, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files}


# -- verify: every byte -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_a_whole_run_is_whole(trained: Any, width: int) -> None:
    run = trained("unet")
    before = content(run)
    done = halfstep("verify", run, width=width)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [[f"step-{n:08d}.{n // 3:04x}", "intact"] for n in (12, 9, 6, 3)]
    assert re.match(r"verified 7\.\d\d MiB in \d", lines[4])
    assert len(lines) == 5
    assert max(map(len, lines)) <= 80
    assert content(run) == before


def test_json_is_one_object_with_all_of_it(trained: Any) -> None:
    run = trained("unet")
    found = json.loads(halfstep("verify", run, "--json").stdout)
    sizes = [sum(f.stat().st_size for f in newest(run, n).glob("rank*")) for n in range(4)]
    assert [one["bytes"] for one in found["checkpoints"]] == sizes
    assert found["bytes"] == sum(sizes)
    assert {one["problem"] for one in found["checkpoints"]} == {None}
    assert (found["newest_whole"], found["set_aside"]) == (newest(run).name, [])


@pytest.mark.wording
def test_a_flipped_bit_in_the_newest_is_found_and_the_resume_foretold(copied: Path) -> None:
    (copied / "result.json").unlink()
    flip(newest(copied) / "rank-00000.safetensors")
    done = halfstep("verify", copied)
    assert done.exit_code == 65
    assert "step-00000012.0004  damaged" in done.stdout
    assert "  rank-00000.safetensors has the right size, but a different SHA-256 than was written\n" in done.stdout
    assert done.stdout.count("intact") == 3
    assert "1 of 4 checkpoints is damaged" in done.stderr
    assert "continues from step-00000009.0003 (step 9), and repeats at least 3 steps" in done.stderr
    told = json.loads(halfstep("verify", copied, "--json").stdout)
    assert told["newest_whole"] == "step-00000009.0003"
    assert [one["whole"] for one in told["checkpoints"]] == [False, True, True, True]


@pytest.mark.wording
def test_an_older_one_that_is_damaged_is_told_and_does_no_harm(copied: Path) -> None:
    (copied / "result.json").unlink()
    file = newest(copied, 2) / "rank-00000.json"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    (newest(copied, 3) / "MANIFEST.json").unlink()
    done = halfstep("verify", copied)
    assert done.exit_code == 65
    assert f"rank-00000.json has 100 bytes, {size:,} were written" in done.stdout
    assert "its manifest: No such file" in done.stdout
    assert "2 of 4 checkpoints are damaged" in done.stderr
    assert "continues from step-00000012.0004, the newest, which is intact" in done.stderr


@pytest.mark.wording
def test_a_finished_run_needs_its_checkpoints_no_more(copied: Path) -> None:
    flip(newest(copied) / "rank-00000.safetensors")
    done = halfstep("verify", copied, "--resume")
    assert done.exit_code == 65
    assert "the run is finished" in done.stderr
    assert "bitwise" not in done.stdout


@pytest.mark.wording
def test_where_none_is_whole_a_resume_is_refused(copied: Path) -> None:
    for one in list_generations(copied / "checkpoints"):
        flip(one.path / "rank-00000.json")
    done = halfstep("verify", copied)
    assert done.exit_code == 65
    assert "none of the 4 checkpoints is intact" in done.stderr


def test_what_an_earlier_resume_set_aside_is_told_and_is_no_failure(copied: Path) -> None:
    bad = newest(copied).rename(newest(copied).with_name(f"{newest(copied).name}.bad"))
    done = halfstep("verify", copied)
    assert done.exit_code == 0
    assert f"{bad.name} was set aside by an earlier launch: it was damaged, or" in done.stdout


@pytest.mark.wording
@pytest.mark.parametrize("absent", ["all of it", "what is in it"])
def test_without_checkpoints_there_is_nothing_to_verify(copied: Path, absent: str) -> None:
    shutil.rmtree(copied / "checkpoints")
    if absent == "what is in it":
        (copied / "checkpoints").mkdir()
    done = halfstep("verify", copied, "--json")
    assert done.exit_code == 65
    assert "has no checkpoints" in done.stderr
    assert json.loads(done.stdout)["checkpoints"] == []


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


@pytest.mark.wording
def test_a_pickle_in_a_files_place_is_refused_and_not_run(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (newest(copied, 1) / "rank-00000.safetensors").write_bytes(pickle.dumps(Bomb()))
    for words in (["verify"], ["verify", "--json"]):
        done = halfstep(words[0], copied, *words[1:])
        assert done.exit_code == 77
        assert "pickle" in done.stderr
    assert not Path("exploded").exists()


@pytest.mark.wording
@pytest.mark.parametrize("command", ["verify", "export"])
def test_a_folder_without_a_run_is_refused(command: str, tmp_path: Path) -> None:
    for place, said in ((tmp_path, "contains no run"), (tmp_path / "absent", "there is no folder")):
        done = halfstep(command, place)
        assert done.exit_code == 65
        assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def snapshot(attempt: int) -> RankSnapshot:
    return RankSnapshot(attempt, {"at": attempt}, {"x": torch.full((5000,), float(attempt))})


def test_a_run_that_is_saving_all_the_time_is_never_found_damaged(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: tiny\n")
    stop, folder = threading.Event(), tmp_path / "checkpoints"

    def save() -> None:
        attempt = 0
        while not stop.is_set():
            attempt += 1
            commit_checkpoint(folder, snapshot(attempt), keep=2, disk=Disk(), party=distributed.RankGroup())

    saving = threading.Thread(target=save)
    saving.start()
    problems: set[str | None] = set()
    names: set[str] = set()
    deadline = time.monotonic() + 30
    try:
        while len(names) < 100 and time.monotonic() < deadline:
            verdicts = verify_checkpoints(tmp_path).verdicts
            problems |= {one.problem for one in verdicts}
            names |= {one.generation.name for one in verdicts}
    finally:
        stop.set()
        saving.join()
    assert problems == {None}
    assert len(names) > 20


@pytest.mark.parametrize(
    ("hashing", "copying", "from_disk", "said"),
    [
        (0.6, 0.2, 1000, "SHA-256 on one core"),
        (0.2, 0.6, 0, "copying out of the system's cache"),
        (0.2, 0.1, 1000, "the disk"),
        (0.2, 0.1, 0, "other programs on the cores"),
    ],
)
def test_what_limits_is_what_took_most_of_the_time(hashing: float, copying: float, from_disk: int, said: str) -> None:
    assert VerifiedRun([], 1000, 1.0, hashing, copying, from_disk).limited_by == said


def test_a_large_checkpoint_has_a_speed_and_what_limits_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: tiny\n")
    large = dataclasses.replace(snapshot(1), tensors={"x": torch.zeros(40_000_000)})
    commit_checkpoint(tmp_path / "checkpoints", large, keep=2, disk=Disk(), party=distributed.RankGroup())
    found = json.loads(halfstep("verify", tmp_path, "--json").stdout)
    assert found["bytes_per_second"] == pytest.approx(found["bytes"] / found["seconds"])
    assert min(found["seconds_hashing"], found["seconds_copying"]) >= 0
    assert found["seconds_hashing"] + found["seconds_copying"] < 1.1 * found["seconds"] + 0.02
    assert " GB/s, limited by " in halfstep("verify", tmp_path).stdout


# -- verify: k + k = 2k -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [("unet", 80), pytest.param("timm", 120, marks=pytest.mark.full)])
def test_a_resume_is_proven_exact(trained: Any, name: str, width: int) -> None:
    run = trained(name)
    before = content(run)
    done = halfstep("verify", run, "--resume", width=width)
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith("3 + 3 = 6 steps: bitwise equal (12 components, ")
    assert last.endswith(" tensors, 6 losses), from step 6")
    assert content(run) == before
    found = json.loads(halfstep("verify", run, "--resume", "--steps", 1, "--json").stdout)["proof"]
    assert (found["equal"], found["begin"], found["losses"]) == (True, 9, 2)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("noise", "code", "title"),
    [
        ("0.1 * torch.rand(1)", 0, ""),
        ("0.1 * self.draw.random()", 70, "3 + 3 steps are not 6 steps:"),
        ("os.urandom(1)[0] / 2560", 70, "the same 3 steps gave two results, even before a resume:"),
    ],
)
def test_a_task_with_randomness_of_its_own(tmp_path: Path, noise: str, code: int, title: str) -> None:
    (tmp_path / "own.py").write_text(OWN % noise)
    (tmp_path / "own.yaml").write_text(OWN_RECIPE)
    run, task = tmp_path / "run", ["--task", tmp_path / "own.py"]
    assert halfstep("train", tmp_path / "own.yaml", *task, f"run.dir={run}").exit_code == 0
    before = content(run)
    done = halfstep("verify", run, "--resume", *task)
    assert done.exit_code == code, done.output
    assert content(run) == before
    if code:
        assert title in done.stderr
        step = 10 if "are not" in title else 7
        assert f"the loss of step {step} is " in done.stderr
        assert "weights/parameters/0.weight[0, 0] is " in done.stderr
        assert "do: look in the task for its own generator" in done.stderr
    told = json.loads(halfstep("verify", run, "--resume", *task, "--json").stdout)
    assert told["proof"]["equal"] == (code == 0)


@pytest.mark.wording
def test_a_run_of_two_processes_is_verified_and_not_trained(copied: Path) -> None:
    commit_together(copied / "checkpoints", [snapshot(15)] * 2, keep=1, disks=[Disk()] * 2)
    done = halfstep("verify", copied)
    assert done.exit_code == 0, done.output
    assert "by 2 processes" in done.stdout
    done = halfstep("verify", copied, "--resume")
    assert done.exit_code == 78
    assert "--resume for a run of 2 processes" in done.stderr


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "2"], "--steps without --resume"),
        (["--task", "x.py"], "--task without --resume"),
        (["--resume", "--steps", "7"], "--steps 6"),
        (["--resume", "--task", "absent.py"], "absent.py"),
    ],
)
def test_what_cannot_be_proven_is_refused(trained: Any, words: list[str], said: str) -> None:
    done = halfstep("verify", trained("unet"), *words)
    assert done.exit_code == 78
    assert said in done.stderr


# -- export -----------------------------------------------------------------------------------------------------------


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.full
def test_averaged_weights_or_those_that_were_trained(trained: Any, tmp_path: Path) -> None:
    run, out = trained("unet"), tmp_path / "x.safetensors"
    for which in ("last", "checkpoint"):
        for flag, file in (("--ema", "last-ema"), ("--no-ema", "last")):
            done = halfstep("export", run, "--weights", which, flag, "--out", out, "--force", "--json")
            assert done.exit_code == 0, done.output
            told = json.loads(done.stdout)
            # The run ends with its last checkpoint, so both have the same weights.
            assert same(load_file(out), load_file(run / f"{file}.safetensors"))
            assert (told["step"], told["averaged"]) == (12, flag == "--ema")
            assert (told["metric"]["value"] is not None) == (which == "last" and flag == "--ema")
    assert not same(load_file(run / "last.safetensors"), load_file(run / "last-ema.safetensors"))
    for flag, where, said in (("--no-ema", run, "--weights last --no-ema"), ("--ema", trained("smp"), "train.ema")):
        done = halfstep("export", where, flag, "--out", out, "--force")
        assert done.exit_code == 78
        assert said in done.stderr


def test_an_unfinished_run_gives_its_newest_whole_checkpoint(copied: Path, tmp_path: Path) -> None:
    (copied / "result.json").unlink()
    flip(newest(copied) / "rank-00000.safetensors")
    before = content(copied)
    done = halfstep("export", copied, "--no-ema", "--out", tmp_path / "x.safetensors")
    assert done.exit_code == 0, done.output
    assert "unet from step-00000009.0003 (step 9, epoch 1)" in done.stdout
    _, tensors = read_rank_state(list_generations(copied / "checkpoints")[1], 0)
    written = load_file(tmp_path / "x.safetensors")
    for name, tensor in written.items():
        found = tensors.get(f"weights/parameters/{name}", tensors.get(f"weights/buffers/{name}"))
        assert found is not None
        assert torch.equal(tensor, found), name
    assert content(copied) == before


@pytest.mark.wording
def test_weights_that_are_not_finite_are_refused(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    best = load_file(copied / "best.safetensors")
    next(tensor for tensor in best.values() if tensor.is_floating_point()).view(-1)[0] = float("nan")
    save_file(best, copied / "best.safetensors")
    plain, tensors = read_rank_state(list_generations(copied / "checkpoints")[0], 0)
    for name, tensor in tensors.items():
        if name.startswith("ema/averages/"):
            tensor.view(-1)[0] = float("inf")
    commit_checkpoint(
        copied / "checkpoints", RankSnapshot(12, plain, tensors), keep=2, disk=Disk(), party=distributed.RankGroup()
    )
    for which in ("best", "checkpoint"):
        done = halfstep("export", copied, "--weights", which, "--out", out)
        assert done.exit_code == 65, done.output
        assert "not finite" in done.stderr
    assert not out.exists()


@pytest.mark.wording
def test_a_file_that_is_there_is_kept_unless_it_is_forced(trained: Any, tmp_path: Path) -> None:
    run, out = trained("unet"), tmp_path / "x.safetensors"
    out.write_bytes(b"mine")
    done = halfstep("export", run, "--out", out)
    assert done.exit_code == 73
    assert "--force" in done.stderr
    assert out.read_bytes() == b"mine"
    assert halfstep("export", run, "--out", out, "--force").exit_code == 0
    assert len(load_file(out)) > 10


@pytest.mark.wording
@pytest.mark.parametrize(
    ("out", "code", "said"),
    [
        ("x.pt", 78, "we write none"),
        ("x.PTH", 78, "we write none"),
        ("x", 78, "x.safetensors"),
        ("folder.safetensors", 73, "another name"),
        ("run/best.safetensors", 73, "the run's own"),
        ("run/checkpoints/step-00000012.0004/rank-00000.safetensors", 73, "the run's own"),
        ("file/x.safetensors", 74, "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_is_refused(copied: Path, tmp_path: Path, out: str, code: int, said: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    before = content(tmp_path)
    done = halfstep("export", copied, "--out", tmp_path / out, "--force")
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "do:" in done.stderr
    assert content(tmp_path) == before


@pytest.mark.wording
def test_a_word_that_is_no_source_is_refused(trained: Any) -> None:
    done = halfstep("export", trained("smp"), "--weights", "bets")
    assert done.exit_code == 78
    assert "did you mean 'best'?" in done.stderr


@pytest.mark.wording
def test_without_checkpoints_an_unfinished_run_gives_nothing(copied: Path) -> None:
    (copied / "result.json").unlink()
    shutil.rmtree(copied / "checkpoints")
    done = halfstep("export", copied)
    assert done.exit_code == 65
    assert "has no checkpoints" in done.stderr


@pytest.mark.wording
def test_where_no_checkpoint_is_whole_the_files_beside_them_are_offered(copied: Path) -> None:
    for one in list_generations(copied / "checkpoints"):
        flip(one.path / "rank-00000.json")
    done = halfstep("export", copied, "--weights", "checkpoint")
    assert done.exit_code == 65
    assert "no intact checkpoint" in done.stderr
    assert "do: write --weights best" in done.stderr


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_component_and_every_exit_code() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [row.strip("`") for row in rows if row in {f"`{name}`" for name in COMPONENTS}] == list(COMPONENTS)
    codes = {kind.exit_code for kind in _below(HalfstepError)}
    assert {str(code) for code in codes | {0, USAGE}} <= set(rows)


def _below(kind: type[HalfstepError]) -> list[type[HalfstepError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in _below(child))]
