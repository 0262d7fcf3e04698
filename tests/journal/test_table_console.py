"""The table console: how many lines a run takes, how wide they are, and what each says."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.cells import cell_len

from halfstep.journal.events import Event
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import ConsoleSize, RunClocks
from halfstep.journal.listeners import restore_listeners
from halfstep.journal.plain import PlainListener
from halfstep.journal.table import TableConsole
from tests.journal.told import end, epoch, note, resumed, saved, speed, start, step, whole_run

CLOCKS = RunClocks(30.0, 3.0, 95.0)
COMMANDS = [f"  halfstep {word} runs/segmentation_tiny" for word in ("report", "evaluate", "predict", "export")]
COMMANDS[2] += " FOLDER"


def printed(events: list[Event], history: list[Event] | None = None, encoding: str = "utf-8") -> list[str]:
    """The lines of a file."""
    raw = io.BytesIO()
    listener = PlainListener(io.TextIOWrapper(raw, encoding=encoding), TableConsole(is_live=False))
    for event in history or []:
        listener.restore_event(event)
    for event in events:
        listener.on_event(event)
    listener.close()
    return raw.getvalue().decode(encoding).splitlines()


def run_of(epochs: int, per_epoch: int = 20, **changes: Any) -> list[Event]:
    """A run with an evaluation after its first, its third and its last epoch."""
    events = [start(epochs=epochs, steps=epochs * per_epoch, steps_per_epoch=per_epoch, **changes)]
    for number in range(1, epochs + 1):
        for nth in range(1, per_epoch + 1):
            attempt = (number - 1) * per_epoch + nth
            events.append(step(attempt, epoch=number, step_in_epoch=nth))
            if nth in (1, 3):
                events.append(speed(time=attempt * 0.3))
        is_evaluated = number in (1, 3, epochs)
        val = {"loss": 0.3, "iou": 0.5 + 0.01 * number, "dice": 0.7, "iou_leaf": 0.4} if is_evaluated else None
        left = (epochs - number) * 6.0
        events.append(epoch(number, epochs=epochs, val=val, is_best=is_evaluated, seconds_left=left))
        events.append({"event": "saved", "time": 6.0, "file": "best.safetensors", "kind": "best"})
    return [*events, end(steps=epochs * per_epoch, best={"metric": "iou", "value": 0.56, "epoch": epochs})]


def test_a_run_of_six_epochs_takes_at_most_twenty_lines() -> None:
    lines = printed(run_of(6))
    assert len(lines) <= 20
    assert max(map(cell_len, lines)) <= 80
    assert lines[:5] == [
        "halfstep train segmentation_tiny: 7.76 M parameters on here",
        "data       320 samples to train, 64 to validate",
        "precision  bf16, chosen by auto",
        "saved in   runs/segmentation_tiny",
        "plan       6 epochs of 20 steps, batch 16 on 2 devices, about 2 min",
    ]
    assert lines[5:13] == [
        "",
        " epoch      loss  val loss   val IoU *  val Dice     time     left",
        "   1/6    0.2345    0.3000    0.5100 *    0.7000    00:06    00:30",
        "   2/6    0.2345         -         -           -    00:06    00:24",
        "   3/6    0.2345    0.3000    0.5300 *    0.7000    00:06    00:18",
        "   4/6    0.2345         -         -           -    00:06    00:12",
        "   5/6    0.2345         -         -           -    00:06    00:06",
        "   6/6    0.2345    0.3000    0.5600 *    0.7000    00:06    00:00",
    ]
    assert lines[13:] == ["", "Finished after 12 s: best IoU 0.5600 in epoch 6, 120 steps, none skipped", *COMMANDS]
    assert all(line.isprintable() for line in lines)


def test_skips_findings_and_failed_saves_are_a_line_each_between_the_rows() -> None:
    verdict = {
        "event": "guard",
        "time": 1.0,
        "level": "warning",
        "text": "up3 makes inf\n  because of that",
        "facts": {},
    }
    bad = {"event": "bad_sample", "time": 1.0, "name": "a.png", "reason": "cut", "index": 1, "replacement": 2}
    failed = note("no checkpoint of step 9: No space left on device (1 in a row, 3 end the run)", "warning")
    between = [step(7, "loss_not_finite", loss=math.nan), verdict, bad, failed, note("weights are equal")]
    events = run_of(6)
    at = next(n for n, event in enumerate(events) if event["event"] == "epoch") + 1
    lines = printed([*events[:at], *between, *events[at:]])
    first = next(n for n, line in enumerate(lines) if line.startswith("   1/6"))
    assert lines[first + 1 : first + 5] == [
        "skipped attempt 7: loss_not_finite, loss NaN; samples 7, 8",
        "guard: up3 makes inf",
        "cannot use a.png: cut; sample 2 replaces it",
        f"warning: {failed['text']}",
    ]
    assert lines[first + 5].startswith("   2/6")


def test_many_skips_are_few_lines_and_a_number_in_the_row() -> None:
    skips = [step(n, "loss_not_finite", loss=math.nan) for n in range(1, 1001)]
    scaled = [step(n, "gradient_overflow") for n in range(1001, 1011)]
    row = epoch(skipped={"loss_not_finite": 1000, "gradient_overflow": 10})
    lines = printed([start(), *skips, *scaled, row])
    told = [line for line in lines if line.startswith("skipped")]
    assert [line.split(":")[0].split()[-1] for line in told] == ["1", "2", "3", "10", "100", "1,000"]
    assert told[-1].endswith("(1,000 so far)")
    assert lines[-1].endswith("1,010 skipped") or "skipped" not in lines[-1]
    assert "3 skipped" in printed([start(), step(1), epoch(skipped={"gradient_overflow": 3})])[-1]


def test_the_plan_waits_for_the_time_of_a_step_and_for_nothing_else() -> None:
    events = [start(), step(1), speed(seconds_left=900.0)]
    assert not any(line.startswith("plan") for line in printed(events))
    *_, plan = printed([*events, step(2), step(3), speed(seconds_left=24.4)])
    assert plan.endswith(", about 24 s")
    early = printed([*events, step(2, "loss_not_finite"), step(3), speed()])
    assert [line.split()[0] for line in early[-2:]] == ["plan", "skipped"]
    assert "about" not in early[-2]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "2 epochs of 20 steps, batch 16 on 2 devices, about 95 min"),
        ({"epochs": 2, "steps": 30}, "30 steps in 2 epochs, batch 16 on 2 devices, about 95 min"),
        ({"epochs": 1, "steps": 1, "steps_per_epoch": 1}, "1 epoch of 1 step, batch 16"),
        ({"epochs": None}, "40 steps, batch 16"),
    ],
)
def test_the_length_of_the_run(changes: dict[str, Any], line: str) -> None:
    *_, plan = printed([start(**changes), step(1), speed(), step(2), speed(seconds_left=5700.0)])
    assert plan.startswith(f"plan       {line}".replace("95 min", "1 h 35 min"))


def test_settings_chosen_for_the_data_name_the_command_that_explains_them() -> None:
    sizing = [{"key": "train.epochs", "value": 17, "reason": "time"}]
    recipe = {"task": "segmentation", "model": {"name": "unet"}, "data": {"path": "my leaves"}}
    lines = printed([start(sizing=sizing, recipe=recipe, label="segment"), step(1), epoch()])
    assert lines[0] == "halfstep train segment: unet, 7.76 M parameters on here"
    assert "sizes      chosen for the data: halfstep recipes explain segment 'my leaves'" in lines
    assert lines.index("") <= 6, "the header has more than six lines"


REASONS = ["bf16 rejected: bf16 is emulated", "fp32 chosen: no narrower native format is at least 1.1x as fast"]
SUBSTITUTED = [
    {"severity": "warning", "id": "precision.substituted", "evidence": "slow", "fix": "write precision=fp32"}
]
SLOW = [{"severity": "warning", "id": "precision.slow", "evidence": "it is emulated", "fix": "use fp32"}]


@pytest.mark.parametrize(
    ("asked", "chosen", "reasons", "findings", "line"),
    [
        ("auto", "fp32", REASONS, [], "fp32: no 16-bit format is faster on here (why: halfstep doctor)"),
        ("auto", "bf16", ["bf16 chosen: 2.1x as fast as fp32"], [], "bf16, chosen by auto: 2.1x as fast as fp32"),
        ("bf16", "bf16", ["bf16 chosen: native"], SLOW, "bf16, as requested"),
        ("16-mixed", "fp16", [], [], "fp16, requested as 16-mixed"),
        ("bf16", "fp32", REASONS, SUBSTITUTED, "fp32 instead of the requested bf16: bf16 is emulated"),
    ],
)
def test_the_precision_has_its_reason_in_one_clause(
    asked: str, chosen: str, reasons: list[str], findings: list[Event], line: str
) -> None:
    precision = {"asked": asked, "took": "", "chosen": chosen, "summary": "", "reasons": reasons}
    lines = printed([start(precision=precision, findings=findings)])
    assert f"precision  {line}" in lines
    # A finding that the line already contains is not told twice.
    told = [text for text in lines if text.startswith("warning")]
    assert told == (["warning precision.slow: it is emulated (use fp32)"] if findings is SLOW else [])


def test_a_precision_that_was_not_observed_is_an_alarm() -> None:
    check = {"event": "precision_check", "time": 0.1, "expected": "bf16", "share": 0.974, "text": "97 % ran in bf16"}
    assert not any("observed" in line for line in printed([start(), check, {**check, "share": None}]))
    assert printed([start(), {**check, "share": 0.4, "text": "40 %"}])[-1] == "observed: 40 %"


def test_the_end_says_what_was_observed_of_a_16_bit_run_where_a_line_is_left() -> None:
    check = {"event": "precision_check", "time": 0.1, "expected": "bf16", "share": 0.974, "text": "97 % ran in bf16"}
    said = "  precision observed: 97 % of the FLOPs in bf16"
    ending = printed([start(), check, step(1), end()])
    assert ending[-5:] == [said, *COMMANDS]
    assert len(ending) - ending.index("") - 1 <= 6
    skips = {"loss_not_finite": 3, "gradient_overflow": 100, "guard:of_my_own_long_name": 2}
    long = printed([start(), check, step(1), end(skipped=skips)])
    assert long[-4:] == COMMANDS
    assert said not in long
    fp32 = {"asked": "fp32", "chosen": "fp32", "summary": "fp32", "reasons": []}
    assert said not in printed([start(precision=fp32), check, step(1), end()])


def test_without_validation_the_columns_are_those_of_training() -> None:
    lines = printed([start(samples={"train": 9, "val": 0}), step(1), epoch(val=None, is_best=False)])
    assert "data       9 samples to train, none to validate" in lines
    assert lines[-2].split() == ["epoch", "loss", "IoU", "*", "time", "left"]
    assert lines[-1].split()[:3] == ["1/2", "0.2345", "0.6543"]


def test_a_run_that_is_judged_by_its_loss_has_its_mark_there() -> None:
    events = [start(metric={"name": "loss", "higher_is_better": False}), step(1), epoch(val={"loss": 0.25})]
    assert printed(events)[-1].split()[:4] == ["1/2", "0.2345", "0.2500", "*"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 0.0, "NaN"])
def test_bad_numbers_keep_the_columns(bad: Any) -> None:
    head, row = printed([start(), step(1), epoch(train={"loss": bad}, val={"loss": bad, "iou": bad})])[-2:]
    assert row[: len("   1/2")] == "   1/2"
    ends = [head.index(title) + len(title) for title in ("  loss", "val loss", "val IoU")]
    assert all(row[at - 1] != " " and row[at : at + 1] in ("", " ") for at in ends)


@pytest.mark.parametrize("width", [1, 10, 20, 40, 79, 80, 81, 120, 300])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_line_is_one_line_at_any_width(width: int, encoding: str) -> None:
    gpu = {"utilisation": 0.93, "memory_utilisation": 0.4, "power_watts": 211.3, "temperature": 64.0}
    evaluating = {"event": "evaluating", "time": 9.5, "epoch": 1, "done": 3, "total": 4, "metrics": {"loss": 0.2}}
    reasons = [step(n, f"guard:a_long_name_{n}", loss_scale=2.0) for n in range(1, 12)]
    long = start(steps=10**9, steps_per_epoch=10**8, epochs=10)
    for events in ([], [start()], [long, *reasons, speed(gpu=gpu), saved(9)], [start(), step(9), evaluating]):
        latest = LatestEvents()
        for event in events:
            latest.on_event(event)
        lines = TableConsole(is_live=True).draw_live_area(latest, RunClocks(1e6, 30.0, 1e7), width, encoding)
        assert len(lines) == 1
        assert lines[0].cell_len <= width
        assert encoding == "utf-8" or lines[0].plain.replace("…", "").isascii()


def live_line(width: int, *events: Event, clocks: RunClocks = CLOCKS) -> str:
    latest = LatestEvents()
    for event in events:
        latest.on_event(event)
    [line] = TableConsole(is_live=True).draw_live_area(latest, clocks, width, "utf-8")
    return line.plain


def test_a_narrow_live_line_leaves_out_memory_and_lr_first_and_never_the_time_left() -> None:
    events = [start(), step(12), saved(12), speed()]
    assert live_line(80, *events).endswith("12/20  loss 0.5833  IoU 0.6543  123 img/s  01:35 left")
    assert live_line(50, *events).endswith("12/20  loss 0.5833  01:35 left")
    wide = live_line(140, *events)
    assert wide.endswith("lr 8.33e-5  memory 3.00 GiB  last saved at step 12  01:35 left")
    rough = RunClocks(3.0, 3.0, 95.0, is_rough=True)
    assert live_line(80, *events, clocks=rough).endswith("~01:35 left")


def test_the_live_line_of_an_evaluation() -> None:
    metrics = {"loss": 0.2, "iou": 0.9}
    evaluating = {"event": "evaluating", "time": 6.5, "epoch": 1, "done": 3, "total": 4, "metrics": metrics}
    line = live_line(80, start(), step(20), speed(), evaluating)
    assert line.startswith(" 1/2 val ━")
    assert "3/4  val loss 0.2000  val IoU 0.9000" in line


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_table_fits_its_terminal(width: int) -> None:
    long = {"loss": 0.5, "iou": 0.6, **{f"a_metric_with_a_long_name_{n}": 0.5 for n in range(20)}}
    style, latest = TableConsole(is_live=True), LatestEvents()
    for event in (start(epochs=10_000), step(1)):
        latest.on_event(event)
        style.list_lines(event, latest, ConsoleSize(width))
    event = epoch(9_999, epochs=10_000, val=long, skipped={"loss_not_finite": 12})
    latest.on_event(event)
    *_, head, row = [line.text for line in style.list_lines(event, latest, ConsoleSize(width))]
    assert "0.6000 *" in row
    assert cell_len(row) <= max(width, 27), "the place and the metric are always there"
    assert "val IoU" in head


def test_a_file_hears_of_a_long_epoch_now_and_then() -> None:
    events = [start(steps=10**6, steps_per_epoch=10**6, epochs=1)]
    for second in range(7200):
        events += [step(second + 1, epoch=1, step_in_epoch=second + 1), speed(time=float(second), seconds_left=9.0)]
    lines = [line for line in printed(events) if "step" in line and "left" in line]
    assert 10 <= len(lines) <= 16
    assert lines[0] == "   1/1  step 62 of 1,000,000  loss 0.5161  IoU 0.6543  123 img/s  00:09 left"
    assert not any("left" in line for line in printed(run_of(6)) if "step " in line)


# -- resumed runs and endings -----------------------------------------------------------------------------------------


def test_a_resumed_run_has_one_more_line_and_goes_on_with_its_columns(tmp_path: Any) -> None:
    history = run_of(6)
    third = [n for n, event in enumerate(history) if event["event"] == "epoch"][2]
    again = start(epochs=6, steps=120, resumed=resumed(60, repeated_steps=3))
    lines = printed([again, *history[third + 1 :]], history[: third + 1])
    assert lines[1] == "resumed at step 60 of 120 from checkpoint step-00000060.0007 (3 steps are repeated)"
    assert lines.index("") <= 6
    assert len(lines) <= 20
    assert "val Dice" in next(line for line in lines if line.startswith(" epoch"))
    assert [line.split()[0] for line in lines if line.startswith("   ")] == ["4/6", "5/6", "6/6"]
    restore_listeners([], tmp_path / "none")


def test_reasons_of_a_resume_are_few_lines() -> None:
    field = resumed(exact=False, reasons=[f"reason {n}" for n in range(30)])
    lines = printed([start(resumed=field)])
    assert [line for line in lines if "APPROXIMATE" in line] == [f"APPROXIMATE because reason {n}" for n in range(3)]
    assert any(line.endswith("in train.log") for line in lines)


def ending(reason: str, **changes: Any) -> list[str]:
    lines = printed([start(steps=192), step(23), saved(20, 8), end(reason=reason, **changes)])
    return lines[lines.index("") + 1 :]


COMMAND = "halfstep train segmentation_tiny run.dir=runs/segmentation_tiny"


def test_a_run_that_was_stopped_prints_the_command_that_resumes_it() -> None:
    changes = {"signal": "SIGINT", "checkpoint": "step-00000023.0009", "do": COMMAND}
    assert ending("stopped", **changes) == [
        "Stopped by Ctrl-C at step 23 of 192 after 12 s: saved as step-00000023.0009",
        "  to resume:",
        f"    {COMMAND}",
    ]
    unsaved = ending("stopped", **{**changes, "checkpoint": None})
    assert unsaved[0].endswith("the newest checkpoint is step-00000020.0008 (step 20)")
    assert unsaved[-1] == f"    {COMMAND}"


def test_a_call_in_python_is_resumed_by_the_same_call() -> None:
    [line] = ending("stopped", signal="SIGINT", checkpoint="step-00000023.0009")
    assert line.endswith("saved as step-00000023.0009; start it again with the same command to resume")


def test_a_run_that_gave_up_names_the_cause_and_what_to_type() -> None:
    changes = {"error": "up3 makes inf. 5 steps were skipped", "checkpoint_note": "it continues from step 5"}
    lines = ending("gave_up", **changes, do="halfstep train unet guard=repair", skipped={"loss_not_finite": 5})
    assert lines[1:] == [
        "  up3 makes inf. 5 steps were skipped",
        "  it continues from step 5",
        "    halfstep train unet guard=repair",
    ]
    long = ending("gave_up", **{**changes, "error": "a long cause " * 60}, do="halfstep train unet")
    assert long[-1] == "    halfstep train unet", "what to type was left out"


@pytest.mark.parametrize("reason", ["finished", "early_stopping", "interrupted", "failed", "out_of_memory", "unheard"])
@pytest.mark.parametrize("remedies", [[], ["up3 computes in fp32", "up2 computes in fp32"]])
def test_every_end_has_at_most_six_lines(reason: str, remedies: list[str]) -> None:
    lines = ending(reason, remedies=remedies, do=None, error="Traceback\n  line\nError: x")
    assert 1 <= len(lines) <= 6
    assert not any("Traceback" in line for line in lines), "an exception is printed where it is raised"


def test_names_of_others_cannot_speak_to_the_terminal() -> None:
    events = [
        start(label="x\x1b[2J", dir="runs/\x1b]0;x\x07"),
        step(1),
        epoch(val={"loss": 1, "iou": 1, "a\x1b[2J": 1}),
    ]
    assert all(line.isprintable() for line in printed([*events, *whole_run()[-1:]]))
    assert all(line.isascii() for line in printed(run_of(2), encoding="ascii"))
