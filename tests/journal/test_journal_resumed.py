"""A run that was killed and is taken up again: its journal, log, tracker and curves are those of one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.draw.curves import draw_curves
from halfstep.journal.events import Event, Journal
from halfstep.journal.jsonl import JOURNAL, LOG, read_events, read_journal_sizes, read_last_time, truncate_journal
from halfstep.journal.listeners import create_listeners
from halfstep.journal.trackers import ScalarConverter
from tests.journal.told import epoch, resumed, saved, speed, start, step, until, whole_run

AT = 15
"""The attempt of the checkpoint, in the middle of the first epoch; the run is killed later."""


def tell(journal: Journal, events: list[Event]) -> None:
    for event in events:
        journal.emit(**{name: value for name, value in event.items() if name != "time"})


def killed_and_taken_up(folder: Path, kind: str, killed_at: int, tracker: str = "none") -> list[Event]:
    """A run that is killed after a checkpoint at `AT`, and its second part; the events of a run without a break."""
    events = whole_run(kind)
    kept = until(events, AT)
    first = Journal(create_listeners(folder, tracker=tracker, console=None))
    tell(first, events[:kept])
    then = read_journal_sizes(folder)
    tell(first, [saved(AT, 7), *events[kept : until(events, killed_at)]])
    first.close()
    truncate_journal(folder, then)
    if tracker != "none":
        _next_second()
    again = create_listeners(folder, tracker=tracker, console=None, resumed_at=AT)
    second = Journal(again, began_with=read_last_time(folder / JOURNAL))
    tell(second, [start(events[0]["precision"]["chosen"], resumed=resumed(AT, repeated_steps=killed_at - AT))])
    tell(second, events[kept:])
    assert second.listeners == again, "a listener was left out"
    second.close()
    return events


@pytest.mark.parametrize("killed_at", [AT, 18, 33])
def test_the_journal_has_every_attempt_once_and_two_starts(tmp_path: Path, killed_at: int) -> None:
    whole = killed_and_taken_up(tmp_path, "nan", killed_at)
    events = read_events(tmp_path / JOURNAL)
    assert [e["attempt"] for e in events if e["event"] == "step"] == list(range(1, 41))
    assert [e["event"] for e in events].count("start") == 2
    assert [e["event"] for e in events if e["event"] != "start"] == [e["event"] for e in whole if e["event"] != "start"]
    assert "checkpoint" not in {e.get("kind") for e in events}, "the journal was not cut back to before the save"


@pytest.mark.usefixtures("drawn_curves")
@pytest.mark.parametrize("kind", ["fp16", "nan"])
def test_the_curves_are_those_of_a_run_without_a_break(tmp_path: Path, kind: str) -> None:
    whole = killed_and_taken_up(tmp_path, kind, 33)
    draw_curves(whole, tmp_path / "whole.svg")
    assert (tmp_path / "curves.svg").read_bytes() == (tmp_path / "whole.svg").read_bytes()
    draw_curves(whole[until(whole, AT) :], tmp_path / "half.svg")
    assert (tmp_path / "half.svg").read_bytes() != (tmp_path / "whole.svg").read_bytes()


def test_the_log_goes_on_without_the_lines_of_what_is_done_again(tmp_path: Path) -> None:
    killed_and_taken_up(tmp_path, "fp16", 33)
    text = (tmp_path / LOG).read_text()
    assert text.count("skipped attempt 30") == 1
    assert text.count("Epoch 1 Summary:") == 1
    assert [event["recipe"]["task"] for event in read_events(tmp_path / JOURNAL) if event["event"] == "start"] == [
        "segmentation",
        "segmentation",
    ]
    assert "  recipe" not in text
    assert text.count("checkpoints/") == 0
    assert f"\nresumed at step {AT} of 40 from checkpoint step-00000015.0007 (18 steps are repeated)\n" in text
    assert text.index("resumed at step") < text.rindex("Mixed precision training")
    assert "3 skipped (gradient_overflow) · last saved at step 15 ·" in text


@pytest.mark.parametrize("killed_at", [18, 33])
def test_tensorboard_has_every_step_once(tmp_path: Path, killed_at: int) -> None:
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

    killed_and_taken_up(tmp_path, "fp16", killed_at, "tensorboard")
    page = plugin_event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    page.Reload()
    assert [e.step for e in page.Tensors("train/loss")] == [10, 20, 30, 40]
    assert [e.step for e in page.Tensors("val/iou")] == [20, 40]
    read = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [e.step for e in read.Scalars("train/loss")] == [10, 20, 30, 40]
    assert [e.value for e in read.Scalars("train/skipped")] == [2.0, 2.0, 3.0, 3.0]
    assert [e.step for e in read.Scalars("val/iou")] == [20, 40]
    assert [e.step for e in read.Tensors("recipe/text_summary")] == [1]


def _next_second() -> None:
    """Files of one second are read in the order of their names, in which a counter's 10 comes before its 9."""
    time.sleep(1.0 - time.time() % 1.0 + 0.01)


def _scalars_of(folder: Path, parts: list[tuple[int | None, list[Event]]]) -> tuple[list[int], list[int]]:
    """The steps of the loss and of the recipe, after runs that each were killed."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    from halfstep.journal.tensorboard import TensorBoard

    for resumed_at, events in parts:
        _next_second()
        listener = TensorBoard(folder, resumed_at)
        for event in events:
            listener.on_event(event)
        listener.close()
    read = EventAccumulator(str(folder))
    read.Reload()
    return [e.step for e in read.Tensors("train/loss")], [e.step for e in read.Tensors("recipe/text_summary")]


def test_tensorboard_of_a_run_that_starts_again_from_nothing(tmp_path: Path) -> None:
    again = start(resumed={"checkpoint": None, "attempt": 0})
    parts: list[tuple[int | None, list[Event]]] = [
        (None, [start(), step(1), speed(), step(2), speed()]),
        (0, [again, step(1), speed()]),
    ]
    assert _scalars_of(tmp_path, parts) == ([1], [1])


def test_tensorboard_has_a_changed_recipe_from_its_first_step(tmp_path: Path) -> None:
    changed = start(resumed=resumed(2, changed=["train.lr: 1 -> 2"]))
    parts: list[tuple[int | None, list[Event]]] = [
        (None, [start(), step(2), speed(), step(3), speed()]),
        (2, [changed, step(3), speed()]),
        (2, [changed, step(3), speed(), step(4), speed()]),
    ]
    assert _scalars_of(tmp_path, parts) == ([2, 3, 4], [1, 3])


def test_what_tensorboard_heard_before_a_checkpoint_is_on_disk_after_it(tmp_path: Path) -> None:
    from halfstep.journal.tensorboard import TensorBoard

    listener = TensorBoard(tmp_path)
    for event in (start(), *(event for n in range(1, 40) for event in (step(n), speed())), saved(40)):
        listener.on_event(event)
    (file,) = tmp_path.iterdir()
    after_the_checkpoint = file.stat().st_size
    listener.close()
    assert after_the_checkpoint == file.stat().st_size


def test_an_evaluation_that_is_all_that_was_left_belongs_to_the_step_before_it() -> None:
    scales = ScalarConverter()
    scales.on_event(start(resumed=resumed(20)))
    told = scales.on_event(epoch(1))
    assert told is not None
    assert told.attempt == 20


def test_time_goes_on_where_it_was(tmp_path: Path) -> None:
    killed_and_taken_up(tmp_path, "bf16", 18)
    heard: list[Event] = []

    class EventList:
        on_event: Callable[[Event], None] = staticmethod(heard.append)

        def close(self) -> None: ...

    Journal([EventList()], began_with=1000.0).emit("note", text="")
    assert 1000.0 <= heard[0]["time"] < 1001.0
    times = [e["time"] for e in read_events(tmp_path / JOURNAL)]
    assert times == sorted(times)


def test_a_journal_that_is_lost_or_damaged_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    bad = b'\x00{"\n{"event":"step"}\n{"event":"saved","kind":"checkpoint","file":3}\n{"event":7}\n'
    for content in (None, b"", bad):
        if content is not None:
            (tmp_path / JOURNAL).write_bytes(content)
        for listener in create_listeners(tmp_path, tracker="none", console=None, resumed_at=3):
            listener.close()
