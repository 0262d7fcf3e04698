"""The command itself, stopped and started again: exit codes, words, and the same weights in the end."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from halfstep.journal.jsonl import iterate_saved_events
from tests.support.commands import Command

TRAIN = [
    *("train", "segmentation_tiny", "--fp32", "train.epochs=3", "train.seed=3"),
    *("data.samples=40", "checkpoint.every_steps=2", "run.pictures=0", "train.num_workers=2"),
]


def started(folder: Path, *more: str) -> Command:
    return Command(*TRAIN, f"run.dir={folder}", *more)


def ended(process: Command) -> tuple[int, str]:
    code, out, err = process.ended()
    return code, out + err


def steps(folder: Path) -> list[tuple[int, float]]:
    events = iterate_saved_events(folder / "journal.jsonl")
    return [(event["attempt"], event["loss"]) for event in events if event["event"] == "step"]


def until_step(folder: Path, number: int, process: Command) -> None:
    for _ in range(5000):
        if process.code is not None or len(steps(folder)) >= number:
            return
        time.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.wording
def test_a_command_that_is_stopped_goes_on_when_it_is_typed_again(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    alone = started(whole)
    first = started(cut)
    until_step(cut, 5, first)
    first.send_signal(signal.SIGTERM)
    code, said = ended(first)
    assert code == 75, said
    assert said.count("to resume:") == 1
    status = json.loads((cut / "status.rank-00000.json").read_text())
    assert (status["code"], status["restartable"]) == (75, True)

    second = started(cut)
    until_step(cut, len(steps(cut)) + 3, second)
    second.send_signal(signal.SIGKILL)
    assert ended(second)[0] == -signal.SIGKILL

    code, said = ended(started(cut, "optimizer.lr=0.5"))
    assert code == 79
    assert "optimizer.lr: 0.01 -> 0.5" in said
    assert "--accept-recipe-change" in said
    code, said = ended(started(cut))
    assert code == 0, said
    assert "resumed at step" in said
    assert ended(alone)[0] == 0
    assert steps(cut) == steps(whole)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, cut)]
    assert results[0]["weights"] == results[1]["weights"]
    assert results[0]["metrics"] == results[1]["metrics"]


@pytest.mark.wording
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_command_that_is_stopped_before_its_first_step_says_so(tmp_path: Path) -> None:
    process = started(tmp_path / "run")
    for _ in range(5000):
        if (tmp_path / "run").exists() or process.code is not None:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 75, said
    assert "at step 0 of" in said or "before the first step, so nothing was saved" in said
