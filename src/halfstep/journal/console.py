"""The live console: progress bars and numbers at the bottom of a terminal, everything else above them."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from halfstep import numbers
from halfstep.journal import events
from halfstep.journal import text as words
from halfstep.journal.events import Event
from halfstep.journal.jsonl import LOG
from halfstep.journal.latest import LatestEvents
from halfstep.printable import escape_to_one_line


def list_line_items(latest: LatestEvents) -> list[words.LineItem]:
    """Return the current numbers, the most important first; nothing before the first step."""
    step, speed = latest.step, latest.speed
    if not step:
        return []
    items = _list_validation_items(latest) or [_build_loss_item("loss", step["loss"]), *_list_metric_items(latest)]
    items.append(words.LineItem(f"lr {numbers.format_learning_rate(step['lr'])}"))
    if step.get("loss_scale") not in (None, 1.0):
        items.append(words.LineItem(f"scale {numbers.format_loss_scale(step['loss_scale'])}"))
    if latest.skipped:
        # A copy: the console draws this in its own thread while steps continue to be counted.
        items.append(words.LineItem(words.describe_skips(dict(latest.skipped)), True))
    if latest.checkpoint is not None:
        items.append(words.LineItem(f"last saved at step {numbers.format_count(latest.checkpoint.attempt)}"))
    return items + (_list_machine_items(speed) if speed else [])


def _build_loss_item(name: str, number: Any) -> words.LineItem:
    return words.LineItem(f"{name} {numbers.format_metric_value(number)}", not math.isfinite(numbers.to_float(number)))


def _list_validation_items(latest: LatestEvents) -> list[words.LineItem]:
    """Return the metrics of the evaluation in progress; nothing while steps are taken."""
    found = latest.evaluating.get("metrics") or {}
    if "loss" not in found:
        return []
    others = [name for name in (latest.metric,) if name != "loss" and name in found]
    told = [
        words.LineItem(f"val {words.format_metric_name(name)} {numbers.format_metric_value(found[name])}")
        for name in others
    ]
    return [_build_loss_item("val loss", found["loss"]), *told]


def _list_metric_items(latest: LatestEvents) -> list[words.LineItem]:
    """Return the metric of this epoch so far, or that of the last evaluation."""
    so_far = (latest.speed.get("train_metrics") or {}).get(latest.metric)
    last = (latest.epoch.get("val") or {}).get(latest.metric)
    if latest.metric == "loss" or (so_far is None and last is None):
        return []
    number, whose = (last, "val ") if so_far is None else (so_far, "")
    return [words.LineItem(f"{whose}{words.format_metric_name(latest.metric)} {numbers.format_metric_value(number)}")]


def _list_machine_items(speed: Event) -> list[words.LineItem]:
    """Return throughput, data wait, memory, and the GPU's meters if there is a GPU."""
    wait = numbers.to_float(speed.get("wait_share"))
    items = [
        words.LineItem(words.describe_throughput(speed)),
        words.LineItem(f"wait {numbers.format_percent(wait)}", wait > 0.2),
    ]
    memory = speed.get("memory") or {}
    if memory.get("device_bytes") is not None:
        peak = memory.get("device_peak_bytes") or memory["device_bytes"]
        items.append(
            words.LineItem(f"memory {numbers.format_bytes(memory['device_bytes'])}, peak {numbers.format_bytes(peak)}")
        )
    elif memory.get("host_bytes") is not None:
        items.append(words.LineItem(f"memory {numbers.format_bytes(memory['host_bytes'])}"))
    return items + _list_gpu_items(speed.get("gpu") or {})


def _list_gpu_items(gpu: Mapping[str, object]) -> list[words.LineItem]:
    parts = []
    if gpu.get("utilisation") is not None:
        parts.append(numbers.format_percent(gpu["utilisation"]))
    if gpu.get("power_watts") is not None:
        parts.append(f"{gpu['power_watts']:.0f} W")
    if gpu.get("temperature") is not None:
        parts.append(f"{gpu['temperature']:.0f} °C")
    return [words.LineItem(f"GPU {' '.join(parts)}")] if parts else []


_WIDEST_BAR, _WIDE, _MARGIN = 60, 110, 1
_FULL, _EMPTY, _BETWEEN = "━", "─", " · "
_ASCII_FULL, _ASCII_EMPTY, _ASCII_BETWEEN = "=", "-", " | "


class RunClocks(NamedTuple):
    """Times in seconds at the moment when the area is drawn."""

    run: float
    epoch: float
    left: float
    """The time left for the whole run; NaN while it is not known."""
    in_epoch: float = math.nan
    """The time left for the epoch's steps, or for its evaluation."""
    is_rough: bool = False
    """Whether the time left includes an evaluation, and none has been timed yet."""
    stage: float = 0.0
    """The time since the current stage before the first step began."""


def render_live_area(latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
    """Return the lines of the live area; none is longer than `width`."""
    start, step = latest.start, latest.step
    if not start or not step or latest.stage:
        doing = escape_to_one_line(latest.stage.get("text", "preparing the first step"))
        line = Text(f" {doing}  {numbers.format_clock(clocks.stage)}", style="dim", no_wrap=True, overflow="ellipsis")
        line.truncate(width, overflow="ellipsis")
        return [line]
    # If the terminal cannot encode the bar's character, all bars and separators are drawn in ASCII.
    plain = words.fit_encoding(_FULL, encoding) != _FULL
    mark = words.fit_encoding(
        words.format_bar_label(start, latest.observed_share if width >= _WIDE else None), encoding
    )
    about = "~" if clocks.is_rough else ""
    run_row = _build_progress_row("Run", step["attempt"], start["steps"], clocks.run, clocks.left, about)
    rows = [_build_epoch_row(latest, clocks), run_row]
    label = max(cell_len(row[0]) for row in rows)
    right = max(cell_len(row[3]) for row in rows)
    room = width - 2 * _MARGIN - label - right - cell_len(mark) - 6
    bars = [
        Text(" " * _MARGIN + name.ljust(label) + "  ", style="bold", no_wrap=True, overflow="crop")
        .append(_draw_progress_bar(part, whole, min(max(room, 0), _WIDEST_BAR), plain))
        .append(f"  {counts.ljust(right)}", style="not bold")
        for name, part, whole, counts in rows
    ]
    bars[0].append(
        f"  {mark}", style="not bold green" if words.is_mixed_precision(start["precision"]["chosen"]) else "not bold"
    )
    for bar in bars:
        bar.truncate(width)
    return bars + _flow_items(list_line_items(latest), width, encoding, _ASCII_BETWEEN if plain else _BETWEEN)


def _build_epoch_row(latest: LatestEvents, clocks: RunClocks) -> tuple[str, int, int, str]:
    step, evaluating, name = latest.step, latest.evaluating, words.format_epoch_place(latest)
    if evaluating:
        return _build_progress_row(
            f"{name} [Val]", evaluating["done"], evaluating["total"], clocks.epoch, clocks.in_epoch
        )
    return _build_progress_row(
        f"{name} [Train]", step["step_in_epoch"], words.count_epoch_steps(latest), clocks.epoch, clocks.in_epoch
    )


def _build_progress_row(
    name: str, done: int, total: int, spent: float, left: float, about: str = ""
) -> tuple[str, int, int, str]:
    whole = numbers.format_count(total)
    place = f"{numbers.format_count(done).rjust(len(whole))}/{whole}"
    return name, done, total, f"{place}  {numbers.format_clock(spent)}<{about}{numbers.format_clock(left)}"


def _draw_progress_bar(done: int, total: int, width: int, plain: bool) -> Text:
    full = int(width * min(done / total, 1.0)) if total else 0
    line = Text((_ASCII_FULL if plain else _FULL) * full, style="not bold cyan")
    return line.append((_ASCII_EMPTY if plain else _EMPTY) * (width - full), style="not bold bright_black")


def _flow_items(items: list[words.LineItem], width: int, encoding: str, between: str) -> list[Text]:
    """Return as few lines as hold the items; an item is only cut at the edge of the terminal."""
    lines = [_create_blank_line()]
    for item in items:
        text = words.fit_encoding(item.text, encoding)
        empty = lines[-1].cell_len <= _MARGIN
        # cell_len, not len: a wide character takes two columns.
        if not empty and lines[-1].cell_len + cell_len(text) + len(between) + _MARGIN > width:
            lines.append(_create_blank_line())
            empty = True
        if not empty:
            lines[-1].append(between, style="bright_black")
        lines[-1].append(text, style="yellow" if item.alarm else "")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _create_blank_line() -> Text:
    return Text(" " * _MARGIN, no_wrap=True, overflow="crop")


BELOW = 5
"""The rows that the bars and numbers take, with a blank one above them."""
LEAST = 24
"""The rows of the smallest terminal in common use; in a smaller one, lines scroll away."""


class ScreenLine(NamedTuple):
    """One line of the first screen."""

    text: str
    style: str = ""
    indent: int = 0
    spare: bool = False
    """Whether the line is left to the log if there is no room."""


def build_first_screen(start: Event, width: int, height: int) -> list[ScreenLine]:
    """Return the title, the precision and its reasons, the header and remarks; the rest is only in train.log."""
    lines = _list_start_lines(start)
    room = max(height, LEAST) - BELOW - 1 - sum(_count_rows(line, width) for line in lines if not line.spare)
    shown, left_out = [], 0
    for line in lines:
        rows = _count_rows(line, width) if line.spare else 0
        if rows <= room:
            room -= rows
            shown.append(line)
        else:
            # After the first line that does not fit no later spare one is shown, so that the list has no gaps.
            room, left_out = 0, left_out + 1
    if left_out:
        log = os.path.join(start["dir"], LOG)
        shown.append(
            ScreenLine(escape_to_one_line(f"{numbers.format_counted_noun(left_out, 'line')} more in {log}"), "dim")
        )
    return shown


def _list_start_lines(start: Event) -> list[ScreenLine]:
    mixed = words.is_mixed_precision(start["precision"]["chosen"])
    header = words.describe_run(start)
    label = max(len(word) for word, _ in header)
    return [
        ScreenLine(f"halfstep train {escape_to_one_line(start['label'])}", "bold"),
        *(ScreenLine(text, "yellow" if alarm else "cyan") for text, alarm in words.describe_resume(start)),
        ScreenLine(words.describe_precision(start), "bold green" if mixed else "bold"),
        *(ScreenLine(text, "dim", 2, spare=True) for text in words.explain_precision(start)),
        *(ScreenLine(f"{word.ljust(label)}  {text}", "", 2) for word, text in header),
        *(
            ScreenLine(text, "yellow" if alarm else "dim", 0, spare=not alarm)
            for text, alarm in words.list_start_remarks(start)
        ),
    ]


def _count_rows(line: ScreenLine, width: int) -> int:
    return max(1, math.ceil(cell_len(line.text) / max(width - line.indent, 1)))


REFRESHES_A_SECOND = 4
_LEVELS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


class LiveConsole:
    """A listener that records events cheaply and draws in its own thread, a few times per second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._latest = LatestEvents()
        self._time = 0.0
        self._heard = self._measured = self._epoch_began = self._stage_began = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self._area, refresh_per_second=REFRESHES_A_SECOND, transient=True
        )

    def on_event(self, event: Event) -> None:
        """Record an event, and print it above the live area if it deserves a line."""
        self._latest.on_event(event)
        self._heard, self._time = time.monotonic(), event["time"]
        kind = event["event"]
        if kind == events.STEP:
            if event["step_in_epoch"] <= 1:
                self._epoch_began = self._heard
            if not event["applied"]:
                self._print_skip(event)
        elif kind in (events.SPEED, events.EVALUATING):
            self._measured = self._heard
        elif kind == events.STAGE:
            self._stage_began = self._heard
        else:
            self._print_event(kind, event)

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without printing it."""
        self._latest.on_event(event)

    def close(self) -> None:
        """Stop drawing and restore the cursor, also after an interruption."""
        self._live.stop()
        atexit.unregister(self.close)

    def _print_event(self, kind: str, event: Event) -> None:
        if kind == events.START:
            # An epoch that is resumed in its middle has no first step that could start its clock.
            self._epoch_began = self._heard
            self._begin(event)
        elif kind == events.EPOCH:
            self._print_summary(event)
        elif kind == events.END:
            self.close()
            self._print_ending(event)
        elif kind == events.PRECISION_CHECK:
            self._print(words.describe_precision_check(event), "green")
        elif kind == events.BAD_SAMPLE:
            self._print(words.describe_bad_sample(event), "yellow")
        elif kind == events.GUARD:
            self._print_guard(event)
        elif kind == events.NOTE:
            self._print(escape_to_one_line(event["text"]), "yellow" if event.get("level") == "warning" else "dim")

    def _begin(self, start: Event) -> None:
        for line in build_first_screen(start, self._console.width, self._console.height):
            self._print(line.text, line.style, line.indent)
        self._console.print()
        # Without this, a crash would leave the terminal without a cursor.
        atexit.register(self.close)
        self._live.start()

    def _print_skip(self, event: Event) -> None:
        nth = self._latest.skipped[event["reason"]]
        if event["reason"] != words.ORDINARY and words.is_skip_printed(nth):
            self._print(words.describe_skipped_step(event, nth), "yellow")

    def _print_guard(self, event: Event) -> None:
        first, *others = words.describe_guard_event(event)
        self._print(first, _LEVELS.get(event.get("level", ""), "yellow"))
        for line in others:
            self._print(line.strip(), "dim", indent=2)

    def _print_summary(self, event: Event) -> None:
        title, *rows, closing = words.format_epoch_summary(event, self._latest.metric)
        text = Text(title, style="bold").append("".join(f"\n{row}" for row in rows), style="not bold")
        text.append(f"\n{self._fit_text(closing)}", style="not bold green" if event.get("is_best") else "not bold dim")
        self._console.print(text, highlight=False)

    def _print_ending(self, event: Event) -> None:
        first, *others = words.describe_ending(event, self._latest)
        self._console.print()
        self._print(first, "bold green" if event["reason"] in ("finished", "early_stopping") else "bold yellow")
        for line in others:
            if line.strip().startswith(words.TO_TYPE):
                # Not wrapped at any width, because the user copies it.
                self._console.print(Text(self._fit_text(line), style="bold"), soft_wrap=True)
            else:
                self._print(line.strip(), indent=2)

    def _print(self, text: str, style: str = "", indent: int = 0) -> None:
        self._console.print(Padding(Text(self._fit_text(text), style=style), (0, 0, 0, indent), expand=False))

    def _fit_text(self, text: str) -> str:
        return words.fit_encoding(text, self._console.encoding)

    def _area(self) -> Group:
        now = time.monotonic()
        # Time left is emitted only now and then; in between it is counted down here, so that the clock moves.
        since = now - self._measured
        told = self._latest.time_left
        left, in_epoch = (
            max(numbers.to_float(told[name]) - since, 0.0) if told.get(name) is not None else math.nan
            for name in ("seconds_left", "seconds_left_in_epoch")
        )
        run = self._time + now - self._heard
        rough, stage = bool(told.get("is_rough")), now - self._stage_began
        clocks = RunClocks(run, now - self._epoch_began, left, in_epoch, rough, stage)
        return Group(*render_live_area(self._latest, clocks, self._console.width, self._console.encoding))


def _restore_streams() -> None:
    """Restore the real streams in a forked worker of a data loader."""
    # The live area belongs to the parent. A worker that printed through rich's proxy could wait forever for a lock that
    # some thread of the parent held at the fork.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_streams)
