"""A run that was ended and is taken up again: what people read."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from halfstep.journal import console
from halfstep.journal.console import LiveConsole
from halfstep.journal.events import Event
from halfstep.journal.guide import GuideLog, GuideScreen
from halfstep.journal.latest import LatestEvents
from halfstep.journal.plain import PlainListener
from halfstep.journal.status_items import list_status_items
from halfstep.journal.text import MOST_LINES, describe_ending
from halfstep.journal.text import describe_resume as words_of
from tests.journal.screen import Screen
from tests.journal.told import end, resumed, saved, start, step, until, whole_run

AT = 15


def plain_lines(events: list[Event]) -> list[str]:
    stream = io.StringIO()
    listener = PlainListener(stream, GuideLog())
    for event in events:
        listener.on_event(event)
    return stream.getvalue().splitlines()


def live_lines(history: list[Event], events: list[Event], width: int = 100) -> list[str]:
    """What is on a terminal before the area is taken away."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    live = LiveConsole(
        Console(file=stream, force_terminal=True, width=width, height=40, legacy_windows=False), GuideScreen()
    )
    for event in history:
        live.restore_event(event)
    assert raw.getvalue() == b"", "what was told before is told again"
    for event in events:
        live.on_event(event)
    live._live.refresh()
    lines = Screen(width).feed(raw.getvalue().decode()).lines()
    live.close()
    return lines


def test_a_first_start_says_nothing_of_it() -> None:
    assert words_of(start()) == words_of(start(resumed=None)) == []
    assert "  batch       4 × 2 devices × 2 micro-batches = 16 per step" in plain_lines([start(resumed=None)])


@pytest.mark.parametrize(
    ("repeated", "ending"),
    [
        (14, " (14 steps are repeated)"),
        (1, " (1 step is repeated)"),
        (0, ""),
        (None, ""),
        (1234, " (1,234 steps are repeated)"),
    ],
)
def test_where_it_goes_on(repeated: int | None, ending: str) -> None:
    event = start(steps=30_000, resumed=resumed(12_000, repeated_steps=repeated))
    assert words_of(event) == [(f"resumed at step 12,000 of 30,000 from checkpoint step-00012000.0007{ending}", False)]


def test_what_is_not_as_it_was_has_a_line_each_right_after_the_title() -> None:
    field = resumed(
        exact=False,
        reasons=["torch was 2.12.0", "2 processes are 1"],
        changed=["train.lr: 0.001 -> 0.0005"],
        rejected_checkpoints=["step-00000018.0008: rank-00000.safetensors is cut off"],
    )
    told = [
        "resumed at step 15 of 40 from checkpoint step-00000015.0007 (3 steps are repeated)",
        "APPROXIMATE because torch was 2.12.0",
        "APPROXIMATE because 2 processes are 1",
        "accepted change: train.lr: 0.001 -> 0.0005",
        "rejected checkpoint step-00000018.0008: rank-00000.safetensors is cut off",
    ]
    items = words_of(start(resumed=field))
    assert [item.text for item in items] == told
    assert [item.alarm for item in items] == [False, True, True, False, True]
    warned = [f"warning: {text}" if alarm else text for text, alarm in items]
    assert plain_lines([start(resumed=field)])[1:6] == warned
    assert live_lines([], [start(resumed=field)])[1:6] == told


def test_not_exact_for_no_reason_is_still_said() -> None:
    assert words_of(start(resumed=resumed(exact=False)))[1].text == "APPROXIMATE because exactness is unknown"


@pytest.mark.parametrize(
    ("accepted", "because"),
    [
        (["recipe"], ["the recipe was changed"]),
        (["data"], ["the data was changed"]),
        (["recipe", "data"], ["the recipe was changed", "the data was changed"]),
    ],
)
def test_a_change_that_was_accepted_is_the_reason_where_there_is_no_other(
    accepted: list[str], because: list[str]
) -> None:
    changed = ["train.steps: 40 -> 29", "val: 9 samples, saved 8"]
    items = words_of(start(resumed=resumed(exact=False, changed=changed, accepted=accepted)))
    told = [f"APPROXIMATE because {reason}" for reason in because] + [f"accepted change: {line}" for line in changed]
    assert [item.text for item in items[1:]] == told


def test_a_run_that_is_beyond_its_new_end_says_so() -> None:
    (item,) = words_of(start(steps=29, resumed=resumed(50, repeated_steps=0)))
    where = "resumed at step 50 from checkpoint step-00000050.0007"
    assert item.text == f"{where}: the run is already beyond its new end, step 29"
    (at_its_end,) = words_of(start(steps=50, resumed=resumed(50, repeated_steps=0)))
    assert at_its_end.text == where.replace("step 50", "step 50 of 50")


def test_many_reasons_are_few_lines_and_cannot_speak_to_the_terminal() -> None:
    items = words_of(start(resumed=resumed(changed=[f"file \x1b[2J{n}\n" for n in range(1000)])))
    assert len(items) == 1 + MOST_LINES + 1
    assert items[-1].text == "accepted change: 980 more, which are in the journal"
    assert all(item.text.isprintable() for item in items)


def test_a_run_without_a_checkpoint_starts_again_and_says_all() -> None:
    lines = plain_lines([start(resumed={"checkpoint": None, "attempt": 0})])
    assert lines[1] == "started again from step 0: the run ended before its first checkpoint"
    assert "  batch       4 × 2 devices × 2 micro-batches = 16 per step" in lines


def test_the_live_console_goes_on_with_the_counts_and_tells_no_history() -> None:
    history = whole_run("fp16")[: until(whole_run("fp16"), AT)]
    lines = live_lines(history, [start("fp16", resumed=resumed()), step(16, loss_scale=8192.0)], width=120)
    assert sum("resumed at step 15 of 40" in line for line in lines) == 1
    assert not any("recipe:" in line or "observed" in line for line in lines)
    assert "16/40" in lines[-2]
    assert lines[-1].endswith("scale 8192 · 2 skipped (gradient_overflow) · last saved at step 15")


def test_before_its_first_step_the_live_console_shows_where_it_was_and_no_old_speed() -> None:
    history = whole_run()[: until(whole_run(), AT)]
    *_, run, numbers = live_lines(history, [start(resumed=resumed())])
    assert "15/40" in run
    assert run.endswith("<--:--")
    assert "img/s" not in numbers


def test_the_clock_of_an_epoch_does_not_count_the_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    live = LiveConsole(Console(file=io.StringIO(), force_terminal=True, width=100), GuideScreen())
    now[0] += 300.0
    for event in (start(resumed=resumed()), step(16)):
        live.on_event(event)
    now[0] += 7.0
    first = live._area().renderables[0]
    live.close()
    assert "00:07<" in str(first)


def test_a_checkpoint_has_no_line_but_a_place_among_the_numbers() -> None:
    events = [start(), step(1), saved(1), step(2), saved(2, 2), step(1003), saved(1003, 3)]
    assert not any("checkpoint" in line for line in plain_lines(events))
    assert not any("checkpoint" in line for line in live_lines([], events))
    latest = LatestEvents()
    for event in events:
        latest.on_event(event)
    assert list_status_items(latest)[-1].text == "last saved at step 1,003"
    assert not list_status_items(latest)[-1].alarm


def ended(events: list[Event], **changes: object) -> list[str]:
    latest = LatestEvents()
    for event in events:
        latest.on_event(event)
    return describe_ending(end(best={}, **changes), latest)[1:]


def test_a_run_that_was_stopped_says_by_what_and_how_to_go_on() -> None:
    told = "stopped by SIGTERM at step 23 of 40: saved as step-00000023.0009; "
    told += "start it again with the same command to resume"
    stopped = {"reason": "stopped", "signal": "SIGTERM", "checkpoint": "step-00000023.0009"}
    assert ended([start(), step(23), saved(23, 9)], **stopped) == [f"  {told}"]
    lines = live_lines([], [start(), step(23), end(**stopped)], width=80)
    first = next(n for n, line in enumerate(lines) if "stopped by SIGTERM" in line)
    assert f"{lines[first].strip()} {lines[first + 1].strip()}" == told
    assert lines[first + 1].startswith("  "), "the second half of a long line stands out to the left"


def test_a_run_that_was_stopped_and_could_not_be_saved() -> None:
    stopped = {"reason": "stopped", "signal": "SIGINT", "checkpoint": None}
    assert ended([start(), step(23), saved(20, 8)], **stopped) == [
        "  stopped by Ctrl-C at step 23 of 40 without saving: start it again with the same command to resume from "
        "checkpoint step-00000020.0008 (step 20)"
    ]


def test_a_run_that_was_begun_anew_is_not_sent_to_another_folder() -> None:
    """The same command would begin once more, in a folder with the next number."""
    anew = start(command="halfstep train tiny --new", dir="runs/my tiny-2")
    go_on = "start it again without --new, with 'run.dir=runs/my tiny-2', to resume"
    stopped = {"reason": "stopped", "signal": "SIGTERM", "checkpoint": "step-00000023.0009"}
    assert ended([anew, step(23)], **stopped)[0].endswith(f"saved as step-00000023.0009; {go_on}")
    failed = ended([anew, step(23), saved(20, 8)], reason="failed")
    assert failed == [f"  {go_on} from checkpoint step-00000020.0008 (step 20)"]
    named_so = start(command="halfstep train tiny run.dir=runs/--new-1")
    assert "with the same command" in ended([named_so, step(23)], **stopped)[0]
    in_python = start(command="halfstep.fit('tiny')")
    assert ended([in_python, step(23)], **stopped)[0].endswith("; call it again, or run the cell again, to resume")


@pytest.mark.parametrize("reason", ["failed", "interrupted"])
@pytest.mark.parametrize(
    ("events", "where"),
    [
        ([start(), step(9)], "no checkpoint was written yet: the same command starts again from step 0"),
        ([start(), saved(3), step(9), saved(9, 2), step(10)], "step-00000009.0002 (step 9)"),
        # The line about the checkpoint itself was cut off the journal, or is that of an older one.
        ([start(), saved(3), start(resumed=resumed()), step(16)], "step-00000015.0007 (step 15)"),
        ([start(resumed=resumed()), step(16), saved(16, 8)], "step-00000016.0008 (step 16)"),
    ],
)
def test_an_end_that_was_not_meant_says_from_where_it_goes_on(reason: str, events: list[Event], where: str) -> None:
    (line,) = ended(events, reason=reason)
    assert line.endswith(where)
    assert ("start it again with the same command to resume from checkpoint" in line) == ("step-" in where)


def test_a_finished_run_names_its_last_checkpoint() -> None:
    lines = ended([start(), step(40), saved(40, 11)])
    assert lines[0] == "  last checkpoint: step-00000040.000b (step 40)"
