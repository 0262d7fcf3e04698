"""How data differs from what it was, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from halfstep.train.data.fingerprint import NOT_READ, UNREADABLE, Fingerprint, Part, Row

MOST_LINES = 20
LONGEST_NAME = 120
_NAMES = ("train", "val")


def different(saved: Fingerprint, now: Fingerprint, names: Sequence[str] = _NAMES) -> list[str]:
    """A few lines that say what changed; none where the data is the same. `names` are those of several sources."""
    if len(saved.parts) != len(now.parts):
        return [f"{_counted(len(now.parts), 'source')} of samples, saved {len(saved.parts):,}"]
    lines = []
    for number, (before, after) in enumerate(zip(saved.parts, now.parts, strict=True)):
        name = names[number] if number < len(names) else f"source {number + 1}"
        start = f"{name}: " if len(now.parts) > 1 else ""
        lines += [start + line for line in _changes(before, after)]
    return lines[:MOST_LINES]


def _changes(saved: Part, now: Part) -> list[str]:
    if _identity(saved) == _identity(now):
        return []
    lines: list[str] = []
    if saved.of != now.of:
        lines.append(f"{now.of}s are compared, where {saved.of}s were")
    elif saved.rows is not None and now.rows is not None:
        lines += _row_changes(saved, now)
    else:
        lines += _group_changes(saved, now)
    if not lines and saved.samples != now.samples:
        lines.append(f"{_counted(now.samples, 'sample')}, saved {saved.samples:,}")
    elif not lines and saved.order != now.order:
        lines.append(f"the same {now.of}s, with other samples or in another order")
    return lines or [f"other data: {now.digest}, saved {saved.digest}"]


def _identity(part: Part) -> tuple[object, ...]:
    return part.samples, part.order, part.of, part.count, part.size, part.whole, part.digest


def _row_changes(saved: Part, now: Part) -> list[str]:
    # Counted, and not a set: people's own sources may give a name twice.
    gone = Counter(saved.rows) - Counter(now.rows)
    came = Counter(now.rows) - Counter(saved.rows)
    before, after = _by_key(gone), _by_key(came)
    both = [(before.pop(key), after.pop(key)) for key in sorted(before.keys() & after.keys())]
    changed = [pair for pair in both if _told_apart(*pair, saved.whole == now.whole)]
    renamed = _renamed(before, after)
    return [
        *_line(now.of, "renamed", [f"{_shown(old)} -> {_shown(new)}" for old, new in renamed]),
        *_line(now.of, "added", map(_shown, after)),
        *_line(now.of, "removed", map(_shown, before)),
        *_line(now.of, "changed", [f"{_shown(old.key)} ({_how(old, new)})" for old, new in changed]),
    ]


def _by_key(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.key: row for row in sorted(rows)}


def _told_apart(old: Row, new: Row, same_reading: bool) -> bool:
    """Contents say something only where both were read, and in the same way."""
    if old.size != new.size or UNREADABLE in (old.content, new.content):
        return True
    return same_reading and NOT_READ not in (old.content, new.content)


def _renamed(before: dict[str, Row], after: dict[str, Row]) -> list[tuple[str, str]]:
    """Files that came with the content of one that went; taken out of both."""
    gone: dict[tuple[int, str], list[str]] = {}
    for key, row in reversed(before.items()):
        if row.content not in (UNREADABLE, NOT_READ):
            gone.setdefault((row.size, row.content), []).append(key)
    pairs = []
    for key, row in list(after.items()):
        if old := gone.get((row.size, row.content)):
            pairs.append((old.pop(), key))
            del before[pairs[-1][0]], after[key]
    return pairs


def _how(old: Row, new: Row) -> str:
    if UNREADABLE in (old.content, new.content):
        return "cannot be read now" if new.content == UNREADABLE else "could not be read before"
    if old.size != new.size:
        return f"{_counted(old.size, 'byte')} -> {_counted(new.size, 'byte')}"
    return "same size, other content"


def _group_changes(saved: Part, now: Part) -> list[str]:
    """There are too many files to name: how many more or fewer, and how widely the others differ."""
    lines = []
    if saved.count != now.count:
        lines.append(f"{_counted(now.count, now.of)}, saved {saved.count:,}")
    if saved.size != now.size:
        lines.append(f"{_counted(now.size, 'byte')} in all, saved {saved.size:,}")
    groups = list(zip(saved.by_group(), now.by_group(), strict=True))
    others = sum(old != new for old, new in groups)
    if others and saved.whole == now.whole:
        each = f"of about {_counted(round(now.count / len(groups)), now.of)} each"
        lines.append(f"names, sizes or contents differ in {others} of {len(groups)} groups, {each}")
    return lines


def _line(thing: str, what: str, examples: Iterable[str]) -> list[str]:
    listed = list(examples)
    if not listed:
        return []
    between = ":" if len(listed) == 1 else ", the first"
    return [f"{_counted(len(listed), thing)} {what}{between} {listed[0]}"]


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _shown(key: str) -> str:
    """Harmless to a terminal, and not longer than a line or two."""
    safe = key if key.isprintable() else repr(key)
    return safe if len(safe) <= LONGEST_NAME else f"...{safe[3 - LONGEST_NAME :]}"
