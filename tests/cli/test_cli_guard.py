"""A run that goes wrong, as a person sees it who typed `halfstep train`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build

TASK = '''
import torch
from tests.support.troubled import InOneModule


class Mine(InOneModule):
    """A task whose fp16 overflows in one module."""
'''
SETTINGS = [
    "--fp16",
    "train.steps=12",
    "train.seed=3",
    "train.num_workers=0",
    "run.pictures=0",
    "loss_scale.init_scale=64",
]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    run = f"run.dir={tmp_path / 'run'}"
    return ["train", str(tmp_path / "mine.yaml"), "--task", str(tmp_path / "mine.py"), *SETTINGS, run]


def test_the_last_line_is_a_command_that_cures_it(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["halfstep", *words, "--guard", "watch"])
    failed = halfstep(*words, "--guard", "watch")
    assert failed.exit_code == 80
    assert all(line.startswith("halfstep train ") for line in failed.stderr.splitlines()), "it is said once"
    lines = failed.output.rstrip().splitlines()
    assert any(line.startswith("guard: precision: 2.up") for line in lines)
    assert [line for line in lines if line.startswith("Gave up after")]
    do = lines[-1].strip().removeprefix("do: ")
    typed = shlex.split(do)
    assert typed[0] == "halfstep"
    assert typed[-1] == "guard=repair"
    assert "watch" not in typed
    cured = halfstep(*typed[1:])
    assert cured.exit_code == 0, cured.output
    assert "guard: repaired: 2 computes in fp32" in cured.output
    assert "remedy of the guard: 2 computes in fp32" in cured.output


@pytest.mark.wording
def test_json_has_the_error_and_the_code(words: list[str]) -> None:
    failed = halfstep(*words, "--json")
    assert failed.exit_code == 80
    assert failed.stdout == ""
    assert "precision: 2.up" in failed.stderr
    assert "guard=repair" in failed.stderr or "guard" in failed.stderr


def test_what_was_cured_is_evaluated_with_its_cure(words: list[str], tmp_path: Path) -> None:
    assert halfstep(*words, "--guard", "repair").exit_code == 0
    told = halfstep("evaluate", tmp_path / "run", "--task", tmp_path / "mine.py", "--json")
    assert told.exit_code == 0, told.output
    measured = json.loads(told.stdout)["metrics"]["loss"]
    last = json.loads((tmp_path / "run" / "result.json").read_text())
    assert measured == pytest.approx(last["best"]["value"], rel=1e-6)
    assert [one["kind"] for one in last["remedies"]["placed"]] == ["island"]


@pytest.mark.wording
def test_a_mode_that_nobody_knows_is_refused_before_anything_is_made(words: list[str], tmp_path: Path) -> None:
    refused = halfstep(*words, "--guard", "repare")
    assert refused.exit_code == 78
    assert "did you mean repair?" in refused.output
    assert not (tmp_path / "run").exists()


def test_a_rate_that_is_too_high_is_told_with_a_lower_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["train.steps=40", "data.samples=24", "train.batch_size=4", "--fp32", "train.num_workers=0", "--lr", "1e9"]
    typed = ["train", "classification_tiny", *short, f"run.dir={tmp_path / 'run'}"]
    monkeypatch.setattr("sys.argv", ["halfstep", *typed])
    failed = halfstep(*typed)
    assert failed.exit_code == 80, failed.output
    do = failed.output.rstrip().splitlines()[-1]
    assert do.endswith("optimizer.lr=0.002 --accept-recipe-change"), "what the recipe has"
    assert "--lr" not in do
    assert "divergence" in failed.output
