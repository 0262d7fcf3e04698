"""What a run says to people: the same words on a terminal, in plain lines and in train.log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from halfstep.formats import FORMATS, is_narrow
from halfstep.train.journal import numbers
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import Latest

_NAMES = {
    "iou": "IoU",
    "miou": "mIoU",
    "dice": "Dice",
    "psnr": "PSNR",
    "fg": "FG",
    "ari": "ARI",
    "mbo": "mBO",
    "ssim": "SSIM",
    "top1": "Top-1",
    "top5": "Top-5",
}
_ASCII = str.maketrans({"×": "x", "→": "->", "·": "|", "✓": "*", "🚀": "on", "📊": "off", "…": "...", "°": " "})
ORDINARY = "gradient_overflow"
"""How a loss scale finds its place: not the fault of a sample, and nothing to look at twice."""
_MOST = 0.9
"""A share of the work from which a precision counts as on."""
MOST_ROWS = 10
"""Rows of an epoch's summary; a task with a thousand classes has a metric for each."""
FIRST_SKIPS, THEN_EVERY = 10, 100
"""Skips of one reason that are told one by one, and how seldom the later ones are."""


class Item(NamedTuple):
    """One of the numbers of a line; `alarm` asks for a person's eye."""

    text: str
    alarm: bool = False


def clean(text: Any) -> str:
    """Free text on one line, without characters that would move a cursor or colour a terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def several(number: int, word: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{numbers.count(number)} {word}" if number == 1 else f"{numbers.count(number)} {word}s"


def fitted(text: str, encoding: str | None) -> str:
    """The text as an output can write it: signs that it has no code for become plain letters."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def named(metric: str) -> str:
    """A metric as people write it."""
    words = " ".join(_NAMES.get(word.lower(), word) for word in clean(metric).split("_"))
    return words if words.startswith(tuple(_NAMES.values())) else words[:1].upper() + words[1:]


def is_mixed(precision: str) -> bool:
    """Whether a precision computes in fewer than 32 bits."""
    known = FORMATS.get(precision)
    return known is not None and known.dtype is not None and is_narrow(known.dtype)


def precision(start: Event) -> str:
    """The sentence about precision, which says what was asked for and what was chosen."""
    asked, chosen = start["precision"]["asked"], start["precision"]["chosen"]
    ending = f", asked for {clean(asked)}" if str(asked) != chosen else ", as asked for"
    if not is_mixed(chosen):
        return f"Mixed precision training is off: {chosen}{ending}"
    return f"Mixed precision training: {chosen} ({str(FORMATS[chosen].dtype).removeprefix('torch.')}){ending}"


def mark(start: Event, observed: float | None) -> str:
    """The sign beside a progress bar: is it on, and how much of the work really ran in it?"""
    chosen = start["precision"]["chosen"]
    seen = f", {numbers.share(observed)} observed" if observed is not None else ""
    return f"mp: {'🚀' if is_mixed(chosen) else '📊'} {chosen}{seen}"


def batch(start: Event) -> str:
    """`4 × 2 devices × 2 micro-batches = 16 a step`."""
    sizes = start["batch"]
    parts = [numbers.count(sizes["per_device"])]
    if sizes["devices"] > 1:
        parts.append(f"{sizes['devices']} devices")
    if sizes["microbatches"] > 1:
        parts.append(f"{sizes['microbatches']} micro-batches")
    total = f"{numbers.count(sizes['total'])} a step"
    return f"{' × '.join(parts)} = {total}" if len(parts) > 1 else total


def header(start: Event) -> list[tuple[str, str]]:
    """What a run is, as pairs of a word and a line."""
    parameters, versions, device = start["parameters"], start["versions"], start["device"]
    trained = (
        "" if parameters["trainable"] == parameters["total"] else f", {numbers.many(parameters['trainable'])} trained"
    )
    place = f" ({device['place']})" if device["place"] else ""
    rows = [
        ("device", f"{device['name']}{place}"),
        ("batch", batch(start)),
        ("samples", _samples(start)),
        ("length", _length(start)),
        ("parameters", f"{numbers.many(parameters['total'])}{trained}"),
        ("run folder", start["dir"]),
        ("versions", " · ".join(f"{name} {number}" for name, number in versions.items())),
    ]
    return [(word, clean(line)) for word, line in rows]


def recipe(start: Event) -> list[str]:
    """The resolved recipe, a line for each section."""
    return [clean(f"{section}: {_in_line(content)}") for section, content in start["recipe"].items() if content != {}]


def why(start: Event) -> list[str]:
    """Why this precision: what it took another's word for, the choice, and its reasons."""
    said = start["precision"]
    lines = [said.get("took"), said.get("summary"), *said.get("reasons", ())]
    return list(dict.fromkeys(clean(line) for line in lines if line))


def remarks(start: Event) -> list[Item]:
    """Notes and findings of the beginning."""
    notes = [Item(clean(note)) for note in start.get("notes", ())]
    findings = [
        Item(clean(f"{f['severity']} {f['id']}: {f['evidence']} ({f['fix']})"), f["severity"] != "note")
        for f in start.get("findings", ())
    ]
    return notes + findings


def place(latest: Latest) -> str:
    """`Epoch 3/100`."""
    epochs = latest.start.get("epochs")
    epoch = latest.step.get("epoch", 1)
    return f"Epoch {epoch}/{epochs}" if epochs else f"Epoch {epoch}"


def skips(skipped: Mapping[str, int]) -> str:
    """`3 skipped (2 gradient_overflow, 1 loss_not_finite)`."""
    total = sum(skipped.values())
    reasons = ", ".join(
        f"{numbers.count(n)} {clean(reason)}" if len(skipped) > 1 else clean(reason) for reason, n in skipped.items()
    )
    return f"{numbers.count(total)} skipped ({reasons})" if total else "none skipped"


def is_told(nth: int) -> bool:
    """Whether the nth skip of a reason has a line of its own."""
    return nth <= FIRST_SKIPS or nth % THEN_EVERY == 0


def skip(step: Event, nth: int) -> str:
    """A line about one skipped step."""
    text = (
        f"skipped attempt {numbers.count(step['attempt'])}: {clean(step['reason'])}, loss {numbers.value(step['loss'])}"
    )
    if step.get("loss_scale") not in (None, 1.0):
        text += f", scale {numbers.scale(step['loss_scale'])}"
    if step.get("quarantined"):
        text += f"; quarantined samples {numbers.few(step['quarantined'])}"
    elif step.get("ids") and step["reason"] != ORDINARY:
        text += f"; samples {numbers.few(step['ids'])}"
    return text + (f" (from here every {THEN_EVERY}th; all are in the journal)" if nth == FIRST_SKIPS else "")


def guard(event: Event) -> list[str]:
    """What the guard said of a step or of what it did; the lines after the first are its evidence."""
    first, *others = [clean(line) for line in str(event["text"]).splitlines() if line.strip()] or [""]
    return [f"guard: {first}", *(f"  {line.strip()}" for line in others)]


def replaced(event: Event) -> str:
    instead = f"sample {event['by']} stands in for it" if event["by"] >= 0 else "it is left out of the evaluation"
    return clean(f"cannot use {event['name']}: {event['reason']}; {instead}")


def observed(event: Event) -> str:
    share = "" if event["share"] is None else f"{numbers.share(event['share'])} "
    text = clean(event["text"]) or f"{share}in {clean(event['expected'])}"
    return f"✓ observed: {text}" if numbers.real(event["share"]) >= _MOST else f"observed: {text}"


def saved(event: Event) -> str:
    return clean(f"saved {event['what']}: {event['file']}")


def summary(event: Event, metric: str) -> list[str]:
    """The end of an epoch, as a table that people know."""
    train, val = event["train"], event.get("val") or {}
    keys = [key for key in dict.fromkeys(["loss", metric, *train, *val]) if key in train or key in val]
    # Where there is a mean, the numbers of the single classes are for the journal.
    rows = [(named(key), train.get(key), val.get(key)) for key in keys if not _is_part(key, keys)]
    shown, width = rows[:MOST_ROWS], max((len(name) for name, _, _ in rows[:MOST_ROWS]), default=0)
    lines = [f"Epoch {event['epoch']} Summary:"]
    lines += ["  " + " | ".join(_cells(row, width, bool(train), bool(val))).rstrip() for row in shown]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more in the journal")
    return [*lines, f"  {_closing(event)}"]


def _in_line(content: Any) -> str:
    if isinstance(content, Mapping):
        return ", ".join(f"{key} {_in_line(value)}" for key, value in content.items())
    if isinstance(content, list):
        return f"[{', '.join(_in_line(value) for value in content)}]"
    if isinstance(content, float):
        return f"{content:g}"
    if isinstance(content, bool):
        return str(content).lower()
    return "null" if content is None else str(content)


def _is_part(key: str, keys: Collection[str]) -> bool:
    whole, _, part = key.partition("_")
    return bool(part) and whole in keys


def _samples(start: Event) -> str:
    samples = start["samples"]
    again = f" ({numbers.count(start['repeats'])} again, to fill the last step)" if start.get("repeats") else ""
    val = f"{numbers.count(samples['val'])} val" if samples.get("val") else "no val"
    return f"{numbers.count(samples['train'])} train{again} · {val}"


def _length(start: Event) -> str:
    each = f"{several(start['steps_per_epoch'], 'step')} an epoch"
    steps = several(start["steps"], "step")
    return f"{several(start['epochs'], 'epoch')}, {each}, {steps}" if start["epochs"] else f"{steps}, {each}"


def _cells(row: tuple[str, Any, Any], width: int, has_train: bool, has_val: bool) -> list[str]:
    name, train, val = row
    label = f"{name}:".ljust(width + 1)
    columns = [("Train", train, has_train), ("Val", val, has_val)]
    return [
        f"{which} {label} {numbers.value(number)}" if number is not None else f"{which} {label} -     "
        for which, number, present in columns
        if present
    ]


def _closing(event: Event) -> str:
    best = event.get("best") or {}
    parts = []
    if event.get("is_best"):
        parts.append("best so far")
    elif best.get("value") is not None:
        parts.append(f"best {numbers.value(best['value'])} in epoch {best['epoch']}")
    parts += [numbers.duration(event["seconds"]), f"{numbers.speed(event['samples_per_second'])} img/s"]
    parts.append(f"lr {numbers.rate(event['lr'])}")
    if any((event.get("skipped") or {}).values()):
        parts.append(skips(event["skipped"]))
    return " · ".join(parts)
