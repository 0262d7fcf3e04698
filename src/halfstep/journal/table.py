"""The table console: a short header, one row per epoch, one live line, and an end with commands to copy."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from halfstep import numbers
from halfstep.journal import events
from halfstep.journal import text as words
from halfstep.journal.events import Event
from halfstep.journal.jsonl import LOG
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import ConsoleLine, ConsoleSize, RunClocks, draw_stage
from halfstep.journal.status_items import StatusItem, list_status_items
from halfstep.journal.trackers import suggest_tracker_commands
from halfstep.metric_names import format_metric_name
from halfstep.precision.names import AUTO
from halfstep.printable import escape_to_one_line

NO_VALUE, BEST = "-", "*"
MOST_COLUMNS = 67
"""The width of the table; the rest of 80 columns is for skips."""
MOST_ENDING = 6
"""The lines of the end; further commands are only in train.log."""
FEW = 3
"""The lines of one kind about a resume, and the first skips of a reason that are printed."""
_LABEL = 11
QUIET, LONGEST_QUIET = 60.0, 600.0
"""Seconds after which a file gets a line of progress, and the longest time, to which they grow."""


class TableConsole:
    """The lines for a terminal or a file. Everything that they leave out is in train.log and in the journal."""

    def __init__(self, *, is_live: bool) -> None:
        """Take whether there is an area that shows progress; otherwise there are lines about it now and then."""
        self._is_live = is_live
        self._table: EpochTable | None = None
        self._start: Event = {}
        self._is_plan_due = False
        self._speeds = self._bad_samples = 0
        self._epoch_since = self._printed_at = 0.0
        self._quiet = QUIET
        self._lines: dict[str, Callable[[Event, LatestEvents, ConsoleSize], list[ConsoleLine]]] = {
            events.START: self._begin,
            events.PRECISION_CHECK: lambda event, *_: _list_precision_alarm(event),
            events.STEP: lambda event, latest, _: _list_skip_lines(event, latest),
            events.SPEED: self._list_progress,
            events.BAD_SAMPLE: self._list_bad_sample,
            events.EPOCH: self._list_row,
            events.GUARD: lambda event, *_: _list_guard_lines(event),
            events.NOTE: lambda event, *_: _list_warning(event),
            events.END: lambda event, latest, size: [ConsoleLine(""), *list_ending_lines(event, latest, size.width)],
        }

    def list_lines(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        """Return the lines of an event; the one on the plan waits until the time of a step is known."""
        kind = event["event"]
        if kind not in self._lines or (kind == events.STEP and event["applied"]):
            return []
        lines = self._lines[kind](event, latest, size)
        if lines and self._is_plan_due and kind != events.START:
            self._is_plan_due = False
            lines = [_label("plan", describe_plan(self._start, None)), *lines]
        if lines:
            self._printed_at = event["time"]
        return lines

    def draw_live_area(self, latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
        """Return the live line, which is never longer than `width`."""
        if not latest.start or not latest.step or latest.stage:
            return draw_stage(latest, clocks, width)
        return [draw_live_line(latest, clocks, width, encoding)]

    def _begin(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        self._start, self._is_plan_due, self._epoch_since, self._speeds = event, True, event["time"], 0
        return list_header_lines(event)

    def _list_progress(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        self._speeds += 1
        # The first step is observed and takes as long as several.
        if self._is_plan_due and self._speeds > 1:
            self._is_plan_due = False
            attempt = latest.step.get("attempt", 0)
            return [_label("plan", describe_plan(self._start, event["seconds_left"] if attempt else None))]
        if self._is_live or not latest.step or event["time"] - self._printed_at < self._quiet:
            return []
        self._quiet = min(2 * self._quiet, LONGEST_QUIET)
        return [ConsoleLine(_describe_progress(event, latest))]

    def _list_row(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        lines = []
        if self._table is None:
            self._table = EpochTable.fitting(event, latest, size.width)
            lines = [ConsoleLine(""), ConsoleLine(self._table.head, "bold", fit="cut")]
        row = self._table.build_row(event, self._epoch_since)
        self._epoch_since = event["time"]
        return [*lines, ConsoleLine(self._table.format_row(row), "green" if row.is_best else "", fit="cut")]

    def _list_bad_sample(self, event: Event, *_: object) -> list[ConsoleLine]:
        self._bad_samples += 1
        return [ConsoleLine(words.describe_bad_sample(event), "yellow")] if _is_printed(self._bad_samples) else []


# -- header ---------------------------------------------------------------------------------------------------------


def list_header_lines(start: Event) -> list[ConsoleLine]:
    """Return the lines before the plan: at most five, and one for each finding and each change on a resume."""
    resumed = words.describe_resume(start)
    place, changes = resumed[:1], resumed[1:]
    lines = [ConsoleLine(describe_title(start), "bold", fit="cut")]
    lines += [ConsoleLine(item.text, "cyan") for item in place]
    lines += [_label(name, text, style) for name, text, style in _list_header_rows(start)]
    lines += [ConsoleLine(item.text, "yellow" if item.alarm else "dim") for item in changes[:FEW]]
    if len(changes) > FEW:
        lines.append(ConsoleLine(f"{numbers.format_counted_noun(len(changes) - FEW, 'more line')} in {LOG}", "dim"))
    alarms = [item.text for item in words.list_start_remarks(start) if item.alarm]
    return lines + [ConsoleLine(text, "yellow") for text in alarms if not text.startswith(_IN_PRECISION)]


_IN_PRECISION = "warning precision.substituted"
"""The start of the finding that the line on precision contains."""


def _list_header_rows(start: Event) -> list[tuple[str, str, str]]:
    samples = start["samples"]
    data = f"{numbers.format_counted_noun(samples['train'], 'sample')} to train, "
    data += f"{numbers.format_count(samples['val'])} to validate" if samples.get("val") else "none to validate"
    style = "green" if words.is_mixed_precision(start["precision"]["chosen"]) else ""
    rows = [
        ("data", data, ""),
        ("precision", describe_precision(start), "yellow" if _is_substituted(start) else style),
        ("saved in", escape_to_one_line(start["dir"]), ""),
    ]
    explain = None if words.is_resumed(start) else _suggest_explaining(start)
    return rows if explain is None else [*rows, ("sizes", f"chosen for the data: {explain}", "")]


def describe_title(start: Event) -> str:
    """Return the recipe, the model with its size, and the device."""
    model = ((start.get("recipe") or {}).get("model") or {}).get("name")
    size = f"{numbers.format_short_count(start['parameters']['total'])} parameters"
    what = ", ".join(filter(None, [model, size]))
    place = f" on {start['device']['place']}" if start["device"].get("place") else ""
    return escape_to_one_line(f"halfstep train {start['label']}: {what}{place}")


def describe_precision(start: Event) -> str:
    """Return the precision with its reason in one clause."""
    said = start["precision"]
    asked, chosen, reasons = str(said["asked"]), said["chosen"], list(said.get("reasons") or ())
    if _is_substituted(start):
        why = next((reason.partition(": ")[2] for reason in reasons if " rejected: " in reason), "")
        text = f"{chosen} instead of the requested {asked}" + (f": {why}" if why else "")
    elif asked != AUTO:
        text = f"{chosen}, as requested" if asked == chosen else f"{chosen}, requested as {asked}"
    elif words.is_mixed_precision(chosen):
        why = next((reason.partition(": ")[2] for reason in reasons if reason.startswith(f"{chosen} chosen: ")), "")
        text = f"{chosen}, chosen by auto" + (f": {why}" if why else "")
    else:
        device = start["device"].get("place") or "this device"
        text = f"{chosen}: no 16-bit format is faster on {device} (why: halfstep doctor)"
    return escape_to_one_line(text + words.describe_shards(start))


def _is_substituted(start: Event) -> bool:
    return any(finding["id"] == "precision.substituted" for finding in start.get("findings", ()))


def describe_plan(start: Event, seconds: float | None) -> str:
    """Return the length of the run, and about how long the rest of it takes if that is known."""
    epochs, per_epoch, steps = start["epochs"], start["steps_per_epoch"], start["steps"]
    if epochs and steps == epochs * per_epoch:
        length = f"{numbers.format_counted_noun(epochs, 'epoch')} of {numbers.format_counted_noun(per_epoch, 'step')}"
    else:
        length = numbers.format_counted_noun(steps, "step")
        length += f" in {numbers.format_counted_noun(epochs, 'epoch')}" if epochs else ""
    sizes = start["batch"]
    text = f"{length}, batch {numbers.format_count(sizes['total'])}"
    text += f" on {sizes['devices']} devices" if sizes["devices"] > 1 else ""
    rest = numbers.to_float(seconds)
    return f"{text}, about {_round_duration(rest)}" if math.isfinite(rest) else text


def _round_duration(seconds: float) -> str:
    """Return a duration as an estimate: 24 s, 5 min, 3 h 10 min."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{numbers.format_counted_noun(days, 'day')} {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _suggest_explaining(start: Event) -> str | None:
    """Return the command that explains the settings chosen for the data; None if none were chosen."""
    if not start.get("sizing"):
        return None
    path = ((start.get("recipe") or {}).get("data") or {}).get("path")
    place = f" {shlex.quote(str(path))}" if path else ""
    return escape_to_one_line(f"halfstep recipes explain {shlex.quote(str(start['label']))}{place}")


def _label(name: str, text: str, style: str = "") -> ConsoleLine:
    # The folder and the command are there to be copied.
    return ConsoleLine(f"{name.ljust(_LABEL)}{text}", style, fit="keep" if name in ("saved in", "sizes") else "cut")


# -- rows -----------------------------------------------------------------------------------------------------------


class MetricColumn(NamedTuple):
    """A column of numbers: its title, and where its number is in the event of an epoch."""

    title: str
    part: str
    name: str
    is_main: bool = False

    @property
    def width(self) -> int:
        """The title's columns and two blanks; next to the main one, also the mark of the best row."""
        return max(cell_len(self.title), 8) + 2

    def read(self, event: Event) -> str:
        """Return the number of an epoch, or a dash."""
        number = (event.get(self.part) or {}).get(self.name)
        return NO_VALUE if number is None else numbers.format_metric_value(number)


class EpochRow(NamedTuple):
    """The cells of an epoch."""

    place: str
    cells: tuple[str, ...]
    time: str
    left: str
    is_best: bool
    skipped: str


@dataclass(frozen=True)
class EpochTable:
    """The columns of a run."""

    columns: tuple[MetricColumn, ...]
    place_width: int
    has_time: bool
    has_left: bool
    width: int

    @classmethod
    def fitting(cls, event: Event, latest: LatestEvents, width: int = 80) -> EpochTable:
        """Return the table with the columns that fit; `event` is its first epoch."""
        place = max(7, 2 * len(str(max(event["epoch"], event.get("epochs") or 0))) + 2)
        columns = list_metric_columns(event, latest)
        main = [column for column in columns if column.is_main]
        table = cls(tuple(columns), place, True, True, width)
        # Other metrics leave first, the main one never.
        for column in [one for one in reversed(columns) if one.name not in ("loss", main[0].name)]:
            if table._columns_taken() > min(MOST_COLUMNS, width):
                table = cls(tuple(one for one in table.columns if one != column), place, True, True, width)
        for has_time, has_left in ((False, True), (False, False)):
            if table._columns_taken() > width:
                table = cls(table.columns, place, has_time, has_left, width)
        for column in [one for one in table.columns if not one.is_main]:
            if table._columns_taken() > width:
                kept = tuple(one for one in table.columns if one != column)
                table = cls(kept, place, False, False, width)
        return table

    def _columns_taken(self) -> int:
        times = _TIME * self.has_time + _TIME * self.has_left
        return self.place_width + sum(column.width for column in self.columns) + len(f" {BEST}") + times

    @property
    def head(self) -> str:
        """The titles of the columns."""
        titles = (column.title for column in self.columns)
        # The mark is in the title of its column, where a reader looks for its meaning.
        return self.format_row(EpochRow("epoch", tuple(titles), "time", "left", True, ""))

    def build_row(self, event: Event, since: float) -> EpochRow:
        """Return the row of an epoch that began at `since`."""
        epochs = event.get("epochs")
        place = f"{event['epoch']}/{epochs}" if epochs else str(event["epoch"])
        skipped = sum((event.get("skipped") or {}).values())
        return EpochRow(
            place,
            tuple(column.read(event) for column in self.columns),
            numbers.format_clock(event["time"] - since),
            numbers.format_clock(event.get("seconds_left")),
            bool(event.get("is_best")),
            f"{numbers.format_count(skipped)} skipped" if skipped else "",
        )

    def format_row(self, row: EpochRow) -> str:
        """Return the cells as a line."""
        line = row.place.rjust(self.place_width - 1)
        for column, cell in zip(self.columns, row.cells, strict=True):
            line += _justify(cell, column.width)
            if column.is_main:
                line += f" {BEST}" if row.is_best else "  "
        line += _justify(row.time, _TIME) if self.has_time else ""
        line += _justify(row.left, _TIME) if self.has_left else ""
        fits = cell_len(line) + 2 + cell_len(row.skipped) <= self.width
        return f"{line}  {row.skipped}".rstrip() if fits else line.rstrip()


_TIME = 9
"""The columns of a clock."""


def _justify(cell: str, width: int) -> str:
    return " " * max(width - cell_len(cell), 1) + cell


def list_metric_columns(event: Event, latest: LatestEvents) -> list[MetricColumn]:
    """Return the columns of a run: losses, the main metric, other metrics. Without validation, those of training."""
    validated = latest.validated or ((latest.metric, "loss") if latest.start.get("samples", {}).get("val") else ())
    columns = [MetricColumn("loss", "train", "loss", latest.metric == "loss" and not validated)]
    if validated:
        columns.append(MetricColumn("val loss", "val", "loss", latest.metric == "loss"))
    known = validated or tuple(event.get("train") or ())
    others = [name for name in known if name not in ("loss", latest.metric) and not words.is_class_metric(name, known)]
    part, prefix = ("val", "val ") if validated else ("train", "")
    for name in (latest.metric, *others):
        if name != "loss":
            title = escape_to_one_line(f"{prefix}{format_metric_name(name)}")
            columns.append(MetricColumn(title, part, name, name == latest.metric))
    return columns


# -- lines between the rows -------------------------------------------------------------------------------------------


def _is_printed(nth: int) -> bool:
    """Return whether the nth event of a kind is printed: the first ones, and then every tenth power of ten."""
    return nth <= FEW or (nth >= 10 and nth == 10 ** (len(str(nth)) - 1))


def _list_skip_lines(event: Event, latest: LatestEvents) -> list[ConsoleLine]:
    """Return the line of a skip; skips while a loss scale adjusts are only counted in the row."""
    nth = latest.skipped[event["reason"]]
    if event["reason"] == words.ORDINARY or not _is_printed(nth):
        return []
    of = f" ({numbers.format_count(nth)} so far)" if nth > FEW else ""
    return [ConsoleLine(words.describe_skipped_step(event, 0) + of, "yellow", fit="cut")]


def _list_guard_lines(event: Event) -> list[ConsoleLine]:
    """Return the line of a verdict; its evidence is in train.log."""
    style = {"info": "cyan", "error": "bold red"}.get(event.get("level", ""), "yellow")
    return [ConsoleLine(words.describe_guard_event(event)[0], style)]


def _list_warning(event: Event) -> list[ConsoleLine]:
    return [ConsoleLine(words.describe_note(event), "yellow")] if event.get("level") == "warning" else []


def _list_precision_alarm(event: Event) -> list[ConsoleLine]:
    if event["share"] is None or words.is_observed_as_expected(event):
        return []
    return [ConsoleLine(words.describe_precision_check(event), "yellow")]


# -- the live line ----------------------------------------------------------------------------------------------------

_ORDER = ("loss", "metric", "skips", "speed", "wait", "scale", "lr", "gpu", "memory", "saved")
"""The items of the live line, the most important first: a narrow line leaves out the last ones."""
_SHORTEST_BAR, _LONGEST_BAR = 10, 30


def draw_live_line(latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> Text:
    """Return the line with the place in the epoch, the current numbers, and the time left of the run."""
    doing, done, total = _find_place(latest)
    about = "~" if clocks.is_rough else ""
    count = f"{numbers.format_count(done)}/{numbers.format_count(total)}"
    left = f"{about}{numbers.format_clock(clocks.left)} left"
    full, empty = ("━", "─") if words.fit_encoding("━", encoding) == "━" else ("=", "-")
    # One column stays free: some terminals wrap after the last one.
    room = width - 1 - sum(2 + cell_len(part) for part in (doing, count, left)) - _SHORTEST_BAR
    items, room = _choose_items(latest, room, encoding)
    bar = min(_SHORTEST_BAR + max(room, 0), _LONGEST_BAR)
    filled = int(bar * min(done / total, 1.0)) if total else 0
    line = Text(f" {doing} ", style="bold", no_wrap=True, overflow="crop")
    line.append(full * filled, style="not bold cyan").append(empty * (bar - filled), style="not bold bright_black")
    line.append(f" {count}", style="not bold")
    for item in items:
        line.append(
            f"  {words.fit_encoding(item.text, encoding)}", style="not bold yellow" if item.alarm else "not bold"
        )
    line.append(f"  {left}", style="not bold")
    line.truncate(max(width - 1, 1))
    return line


def _find_place(latest: LatestEvents) -> tuple[str, int, int]:
    epochs, step, evaluating = latest.start.get("epochs"), latest.step, latest.evaluating
    place = f"{step['epoch']}/{epochs}" if epochs else str(step["epoch"])
    if evaluating:
        return f"{place} val", evaluating["done"], evaluating["total"]
    return place, step["step_in_epoch"], words.count_epoch_steps(latest)


def _choose_items(latest: LatestEvents, room: int, encoding: str) -> tuple[list[StatusItem], int]:
    """Return the items that fit, in the order of the line, and the columns that are left."""
    found = {item.name: item for item in list_status_items(latest)}
    chosen = []
    for name in _ORDER:
        item = found.get(name)
        if item is None or (name == "wait" and not item.alarm):
            continue
        taken = 2 + cell_len(words.fit_encoding(item.text, encoding))
        if taken > room:
            break
        chosen.append(item)
        room -= taken
    return chosen, room


def _describe_progress(event: Event, latest: LatestEvents) -> str:
    """Return the live line without its bar, for a file."""
    place, done, total = _find_place(latest)
    items = [item.text for item in _choose_items(latest, 40, "utf-8")[0]]
    left = f"{numbers.format_clock(event['seconds_left'])} left"
    count = f"step {numbers.format_count(done)} of {numbers.format_count(total)}"
    return "  ".join([place.rjust(6), count, *items, left])


# -- the end ----------------------------------------------------------------------------------------------------------


def list_ending_lines(event: Event, latest: LatestEvents, width: int = 80) -> list[ConsoleLine]:
    """Return the last lines: at most six rows, the first one is the summary."""
    is_done = event["reason"] in words.DONE
    lines = [ConsoleLine(_describe_summary(event, latest), "bold green" if is_done else "bold yellow")]
    if event["reason"] == words.GAVE_UP:
        error = escape_to_one_line(event.get("error") or "")
        lines += [ConsoleLine(text, indent=2) for text in (error, event.get("checkpoint_note")) if text]
    lines += [
        ConsoleLine(f"remedy of the guard: {escape_to_one_line(one)}", indent=2) for one in event.get("remedies") or ()
    ]
    lines += [ConsoleLine(line, "bold", 2, "keep") for line in suggest_tracker_commands(latest.start)]
    if is_done:
        commands = words.list_next_commands(latest)
    elif event.get("do"):
        commands = [escape_to_one_line(event["do"])]
        if event["reason"] != words.GAVE_UP:
            lines.append(ConsoleLine("to resume:", indent=2))
    else:
        commands = []
    room = max(MOST_ENDING - sum(_count_rows(line, width) for line in lines), 0 if is_done else 1)
    # The commands first: train.log has the observation, too.
    if is_done and len(commands) < room and (observed := _describe_observed(latest)):
        lines.insert(1, ConsoleLine(observed, indent=2, fit="cut"))
    return lines + [ConsoleLine(command, "bold", 4 if not is_done else 2, "keep") for command in commands[:room]]


def _describe_summary(event: Event, latest: LatestEvents) -> str:
    reason = words.ENDINGS.get(event["reason"], escape_to_one_line(event["reason"]))
    took = f"after {numbers.format_duration(event['seconds'])}"
    best, skips = event.get("best") or {}, words.describe_skips(event.get("skipped") or {})
    value = ""
    if best.get("value") is not None:
        value = f"best {format_metric_name(best['metric'])} {numbers.format_metric_value(best['value'])}"
        value += f" in epoch {best['epoch']}, "
    if event["reason"] in words.UNFINISHED:
        by = f" by {words.name_stop_signal(event['signal'])}" if event.get("signal") else ""
        return escape_to_one_line(
            f"{reason}{by} {words.describe_step_place(latest)} {took}: {_describe_kept(event, latest)}"
        )
    return escape_to_one_line(f"{reason} {took}: {value}{numbers.format_counted_noun(event['steps'], 'step')}, {skips}")


def _describe_observed(latest: LatestEvents) -> str:
    """Return the share of the work that ran in the 16-bit format of the run; empty for other runs."""
    check = latest.precision_check
    if check.get("share") is None or not words.is_mixed_precision(latest.start["precision"]["chosen"]):
        return ""
    share = numbers.format_percent(check["share"])
    return escape_to_one_line(f"precision observed: {share} of the FLOPs in {check['expected']}")


def _describe_kept(event: Event, latest: LatestEvents) -> str:
    """Return from where the run resumes."""
    if event.get("checkpoint"):
        kept = f"saved as {event['checkpoint']}"
    elif latest.checkpoint is None:
        kept = "no checkpoint was written yet"
    else:
        kept = f"the newest checkpoint is {words.name_checkpoint(latest.checkpoint)}"
    note = f"; {event['checkpoint_note']}" if event.get("checkpoint_note") else ""
    return kept + note + ("" if event.get("do") else f"; {words.advise_restarting(latest)}")


def _count_rows(line: ConsoleLine, width: int) -> int:
    return 1 if line.fit != "wrap" else max(1, math.ceil(cell_len(line.text) / max(width - line.indent, 1)))
