"""What people read: numbers, the epoch summary, the plain lines."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from halfstep import numbers
from halfstep.errors import FolderTaken
from halfstep.journal import text as words
from halfstep.journal.events import Event
from halfstep.journal.guide import GuideLog
from halfstep.journal.latest import LatestEvents
from halfstep.journal.plain import LogFileListener, PlainListener
from halfstep.journal.status_items import list_status_items
from halfstep.journal.text import describe_ending
from tests.journal.told import end, epoch, note, speed, start, step, whole_run


def plain_lines(events: list[Event], encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    listener = PlainListener(stream, GuideLog())
    for event in events:
        listener.on_event(event)
    listener.close()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        (numbers.format_metric_value, 0.23451, "0.2345"),
        (numbers.format_metric_value, 0.0, "0.0000"),
        (numbers.format_metric_value, 12345.678, "12345.7"),
        (numbers.format_metric_value, 1e30, "1.00e+30"),
        (numbers.format_metric_value, 1.5e-7, "1.50e-07"),
        (numbers.format_metric_value, math.nan, "NaN"),
        (numbers.format_metric_value, "-Infinity", "-inf"),
        (numbers.format_metric_value, None, "NaN"),
        (numbers.format_learning_rate, 1e-3, "0.001"),
        (numbers.format_learning_rate, 3e-4, "3e-4"),
        (numbers.format_learning_rate, 0.0, "0"),
        (numbers.format_loss_scale, 65536.0, "65536"),
        (numbers.format_loss_scale, 2.0**-3, "0.125"),
        (numbers.format_short_count, 24_436_369, "24.4 M"),
        (numbers.format_short_count, 999, "999"),
        (numbers.format_bytes, 3 * 2**30, "3.00 GiB"),
        (numbers.format_bytes, 1023, "1023 B"),
        (numbers.format_bytes, 3 * 2**19, "1.50 MiB"),
        (numbers.format_bytes, 768 * 2**20, "768 MiB"),
        (numbers.format_bytes, 4000 * 2**30, "3.91 TiB"),
        (numbers.format_bytes, 0, "0 B"),
        (numbers.format_percent, 0.9999, "99.9 %"),
        (numbers.format_percent, 0.9996, "99.9 %"),
        (numbers.format_percent, 0.5, "50 %"),
        (numbers.format_percent, 1.0, "100 %"),
        (numbers.format_percent, 0.0004, "0.1 %"),
        (numbers.format_percent, math.nan, "? %"),
        (numbers.format_clock, 92.9, "01:32"),
        (numbers.format_clock, 7509, "2:05:09"),
        (numbers.format_clock, 3 * 86400 + 15000, "3 d 04:10"),
        (numbers.format_clock, math.inf, "--:--"),
        (numbers.format_clock, None, "--:--"),
        (numbers.format_duration, 0.035, "35 ms"),
        (numbers.format_duration, 4.25, "4.25 s"),
        (numbers.format_duration, 3599.9, "1 h 00 min"),
    ],
)
def test_numbers(write: Any, number: Any, text: str) -> None:
    assert write(number) == text


def test_the_epoch_summary_is_the_one_that_people_know() -> None:
    assert words.format_epoch_summary(epoch(), "iou") == [
        "Epoch 1 Summary:",
        "  Train Loss: 0.2345 | Val Loss: 0.2567",
        "  Train IoU:  0.6543 | Val IoU:  0.6234",
        "  best so far · 6 s · 123 img/s · lr 3e-4",
    ]


def test_a_summary_without_validation_or_with_another_best() -> None:
    event = epoch(
        3, val=None, is_best=False, best={"metric": "iou", "value": 0.7, "epoch": 2}, skipped={"a": 1, "b": 2}
    )
    assert words.format_epoch_summary(event, "iou") == [
        "Epoch 3 Summary:",
        "  Train Loss: 0.2345",
        "  Train IoU:  0.6543",
        "  best 0.7000 in epoch 2 · 6 s · 123 img/s · lr 3e-4 · 3 skipped (1 a, 2 b)",
    ]


def test_the_numbers_of_single_classes_are_left_to_the_journal() -> None:
    lines = words.format_epoch_summary(
        epoch(val={"loss": 1.0, "iou": 0.5, "iou_background": 0.9, "top_speed": 3.0}), "iou"
    )
    assert not any("background" in line for line in lines)
    assert any("Top speed" in line for line in lines)


def test_a_summary_with_a_thousand_classes_is_short() -> None:
    lines = words.format_epoch_summary(epoch(val={"loss": 1.0} | {f"class_{n}": 0.5 for n in range(1000)}), "iou")
    assert len(lines) == words.MOST_ROWS + 3
    assert lines[-2] == f"  and {1002 - words.MOST_ROWS} more in the journal"


def test_a_summary_of_bad_numbers() -> None:
    lines = words.format_epoch_summary(
        epoch(train={"loss": math.nan}, val={"loss": math.inf}, best={}, is_best=False), "iou"
    )
    assert lines[1] == "  Train Loss: NaN | Val Loss: inf"


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((4, 2, 2, 16), "4 × 2 devices × 2 micro-batches = 16 per step"),
        ((4, 1, 2, 8), "4 × 2 micro-batches = 8 per step"),
        ((4, 1024, 1, 4096), "4 × 1024 devices = 4,096 per step"),
        ((16, 1, 1, 16), "16 per step"),
    ],
)
def test_the_batch_line(sizes: tuple[int, ...], line: str) -> None:
    names = ("per_device", "devices", "microbatches", "total")
    assert words.describe_batch_size(start(batch=dict(zip(names, sizes, strict=True)))) == line


@pytest.mark.parametrize(
    ("asked", "chosen", "line", "sign"),
    [
        ("auto", "bf16", "Mixed precision training: bf16 (bfloat16), chosen by auto", "mp: 🚀 bf16"),
        ("fp16", "fp16", "Mixed precision training: fp16 (float16), as requested", "mp: 🚀 fp16"),
        ("bf16-mixed", "tf32", "Mixed precision training is off: tf32, requested as bf16-mixed", "mp: 📊 tf32"),
        ("fp32", "fp32", "Mixed precision training is off: fp32, as requested", "mp: 📊 fp32"),
        ("fp8", "fp8", "Mixed precision training: fp8 (bfloat16 and fp8), as requested", "mp: 🚀 fp8"),
        (
            "fp32; up=mxfp8",
            "fp32; up=mxfp8",
            "Mixed precision training: fp32; up=mxfp8 (fp8), as requested",
            "mp: 🚀 fp32; up=mxfp8",
        ),
    ],
)
def test_precision_asked_for_and_chosen(asked: str, chosen: str, line: str, sign: str) -> None:
    event = start(precision={"asked": asked, "took": "", "chosen": chosen, "summary": "", "reasons": []})
    assert words.describe_precision(event) == line
    assert words.format_bar_label(event, None) == sign
    enabled = line.partition("(")[2].partition(")")[0]
    assert words.list_precision_lines(event) == [line, *([f"✓ AMP enabled with {enabled}"] if enabled else [])]
    assert words.format_bar_label(event, 0.974) == f"{sign}, 97 % observed"


def test_the_line_of_numbers_has_what_there_is_and_no_more() -> None:
    latest = LatestEvents()
    assert list_status_items(latest) == []
    latest.on_event(start())
    latest.on_event(step(2))
    assert [item.text for item in list_status_items(latest)] == ["loss 1.0000", "lr 5e-4"]
    latest.on_event(step(3, "gradient_overflow", loss_scale=32768.0, loss=math.nan))
    memory = {"host_bytes": 1, "device_bytes": 2**30, "device_peak_bytes": 2**31}
    gpu = {"utilisation": 0.93, "memory_utilisation": 0.4, "power_watts": 211.3, "temperature": None}
    latest.on_event(speed(memory=memory, gpu=gpu, wait_share=0.5))
    items = list_status_items(latest)
    assert [item.text for item in items] == [
        "loss NaN",
        "IoU 0.6543",
        "lr 3.33e-4",
        "scale 32768",
        "1 skipped (gradient_overflow)",
        "123 img/s",
        "wait 50 %",
        "memory 1.00 GiB, peak 2.00 GiB",
        "GPU 93 % 211 W",
    ]
    assert [item.text for item in items if item.alarm] == ["loss NaN", "1 skipped (gradient_overflow)", "wait 50 %"]


@pytest.mark.parametrize(
    ("metric", "written"),
    [
        ("fg_ari", "FG ARI"),
        ("iou", "IoU"),
        ("iou_circle", "IoU circle"),
        ("mIoU", "mIoU"),
        ("top1", "Top-1"),
        ("mean_error", "Mean error"),
    ],
)
def test_names_of_metrics(metric: str, written: str) -> None:
    assert words.format_metric_name(metric) == written


def test_without_a_metric_so_far_the_last_evaluation_is_shown() -> None:
    latest = LatestEvents()
    for event in (start(), step(1), speed(train_metrics={}), epoch()):
        latest.on_event(event)
    assert list_status_items(latest)[1].text == "val IoU 0.6234"


def test_plain_lines_of_a_run() -> None:
    lines = plain_lines(whole_run())
    assert lines[0].startswith("halfstep train segmentation_tiny, ")
    assert lines[1] == "Mixed precision training: bf16 (bfloat16), chosen by auto"
    assert "  batch       4 × 2 devices × 2 micro-batches = 16 per step" in lines
    assert "✓ observed: 97 % ran in bf16" in lines
    place, rest = "00:03 · Epoch 1/2 10/20 · 01:35 left · ", "123 img/s · wait 3 % · memory 3.00 GiB"
    assert f"{place}loss 0.6000 · IoU 0.6543 · lr 1e-4 · {rest}" in lines
    assert lines.count("  Train IoU:  0.6543 | Val IoU:  0.6234") == 2
    assert lines[-7:] == [
        "Finished after 12 s: 40 steps applied, none skipped",
        "  best IoU: 0.6234, in epoch 2",
        "  best saved in: runs/segmentation_tiny/best.safetensors",
        "  next: halfstep report runs/segmentation_tiny",
        "  next: halfstep evaluate runs/segmentation_tiny",
        "  next: halfstep predict runs/segmentation_tiny FOLDER",
        "  next: halfstep export runs/segmentation_tiny",
    ]
    assert all(line.isprintable() for line in lines)


def test_a_model_that_generates_needs_no_folder() -> None:
    latest = LatestEvents()
    latest.on_event({**start(), "generates": True})
    lines = describe_ending({"event": "end", "reason": "finished", "seconds": 1.0, "steps": 1}, latest)
    assert "  next: halfstep predict runs/segmentation_tiny" in lines


def test_every_skip_is_told_until_there_are_too_many() -> None:
    events = [step(n, "loss_not_finite", loss=math.nan) for n in range(1, 1001)]
    lines = [line for line in plain_lines([start(), *events]) if line.startswith("skipped")]
    assert len(lines) == words.FIRST_SKIPS + 1000 // words.THEN_EVERY
    assert lines[0] == "skipped attempt 1: loss_not_finite, loss NaN; samples 7, 8"
    assert "from here every 100th" in lines[9]
    assert lines[-1].startswith("skipped attempt 1,000: loss_not_finite")


def test_a_skip_names_the_samples_that_were_quarantined() -> None:
    line = words.describe_skipped_step(step(3, "guard:spike", quarantined=list(range(20))), 1)
    assert line.endswith("guard:spike, loss 0.8333; quarantined samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more")


def test_names_of_files_cannot_speak_to_the_terminal() -> None:
    bad = {
        "event": "bad_sample",
        "time": 0.0,
        "name": "a\x1b]0;x\x07\r\n.png",
        "reason": "cut",
        "index": 1,
        "replacement": 2,
    }
    lines = plain_lines([start(label="x\x1b[2J"), bad, note("a\x9b31m")])
    assert all(line.isprintable() for line in lines)
    assert lines[-2].startswith("cannot use a\\x1b]0;x\\x07  .png: cut")


def test_an_output_without_signs_gets_letters() -> None:
    lines = plain_lines(whole_run(), "ascii")
    assert "  batch       4 x 2 devices x 2 micro-batches = 16 per step" in lines
    assert not any("?" in line for line in lines)


@pytest.mark.parametrize(
    ("reason", "first"),
    [
        ("interrupted", "Interrupted after 12 s"),
        ("early_stopping", "Stopped early after"),
        ("failed", "Failed after"),
        ("stopped", "Stopped after"),
    ],
)
def test_endings(reason: str, first: str) -> None:
    lines = describe_ending(end(reason=reason, best={}, skipped={"loss_not_finite": 3}), LatestEvents())
    assert lines[0].startswith(first)
    assert lines[0].endswith("40 steps applied, 3 skipped (loss_not_finite)")
    to_go_on = ["  no checkpoint was written yet: the same command starts again from step 0"]
    assert lines[1:] == ([] if reason == "early_stopping" else to_go_on)


def test_the_log_file_is_there_after_every_line_and_goes_on_after_a_second_start(tmp_path: Path) -> None:
    path = tmp_path / "run" / "train.log"
    for _ in range(2):
        log = LogFileListener(path)
        for event in whole_run("fp16"):
            log.on_event(event)
        assert path.read_text().endswith("next: halfstep export runs/segmentation_tiny\n")
        log.close()
    assert path.read_text().count("Mixed precision training: fp16") == 2
    assert path.read_text().count("skipped attempt 30: gradient_overflow, loss 0.5333, scale 8192\n") == 2


@pytest.mark.wording
def test_a_log_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FolderTaken, match="cannot write"):
        LogFileListener(tmp_path)


def test_an_event_from_the_future_is_passed_over() -> None:
    assert plain_lines([{"event": "unheard_of", "time": 0.0}]) == []


def test_one_of_a_kind_is_no_plural() -> None:
    one = start(epochs=1, steps=1, steps_per_epoch=1)
    assert dict(words.describe_run(one))["length"] == "1 epoch, 1 step (1 per epoch)"
    assert dict(words.describe_run(start(epochs=None)))["length"] == "40 steps (20 per epoch)"
    assert " 1 step applied" in describe_ending(end(steps=1), LatestEvents())[0]
