"""`halfstep replay`: a run fails, and another process finds out why, to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.checkpoint.sealed import MANIFEST, add_seal, name_state_file
from halfstep.cli.main import build
from halfstep.errors import Diverged
from halfstep.guard.failed_steps.reading import list_failed_steps, read_failed_step
from halfstep.journal.events import Journal
from halfstep.precision.precision import resolve_precision_name
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import load_task_file
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.step.experiment.rerun import ReplayConfig, rerun_step
from halfstep.train.run import make_loop
from halfstep.train.run_folder import open_run
from tests.support import forked_python

TASK = '''
import torch
import torch.nn.functional as F
from torch import nn
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.train.task import Task

class Model(ModelOptions):
    factor: float = 1.0
    """What numbers are multiplied by, and divided by again."""

class Data(DataOptions):
    bad: int = -1
    """A point that is not finite."""

class Stretch(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.inner, self.factor = nn.Linear(16, 16), factor

    def forward(self, x):
        wide = self.inner(x) * self.factor  # the line
        return F.dropout(wide / self.factor, 0.3, self.training)

class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.a, self.stretch = nn.Linear(2, 16), Stretch(factor)
        self.norm, self.b = nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(self.norm(self.stretch(self.a(x))))

class Points:
    def __init__(self, bad):
        self.x = torch.rand(64, 2, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sum(1, keepdim=True)
        if bad >= 0:
            self.x[bad, 0] = float("nan")

    def __len__(self):
        return 64

    def read(self, index):
        return {"x": self.x[index], "y": self.y[index]}

    def name(self, index):
        return f"point {index}"

class Stretching(Task):
    schema = Recipe[Model, Data, LossOptions]
    metric = "loss"
    higher_is_better = False

    def model(self):
        return Net(self.recipe.model.factor)

    def source(self, split):
        return Points(self.recipe.data.bad if split == "train" else -1)

    def loss(self, model, batch, metrics=None):
        return F.mse_loss(model(batch["x"]).float(), batch["y"])
'''
RECIPE = "task: stretching\ntrain: {epochs: 2, batch_size: 8, seed: 0, num_workers: 0}\nrun: {pictures: 0}\n"
LINE = 1 + TASK.splitlines().index("        wide = self.inner(x) * self.factor  # the line")


def halfstep(*words: object, columns: int = 80) -> Result:
    return CliRunner().invoke(
        build(), [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": str(columns)}
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "stretching.py").write_text(TASK)
    (folder / "stretching.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def task(place: Path) -> Path:
    return place / "stretching.py"


def train(place: Path, name: str, *words: str) -> Result:
    return halfstep(
        "train", place / "stretching.yaml", "--task", place / "stretching.py", *words, f"run.dir={place / name}"
    )


@pytest.fixture(scope="module")
def failed(place: Path) -> Path:
    done = train(place, "failed", "--fp16", "model.factor=1e6")
    assert done.exit_code == 80, done.output
    return place / "failed"


@pytest.fixture
def run(failed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(failed, tmp_path / "run"))


def replayed(*words: object) -> dict[str, Any]:
    done = halfstep("replay", *words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- the same step ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_process_finds_the_same_culprit_and_the_same_loss_to_the_bit(place: Path, task: Path) -> None:
    folder = place / "bits"
    words = ["--fp16", "model.factor=1e6", "guard.skips_in_a_row=1", f"run.dir={folder}"]
    kind, _ = load_task_file(task)
    recipe = resolve_run_recipe(read_recipe(str(place / "stretching.yaml")), words, schema=kind.schema).recipe
    opened = open_run(recipe, "bits")
    loop = make_loop(kind(recipe), recipe, folder, Journal())
    with pytest.raises(Diverged):
        loop.run()
    loop.checkpoints.close()
    opened.lock.release()
    attempt = loop.stepper.attempt
    assert attempt is not None
    live = {
        name: rerun_step(loop.model, attempt, ReplayConfig(resolve_precision_name(name), scale=1.0)).loss
        for name in ("fp32", "bf16")
    }
    words = [sys.executable, "-m", "halfstep", "replay", str(folder), "--task", str(task), "--json"]
    done = forked_python.run(words, check=True, timeout=100)
    report = json.loads(done.stdout)
    rows = {row["way"]: row for row in report["reruns"]}
    assert {name: rows[name]["loss"] for name in live} == live
    assert not rows["as in the run: fp16"]["finite"]
    assert rows["fp16, stretch in fp32"]["finite"]
    culprit = report["verdict"]["culprit"]
    assert report["same_culprit"] is True
    assert culprit == report["recorded"]["verdict"]["culprit"]
    assert (culprit["operation"], culprit["module"], report["verdict"]["cause"]) == ("aten.mul", "stretch", "precision")
    assert culprit["line"].endswith(f"stretching.py:{LINE}")
    assert report["notes"] == []


@pytest.mark.slow
def test_a_recipe_that_comes_with_halfstep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    words = ["train", "classification_tiny", "optimizer.lr=1e6", "--bf16", "run.pictures=0", f"run.dir={folder}"]
    monkeypatch.setattr("sys.argv", ["halfstep", *words])
    done = halfstep(*words)
    assert done.exit_code == 80, done.output
    report = replayed(folder)
    assert report["verdict"]["cause"] == "divergence"
    assert report["same_culprit"] is True
    assert report["command"].endswith("recipe.yaml optimizer.lr=0.002 --accept-recipe-change"), "what the recipe has"
    assert "optimizer.lr=0.002 --accept-recipe-change" in done.output, "as the run itself said"
    headings = re.findall(r"\n\n(\w.*?)(?:  |\n)", halfstep("replay", folder).stdout)
    assert headings == ["Failed step", "Origin", "Run again", "Evidence", "What to do"]
    shown = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    assert re.findall(r"\n\n(\w.*?)(?:  |\n)", shown.split("```")[5]) == headings


def test_nothing_is_changed_by_a_replay(run: Path, task: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    replayed(run, "--task", task)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_the_verdict_comes_first_and_the_command_last(failed: Path, task: Path, columns: int) -> None:
    done = halfstep("replay", failed, "--task", task, columns=columns)
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert lines[0].startswith("precision: stretch (aten.mul,")
    assert lines[-1] == f"  $ halfstep train {failed}/recipe.yaml --guard repair --task {task}"
    assert max(map(len, lines[:-1])) <= columns
    assert "\x1b" not in done.stdout
    said = " ".join(done.stdout.split())
    for words in (
        "operation aten.mul",
        "module stretch",
        "(its largest number is 65,504)",
        "as in the run: fp16 no nan",
    ):
        assert words in said


def test_the_command_cures(run: Path, task: Path) -> None:
    command = replayed(run, "--task", task)["command"]
    done = halfstep(*shlex.split(command)[1:], f"run.dir={run}")
    assert done.exit_code == 0, done.output
    assert (run / "result.json").is_file()
    after = replayed(run, "--task", task)
    assert after["do"].endswith("the run did so already")
    assert after["command"] == ""


def test_another_precision_is_tried_and_advised_where_it_helps(run: Path, task: Path) -> None:
    report = replayed(run, "--task", task, "--precision", "bfloat16")
    assert (report["precision"], report["verdict"]) == ("bf16", None)
    assert [row["way"] for row in report["reruns"]] == ["bf16", "fp16", "fp32"]
    done = halfstep(*shlex.split(report["command"])[1:], f"run.dir={run}")
    assert done.exit_code == 0, done.output
    page = halfstep("replay", run, "--task", task, "--precision", "bf16")
    assert page.stdout.startswith("finite: in bf16, run again here, the step has a loss of ")


def test_a_point_that_is_not_finite_is_named(place: Path, task: Path) -> None:
    assert train(place, "data", "--fp32", "data.bad=3").exit_code == 0
    report = replayed(place / "data", "--task", task)
    assert report["verdict"]["cause"] == "data"
    assert report["do"] == "fix the samples named above, or remove them; this run continued without the batch"
    assert report["command"] == "", "it is finished, and there is nothing to remedy"
    page = " ".join(halfstep("replay", place / "data", "--task", task).stdout.split())
    assert page.startswith("data: ")
    assert "not finite before anything was computed from it came in the batch" in page


# -- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_failed_step_is_chosen_by_its_number_or_its_folder(failed: Path, task: Path) -> None:
    (only,) = list_failed_steps(failed)
    number = only.attempt
    for words in ([failed, "--attempt", number], [only.path]):
        assert replayed(*words, "--task", task)["recorded"]["attempt"] == number
    done = halfstep("replay", failed, "--attempt", 77, "--task", task)
    assert done.exit_code == 65
    assert "attempt 77" in done.stderr
    assert f"--attempt {number}" in done.stderr


def test_the_list_says_what_each_was(run: Path) -> None:
    (only,) = list_failed_steps(run)
    other = Path(shutil.copytree(only.path, only.path.with_name("step-00000099.0002")))
    (other / MANIFEST).write_text("{}")
    done = halfstep("replay", run, "--list")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "attempt 1 loss not finite in fp16 precision: stretch" in said
    assert "attempt 99 damaged: " in said
    assert said.endswith(f"$ halfstep replay {run} --attempt 1")
    rows = json.loads(halfstep("replay", run, "--list", "--json").stdout)["failed_steps"]
    assert [row["attempt"] for row in rows] == [1, 99]


@pytest.mark.parametrize("mode", ["watch", "off"])
def test_a_run_without_trouble_is_no_error(place: Path, mode: str) -> None:
    assert train(place, f"well-{mode}", "--fp32", f"guard={mode}").exit_code == 0
    done = halfstep("replay", place / f"well-{mode}")
    assert done.exit_code == 0
    assert "has no recorded failed step" in " ".join(done.stdout.split())
    assert ("guard: off" in done.stdout) == (mode == "off")
    assert json.loads(halfstep("replay", place / f"well-{mode}", "--json").stdout)["failed_steps"] == []


@pytest.mark.wording
def test_failed_steps_of_an_earlier_version_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "trouble" / "000001").mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text("task: segmentation\n")
    done = halfstep("replay", tmp_path)
    assert done.exit_code == 79
    assert "trouble contains failed steps of an earlier halfstep" in " ".join(done.stderr.split())
    (tmp_path / "failed_steps" / "000001").mkdir(parents=True)
    (tmp_path / "failed_steps" / "000001" / "failed_step.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "failed_steps" / "000001"):
        done = halfstep("replay", folder)
        assert done.exit_code == 79
        assert "failed_steps contains failed steps of an earlier halfstep" in " ".join(done.stderr.split())


@pytest.mark.wording
def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = halfstep("replay", tmp_path)
    assert done.exit_code == 65
    assert "contains no run" in done.stderr


# -- what is not as it was --------------------------------------------------------------------------------------------


def change(run: Path, environment: dict[str, Any] | None = None, **fields: Any) -> None:
    """With new digests and a new seal, as somebody would who knows how they are made."""
    place = list_failed_steps(run)[0].path
    content, manifest = (json.loads((place / name).read_text()) for name in (name_state_file(0), MANIFEST))
    content["record"].update(fields)
    text = json.dumps(content).encode()
    (place / name_state_file(0)).write_bytes(text)
    manifest["files"][name_state_file(0)] = [len(text), hashlib.sha256(text).hexdigest()]
    manifest["environment"] = manifest["environment"] if environment is None else environment
    manifest.pop("seal")
    (place / MANIFEST).write_bytes(add_seal(manifest))


def test_another_device_or_torch_is_said(run: Path, task: Path) -> None:
    environment = dict(read_failed_step(list_failed_steps(run)[0]).manifest.environment)
    change(run, environment={**environment, "device": "NVIDIA H100", "torch": "2.99.0"})
    report = replayed(run, "--task", task)
    assert any(note.startswith("device was NVIDIA H100, and is ") for note in report["notes"])
    assert any(note.startswith("torch was 2.99.0, and is ") for note in report["notes"])
    assert report["verdict"]["cause"] == "precision"


def test_a_step_that_is_finite_elsewhere_is_not_blamed_on_the_device(run: Path, task: Path, tmp_path: Path) -> None:
    mended = tmp_path / "mended.py"
    mended.write_text(TASK.replace(" * self.factor", "").replace(" / self.factor", ""))
    change(run, environment={})
    report = replayed(run, "--task", mended)
    assert report["verdict"] is None
    page = halfstep("replay", run, "--task", mended).stdout
    assert page.startswith("finite: in fp16, run again here")
    assert "the run said: precision: stretch" in page


def test_a_recipe_that_was_edited_is_said_and_safe_settings_are_not(run: Path, task: Path) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("mode: watch", "mode: repair"))
    assert replayed(run, "--task", task)["notes"] == []
    recipe.write_text(recipe.read_text().replace("batch_size: 8", "batch_size: 4"))
    assert replayed(run, "--task", task)["notes"] == ["recipe.yaml was changed since"]


@pytest.mark.wording
def test_another_model_is_refused(run: Path, task: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(TASK.replace("nn.Linear(2, 16)", "nn.Linear(2, 16, bias=False)"))
    done = halfstep("replay", run, "--task", other)
    assert done.exit_code == 79
    assert "a.bias" in done.stderr


@pytest.mark.wording
def test_a_record_without_tensors_is_listed_and_not_run(run: Path, task: Path) -> None:
    change(run, without="the batch is too large")
    done = halfstep("replay", run, "--task", task)
    assert done.exit_code == 65
    assert "the batch is too large" in done.stderr
    assert "cannot be run again: the batch is too large" in halfstep("replay", run, "--list").stdout


def test_words_of_a_record_cannot_command_a_terminal(run: Path) -> None:
    record = json.loads((list_failed_steps(run)[0].path / name_state_file(0)).read_text())["record"]
    record["verdict"]["sentence"] = "\x1b[2J[red]gone"
    record["report"]["reason"] = "\x1b]0;x"
    change(run, **record)
    done = halfstep("replay", run, "--list")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "[red]gone" in done.stdout


def test_an_interrupted_replay_says_what_it_has(run: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    counting = "    def loss(self, model, batch, metrics=None):\n"
    stop = "        self.calls = getattr(self, 'calls', 0) + 1\n"
    stop += "        if self.calls > 2:\n            raise KeyboardInterrupt\n"
    slow.write_text(TASK.replace(counting, counting + stop))
    done = halfstep("replay", run, "--task", slow, "--json")
    assert done.exit_code == 130
    report = json.loads(done.stdout)
    assert report["interrupted"] is True
    assert [row["way"] for row in report["reruns"]] == ["as in the run: fp16", "fp32"]
    page = halfstep("replay", run, "--task", slow)
    assert page.exit_code == 130
    assert page.stdout.startswith("interrupted")


def test_help_needs_no_torch() -> None:
    code = "import sys\nfrom halfstep.cli import replay\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
