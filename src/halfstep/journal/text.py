"""Word the messages of a run for users: the same on a terminal, in plain lines and in train.log."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from halfstep import numbers
from halfstep.journal.events import Event
from halfstep.journal.latest import CheckpointName, LatestEvents
from halfstep.journal.trackers import LOOK, UPLOAD, suggest_tracker_commands
from halfstep.metric_names import format_metric_name
from halfstep.precision.names import AUTO, FP8, FP8_KINDS, parse_policy_name
from halfstep.printable import escape_to_one_line

_ASCII = str.maketrans({"×": "x", "→": "->", "·": "|", "✓": "*", "🚀": "on", "📊": "off", "…": "...", "°": " "})
FIT_CALL = "halfstep.fit("
"""How the command of a run begins that was started from Python."""
ORDINARY = "gradient_overflow"
"""The reason of a skip while a loss scale adjusts; it is normal and no fault of a sample."""
_MOST = 0.9
"""The share of the work from which on a precision counts as active."""
MOST_ROWS = 10
"""The maximum number of rows of an epoch's summary; a task with a thousand classes has a metric for each."""
FIRST_SKIPS, THEN_EVERY = 10, 100
"""The number of skips of one reason that get a line each, and the interval of lines after that."""


class LineItem(NamedTuple):
    """One number of a line; `alarm` marks one that needs attention."""

    text: str
    alarm: bool = False


def fit_encoding(text: str, encoding: str | None) -> str:
    """Return the text as an output can encode it; characters that it lacks become ASCII."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def is_mixed_precision(precision: str) -> bool:
    """Return whether a precision, or a policy, computes in fewer than 32 bits."""
    return bool(_list_narrow_formats(precision))


def _list_narrow_formats(precision: str) -> list[str]:
    """Return what a precision, or a policy, computes in: the name of a 16-bit dtype, and fp8."""
    # It loads torch, and those who only read a journal do without.
    from halfstep.formats import FORMATS, is_narrow

    default, rules = parse_policy_name(precision)
    known = FORMATS.get("bf16" if default in FP8_KINDS else default)
    dtype = None if known is None else known.dtype
    in_fp8 = any(name in FP8_KINDS for name in (default, *(rule.name for rule in rules)))
    narrow = [] if dtype is None or not is_narrow(dtype) else [str(dtype).removeprefix("torch.")]
    return [*narrow, FP8] if in_fp8 else narrow


def describe_shards(start: Event) -> str:
    """Return a clause on the formats in which FSDP2 gathers and sums the shards; empty without shards."""
    shards = start.get("shards")
    return f"; shards {escape_to_one_line(shards['summary'])}" if shards else ""


def describe_precision(start: Event) -> str:
    """Return the sentence on precision: the requested one and the chosen one."""
    asked, chosen = start["precision"]["asked"], start["precision"]["chosen"]
    found = {finding["id"] for finding in start.get("findings", ())}
    if "precision.substituted" in found:
        ending = f" instead of the requested {escape_to_one_line(asked)}"
    elif asked == AUTO:
        ending = ", chosen by auto"
    else:
        ending = ", as requested" if str(asked) == chosen else f", requested as {escape_to_one_line(asked)}"
    ending += "; slow on this device" if "precision.slow" in found else ""
    ending += describe_shards(start)
    if not is_mixed_precision(chosen):
        return f"Mixed precision training is off: {chosen}{ending}"
    return f"Mixed precision training: {chosen} ({' and '.join(_list_narrow_formats(chosen))}){ending}"


def list_precision_lines(start: Event) -> list[str]:
    """Return the sentence on precision; of mixed precision, also the line by which users of AMP check it."""
    enabled = _list_narrow_formats(start["precision"]["chosen"])
    amp = [f"✓ AMP enabled with {' and '.join(enabled)}"] if enabled else []
    return [describe_precision(start), *amp]


def format_bar_label(start: Event, observed: float | None) -> str:
    """Return the label of a progress bar: the precision, and the share of the work that ran in it."""
    chosen = start["precision"]["chosen"]
    seen = f", {numbers.format_percent(observed)} observed" if observed is not None else ""
    return f"mp: {'🚀' if is_mixed_precision(chosen) else '📊'} {chosen}{seen}"


def describe_batch_size(start: Event) -> str:
    """Return the batch size as a product: `4 × 2 devices × 2 micro-batches = 16 a step`."""
    sizes = start["batch"]
    parts = [numbers.format_count(sizes["per_device"])]
    if sizes["devices"] > 1:
        parts.append(f"{sizes['devices']} devices")
    if sizes["microbatches"] > 1:
        parts.append(f"{sizes['microbatches']} micro-batches")
    total = f"{numbers.format_count(sizes['total'])} per step"
    return f"{' × '.join(parts)} = {total}" if len(parts) > 1 else total


def describe_run(start: Event) -> list[tuple[str, str]]:
    """Return the description of a run, as pairs of a label and a line."""
    parameters, versions, device = start["parameters"], start["versions"], start["device"]
    trained = (
        ""
        if parameters["trainable"] == parameters["total"]
        else f", {numbers.format_short_count(parameters['trainable'])} trained"
    )
    place = f" ({device['place']})" if device["place"] else ""
    length = (
        f"{numbers.format_counted_noun(start['steps'], 'step')} ("
        f"{numbers.format_count(start['steps_per_epoch'])} per epoch)"
    )
    if start["epochs"]:
        length = f"{numbers.format_counted_noun(start['epochs'], 'epoch')}, {length}"
    rows = [
        ("device", f"{device['name']}{place}"),
        ("batch", describe_batch_size(start)),
        ("samples", describe_samples(start)),
        ("length", length),
        ("parameters", f"{numbers.format_short_count(parameters['total'])}{trained}"),
        ("run folder", f"{start['dir']} (every setting is in its recipe.yaml)"),
        ("versions", " · ".join(f"{name} {number}" for name, number in versions.items())),
    ]
    return [(word, escape_to_one_line(line)) for word, line in rows]


def explain_precision(start: Event) -> list[str]:
    """Return the reasons for the precision: translated settings, the choice, and why."""
    said = start["precision"]
    lines = [said.get("took"), said.get("summary"), *said.get("reasons", ())]
    return list(dict.fromkeys(escape_to_one_line(line) for line in lines if line))


def list_start_remarks(start: Event) -> list[LineItem]:
    """Return the notes and findings at the start of a run."""
    notes = [LineItem(escape_to_one_line(note)) for note in start.get("notes", ())]
    findings = [
        LineItem(
            escape_to_one_line(f"{f['severity']} {f['id']}: {f['evidence']} ({f['fix']})"), f["severity"] != "note"
        )
        for f in start.get("findings", ())
    ]
    return notes + findings


def count_epoch_steps(latest: LatestEvents) -> int:
    """Return the steps of the present epoch, at whose end or before which the run ends."""
    start, step = latest.start, latest.step
    before = int(step["attempt"] - step["step_in_epoch"])
    return min(int(start["steps_per_epoch"]), int(start["steps"]) - before)


def format_epoch_place(latest: LatestEvents) -> str:
    """Return the place in the run: `Epoch 3/100`."""
    epochs = latest.start.get("epochs")
    epoch = latest.step.get("epoch", 1)
    return f"Epoch {epoch}/{epochs}" if epochs else f"Epoch {epoch}"


def describe_skips(skipped: Mapping[str, int]) -> str:
    """Return the skips by reason: `3 skipped (2 gradient_overflow, 1 loss_not_finite)`."""
    total = sum(skipped.values())
    reasons = ", ".join(
        f"{numbers.format_count(n)} {escape_to_one_line(reason)}" if len(skipped) > 1 else escape_to_one_line(reason)
        for reason, n in skipped.items()
    )
    return f"{numbers.format_count(total)} skipped ({reasons})" if total else "none skipped"


def is_skip_printed(nth: int) -> bool:
    """Return whether the nth skip of a reason gets a line."""
    return nth <= FIRST_SKIPS or nth % THEN_EVERY == 0


def describe_skipped_step(step: Event, nth: int) -> str:
    """Return the line on one skipped step."""
    attempt, loss = numbers.format_count(step["attempt"]), numbers.format_metric_value(step["loss"])
    text = f"skipped attempt {attempt}: {escape_to_one_line(step['reason'])}, loss {loss}"
    if step.get("loss_scale") not in (None, 1.0):
        text += f", scale {numbers.format_loss_scale(step['loss_scale'])}"
    if step.get("quarantined"):
        text += f"; quarantined samples {numbers.format_first_items(step['quarantined'])}"
    elif step.get("ids") and step["reason"] != ORDINARY:
        text += f"; samples {numbers.format_first_items(step['ids'])}"
    return text + (f" (from here every {THEN_EVERY}th; all are in the journal)" if nth == FIRST_SKIPS else "")


def describe_guard_event(event: Event) -> list[str]:
    """Return the lines of a guard event; those after the first are its evidence."""
    first, *others = [escape_to_one_line(line) for line in str(event["text"]).splitlines() if line.strip()] or [""]
    return [f"guard: {first}", *(f"  {line.strip()}" for line in others)]


def describe_bad_sample(event: Event) -> str:
    """Return the line on a sample that was replaced or left out."""
    instead = (
        f"sample {event['replacement']} replaces it"
        if event["replacement"] >= 0
        else "it is left out of the evaluation"
    )
    return escape_to_one_line(f"cannot use {event['name']}: {event['reason']}; {instead}")


def is_observed_as_expected(event: Event) -> bool:
    """Return whether the share of the work in the expected precision is large enough."""
    return numbers.to_float(event["share"]) >= _MOST


def describe_precision_check(event: Event) -> str:
    """Return the line on the precision that was observed in the first step."""
    share = "" if event["share"] is None else f"{numbers.format_percent(event['share'])} "
    text = escape_to_one_line(event["text"]) or f"{share}in {escape_to_one_line(event['expected'])}"
    return f"✓ observed: {text}" if is_observed_as_expected(event) else f"observed: {text}"


def describe_note(event: Event) -> str:
    """Return the line of a note."""
    level = "warning: " if event.get("level") == "warning" else ""
    return level + escape_to_one_line(event["text"])


def describe_saved_file(event: Event) -> str:
    """Return the line on a file that was written."""
    return escape_to_one_line(f"saved {event['kind']}: {event['file']}")


def format_epoch_summary(event: Event, metric: str) -> list[str]:
    """Return the summary of an epoch, as a table."""
    train, val = event["train"], event.get("val") or {}
    keys = [key for key in dict.fromkeys(["loss", metric, *train, *val]) if key in train or key in val]
    # If there is a mean, the numbers of the single classes are left to the journal.
    rows = [(format_metric_name(key), train.get(key), val.get(key)) for key in keys if not is_class_metric(key, keys)]
    shown, width = rows[:MOST_ROWS], max((len(name) for name, _, _ in rows[:MOST_ROWS]), default=0)
    lines = [f"Epoch {event['epoch']} Summary:"]
    lines += ["  " + " | ".join(_format_summary_cells(row, width, bool(train), bool(val))).rstrip() for row in shown]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more in the journal")
    return [*lines, f"  {_describe_epoch_end(event)}"]


def is_class_metric(key: str, keys: Collection[str]) -> bool:
    """Return whether a metric is that of a single class, and its mean is among the others."""
    whole, _, part = key.partition("_")
    return bool(part) and whole in keys


def describe_samples(start: Event) -> str:
    """Return the numbers of samples for training and for validation."""
    samples = start["samples"]
    again = (
        f" ({numbers.format_count(start['repeated_samples'])} repeated to fill the last step)"
        if start.get("repeated_samples")
        else ""
    )
    val = f"{numbers.format_count(samples['val'])} val" if samples.get("val") else "no val"
    return f"{numbers.format_count(samples['train'])} train{again} · {val}"


def _format_summary_cells(row: tuple[str, Any, Any], width: int, has_train: bool, has_val: bool) -> list[str]:
    name, train, val = row
    label = f"{name}:".ljust(width + 1)
    columns = [("Train", train, has_train), ("Val", val, has_val)]
    return [
        f"{which} {label} {numbers.format_metric_value(number)}" if number is not None else f"{which} {label} -     "
        for which, number, present in columns
        if present
    ]


def describe_throughput(event: Event) -> str:
    """Return the throughput in the unit of the task."""
    tokens = event.get("tokens_per_second")
    if tokens is not None:
        return f"{numbers.format_speed(tokens)} tokens/s"
    return f"{numbers.format_speed(event['samples_per_second'])} img/s"


def _describe_epoch_end(event: Event) -> str:
    best = event.get("best") or {}
    parts = []
    if event.get("is_best"):
        parts.append("best so far")
    elif best.get("value") is not None:
        parts.append(f"best {numbers.format_metric_value(best['value'])} in epoch {best['epoch']}")
    parts += [numbers.format_duration(event["seconds"]), describe_throughput(event)]
    parts.append(f"lr {numbers.format_learning_rate(event['lr'])}")
    if any((event.get("skipped") or {}).values()):
        parts.append(describe_skips(event["skipped"]))
    return " · ".join(parts)


STOPPED, GAVE_UP = "stopped", "gave_up"
ENDINGS = {
    "finished": "Finished",
    "early_stopping": "Stopped early",
    "interrupted": "Interrupted",
    "failed": "Failed",
    STOPPED: "Stopped",
    GAVE_UP: "Gave up",
    "out_of_memory": "Out of memory",
}
UNFINISHED = ("interrupted", "failed", STOPPED)
DONE = ("finished", "early_stopping")
NEXT = "next:"
TO_TYPE = ("do:", LOOK, UPLOAD)
"""The prefixes of lines that the user is meant to copy."""
_KEPT = ("best", "last", "curves")


def describe_ending(event: Event, latest: LatestEvents) -> list[str]:
    """Return the last lines of a run; the first one is the summary."""
    reason = ENDINGS.get(event["reason"], escape_to_one_line(event["reason"]))
    applied, skipped = numbers.format_counted_noun(event["steps"], "step"), describe_skips(event.get("skipped") or {})
    lines = [f"{reason} after {numbers.format_duration(event['seconds'])}: {applied} applied, {skipped}"]
    if event.get("error"):
        lines += _indent_lines(event["error"])
    lines += [escape_to_one_line(f"  remedy of the guard: {remedy}") for remedy in event.get("remedies") or ()]
    if event["reason"] in UNFINISHED:
        lines.append(f"  {_advise_resuming(event, latest)}")
    elif latest.checkpoint is not None and event["reason"] != GAVE_UP:
        lines.append(f"  last checkpoint: {name_checkpoint(latest.checkpoint)}")
    best = event.get("best") or {}
    if best.get("value") is not None:
        lines.append(
            f"  best {format_metric_name(best['metric'])}: {numbers.format_metric_value(best['value'])}, in epoch "
            f"{best['epoch']}"
        )
    folder = latest.start.get("dir", "")
    kept = {what: file for what, file in latest.saved.items() if what in _KEPT}
    lines += [escape_to_one_line(f"  {what} saved in: {os.path.join(folder, file)}") for what, file in kept.items()]
    lines += [escape_to_one_line(f"  {line}") for line in suggest_tracker_commands(latest.start)]
    if event["reason"] in DONE:
        lines += [f"  {NEXT} {command}" for command in list_next_commands(latest)]
    return (
        lines
        + _indent_lines(event.get("checkpoint_note"))
        + _indent_lines(f"{TO_TYPE[0]} {event['do']}" if event.get("do") else "")
    )


def list_next_commands(latest: LatestEvents) -> list[str]:
    """Return the commands for a finished run."""
    folder = latest.start.get("dir", "")
    if not folder:
        return []
    run = shlex.quote(folder)
    images = "" if latest.start.get("generates") else " FOLDER"
    commands = (f"report {run}", f"evaluate {run}", f"predict {run}{images}", f"export {run}")
    return [escape_to_one_line(f"halfstep {command}") for command in commands]


def _indent_lines(text: str | None) -> list[str]:
    """Return printable lines, indented."""
    return [f"  {escape_to_one_line(line)}" for line in (text or "").splitlines() if line.strip()]


def _advise_resuming(event: Event, latest: LatestEvents) -> str:
    signal = name_stop_signal(event["signal"]) if event.get("signal") else ""
    if event.get("checkpoint"):
        by = f"stopped by {signal} {describe_step_place(latest)}: " if signal else ""
        return escape_to_one_line(f"{by}saved as {event['checkpoint']}; {advise_restarting(latest)}")
    by = f"stopped by {signal} {describe_step_place(latest)} without saving: " if signal else ""
    if latest.checkpoint is None:
        return escape_to_one_line(f"{by}no checkpoint was written yet: the same command starts again from step 0")
    return (
        f"{escape_to_one_line(f'{by}{advise_restarting(latest)}')} from checkpoint {name_checkpoint(latest.checkpoint)}"
    )


def name_stop_signal(signal: str) -> str:
    """Return the name of a signal as a person at a keyboard knows it."""
    return "Ctrl-C" if signal == "SIGINT" else escape_to_one_line(signal)


def advise_restarting(latest: LatestEvents) -> str:
    """Return how to continue the run; the same command with --new would start another one."""
    if "--new" in str(latest.start.get("command", "")).split():
        folder = shlex.quote(f"run.dir={latest.start.get('dir', '')}")
        return f"start it again without --new, with {folder}, to resume"
    if str(latest.start.get("command", "")).startswith(FIT_CALL):
        return "call it again, or run the cell again, to resume"
    return "start it again with the same command to resume"


def name_checkpoint(checkpoint: CheckpointName) -> str:
    """Return the name of a checkpoint with its step."""
    return f"{escape_to_one_line(checkpoint.name)} (step {numbers.format_count(checkpoint.attempt)})"


def describe_step_place(latest: LatestEvents) -> str:
    """Return the place in the run: `at step 23 of 192`."""
    steps = latest.start.get("steps")
    of = f" of {numbers.format_count(steps)}" if steps else ""
    return f"at step {numbers.format_count(latest.attempt)}{of}"


MOST_LINES = 20
"""The maximum number of lines of one kind; changed data may have a line for each file."""
LITTLE = 0.01
"""The share of the highest learning rate below which an extended run hardly learns."""


def describe_resume(start: Event) -> list[LineItem]:
    """Return the lines after the title; none for a run that is started for the first time."""
    said = start.get("resumed")
    if not said:
        return []
    lines = [_describe_place(said, start), *_describe_extension(said.get("extended"))]
    if not said.get("exact", True):
        reasons = (
            said.get("reasons")
            or [f"the {kind} was changed" for kind in said.get("accepted") or ()]
            or ["exactness is unknown"]
        )
        lines += _limit_lines("APPROXIMATE because ", reasons, alarm=True)
    lines += _limit_lines("accepted change: ", said.get("changed") or (), alarm=False)
    return lines + _limit_lines("rejected checkpoint ", said.get("rejected_checkpoints") or (), alarm=True)


def is_resumed(start: Event) -> bool:
    """Return whether the run continues from a checkpoint, so that its log already describes it."""
    return bool((start.get("resumed") or {}).get("checkpoint"))


def _describe_place(said: dict[str, Any], start: Event) -> LineItem:
    if not said.get("checkpoint"):
        return LineItem("started again from step 0: the run ended before its first checkpoint")
    at, end = numbers.format_count(said["attempt"]), numbers.format_count(start["steps"])
    rest = f"from checkpoint {said['checkpoint']}{_describe_repeated(said.get('repeated_steps'))}"
    if said["attempt"] > start["steps"]:
        return LineItem(
            escape_to_one_line(f"resumed at step {at} {rest}: the run is already beyond its new end, step {end}")
        )
    return LineItem(escape_to_one_line(f"resumed at step {at} of {end} {rest}"))


def _describe_extension(said: Mapping[str, Any] | None) -> list[LineItem]:
    """Return the new length of an extended run, and what happens to its learning rate."""
    if not said:
        return []
    epochs = f" ({said['epochs']} epochs)" if said.get("epochs") else ""
    lines = [
        LineItem(
            f"extended from step {numbers.format_count(said['from'])} to step "
            f"{numbers.format_count(said['to'])}{epochs}"
        )
    ]
    lr, highest = numbers.to_float(said["lr"]), numbers.to_float(said["peak_lr"])
    if said.get("rewarm"):
        return [
            *lines,
            LineItem(
                f"learning rate: a new warm-up to {numbers.format_learning_rate(highest)} and a new decay from there"
            ),
        ]
    lines.append(LineItem(f"learning rate: stays at its last value, {numbers.format_learning_rate(lr)}"))
    if lr < LITTLE * highest:
        share = f"{lr / highest:.2g} of its maximum, too low to learn much"
        lines.append(LineItem(f"that is {share}: for a new warm-up and decay, stop and add --rewarm", alarm=True))
    return lines


def _describe_repeated(repeated: int | None) -> str:
    if not repeated:
        return ""
    return f" ({numbers.format_count(repeated)} steps are repeated)" if repeated > 1 else " (1 step is repeated)"


def _limit_lines(word: str, lines: Iterable[Any], alarm: bool) -> list[LineItem]:
    every = [LineItem(escape_to_one_line(f"{word}{line}"), alarm) for line in lines]
    more = len(every) - MOST_LINES
    return [*every[:MOST_LINES], LineItem(f"{word}{more} more, which are in the journal", alarm)] if more > 0 else every
