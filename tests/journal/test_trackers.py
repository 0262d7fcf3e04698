"""What trackers are fed with, and that TensorBoard really has it."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from halfstep.draw.images import write_png
from halfstep.errors import MissingExtra, UnknownName
from halfstep.journal.events import Journal
from halfstep.journal.listeners import create_tracker_listeners
from halfstep.journal.trackers import TRACKERS, ScalarConverter, suggest_tracker_commands
from tests.journal.told import epoch, note, speed, start, step, whole_run


def test_scalars_are_told_as_often_as_the_log() -> None:
    scales = ScalarConverter()
    assert scales.on_event(start()) is None
    assert scales.on_event(step(1, "gradient_overflow", loss_scale=65536.0)) is None
    assert scales.on_event(step(2, loss_scale=32768.0)) is None
    told = scales.on_event(speed())
    assert told is not None
    assert told.attempt == 2
    assert told.values == {
        "train/loss": 1.0,
        "train/lr": 5e-4,
        "train/loss_scale": 32768.0,
        "train/grad_norm": 1.25,
        "train/skipped": 1.0,
        "speed/samples_per_second": 123.4,
        "speed/wait_share": 0.03,
        "speed/host_bytes": 3 * 2.0**30,
        "train/iou": 0.6543,
    }
    assert scales.on_event(note("nothing")) is None


def test_an_epoch_tells_both_sides_and_the_last_step_if_nobody_did() -> None:
    scales = ScalarConverter()
    scales.on_event(start())
    scales.on_event(step(3))
    told = scales.on_event(epoch())
    assert told is not None
    assert told.attempt == 3
    both = {"train_epoch/loss": 0.2345, "train_epoch/iou": 0.6543, "val/loss": 0.2567, "val/iou": 0.6234}
    assert both.items() <= told.values.items()
    assert told.values["train/loss"] == step(3)["loss"]
    again = scales.on_event(epoch(2, val=None))
    assert again is not None
    assert sorted(again.values) == ["train_epoch/iou", "train_epoch/loss"]


def test_gpu_meters_and_what_is_not_known() -> None:
    scales = ScalarConverter()
    told = scales.on_event(speed(gpu={"utilisation": 0.5, "power_watts": None}, memory=None, train_metrics=None))
    assert told is not None
    assert told.attempt == 0
    assert told.values == {"speed/samples_per_second": 123.4, "speed/wait_share": 0.03, "gpu/utilisation": 0.5}


def test_tensorboard_has_what_the_journal_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    journal = Journal(create_tracker_listeners("tensorboard", tmp_path))
    for event in whole_run("fp16"):
        journal.emit(**{name: value for name, value in event.items() if name != "time"})
    assert len(journal.listeners) == 1, "the listener was left out"
    journal.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = [(e.step, e.value) for e in read.Scalars("train/loss")]
    assert [attempt for attempt, _ in losses] == [10, 20, 30, 40]
    assert losses[0][1] == pytest.approx(0.6)
    assert [e.value for e in read.Scalars("train/skipped")] == [2.0, 2.0, 3.0, 3.0]
    assert [(e.step, round(e.value, 4)) for e in read.Scalars("val/iou")] == [(20, 0.6234), (40, 0.6234)]
    assert [e.value for e in read.Scalars("train/loss_scale")] == [8192.0] * 4
    assert "recipe/text_summary" in read.Tags()["tensors"]


def test_tensorboard_takes_numbers_that_are_not_finite(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (listener,) = create_tracker_listeners("tensorboard", tmp_path)
    for event in (start(), step(1, "loss_not_finite", loss=math.nan), speed()):
        listener.on_event(event)
    listener.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert math.isnan(read.Scalars("train/loss")[0].value)


def test_tensorboard_has_the_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_png(tmp_path / "pictures" / "epoch-0002.png", np.zeros((5, 7, 3), np.uint8))
    (listener,) = create_tracker_listeners("tensorboard", tmp_path)
    picture = {"event": "saved", "time": 2.0, "kind": "picture", "file": "pictures/epoch-0002.png"}
    for event in (start(), step(12), picture):
        listener.on_event(event)
    listener.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (found,) = read.Images("pictures")
    assert (found.step, found.width, found.height) == (12, 7, 5)
    assert found.encoded_image_string == (tmp_path / "pictures" / "epoch-0002.png").read_bytes()


def test_the_end_of_a_run_says_what_to_type(tmp_path: Path) -> None:
    def lines(tracker: str) -> list[str]:
        return suggest_tracker_commands({"recipe": {"run": {"tracker": tracker}}, "dir": str(tmp_path / "a run")})

    assert [lines(name) for name in TRACKERS] == [[], [], [], []], "nothing was left there"
    (tmp_path / "a run" / "tensorboard").mkdir(parents=True)
    (tmp_path / "a run" / "wandb" / "offline-run-20260101_000000-abc").mkdir(parents=True)
    assert lines("tensorboard") == [f"to view it: tensorboard --logdir '{tmp_path}/a run/tensorboard'"]
    assert lines("wandb") == [f"to upload it: wandb sync '{tmp_path}/a run/wandb'/offline-run-*"]
    assert lines("none") == suggest_tracker_commands({}) == []


@pytest.mark.wording
def test_a_tracker_that_is_not_installed_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    with pytest.raises(MissingExtra, match=r"pip install 'halfstep\[wandb\]'"):
        create_tracker_listeners("wandb", tmp_path)
    # A folder of its name, such as its runs leave behind, can be imported, and must not pass for it.
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(MissingExtra, match=r"pip install 'halfstep\[wandb\]'"):
            create_tracker_listeners("wandb", tmp_path)
    finally:
        sys.modules.pop("wandb", None)


@pytest.mark.wording
def test_no_tracker_and_no_such_tracker(tmp_path: Path) -> None:
    assert create_tracker_listeners("none", tmp_path) == []
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        create_tracker_listeners("tensorbord", tmp_path)
