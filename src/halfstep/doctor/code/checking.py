"""Check a Python file by its syntax tree: nothing in it is imported or executed. Imports no torch."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from halfstep.doctor.code import rules
from halfstep.doctor.code.autocasts import can_open_autocast
from halfstep.doctor.code.facts import ScriptFacts, build_script_facts
from halfstep.doctor.code.words import collect_words
from halfstep.doctor.located import LocatedFinding, apply_line_edits

LARGEST = 1_000_000
"""Characters. A larger file is data or generated; parsing takes more than a second for each million."""
MOST = 300
"""Calls that are compared with each other: time grows with their cube. Code that people write has a few dozen."""
MOST_TRIED, LARGEST_TRIED = 20, 200_000
"""Findings of one file whose edits are tried, and the characters of a file in which they are."""
_LIBRARIES = ("torch", "lightning", "accelerate", ".unscale_(")
"""Paddle has a GradScaler too. A scaler that is an argument may stand in a file that imports nothing of these."""
_NARROW = (".half(", ".bfloat16(", "float16")
_NEEDED: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("GradScaler",), ("backward",)),
    (("autocast",), ("backward", "binary_cross_entropy", "BCELoss", ".apply(")),
    (("autocast",), ("autograd.grad",)),
    (("cuda.amp", "cpu.amp"), ("autocast", "GradScaler")),
    (("autocast",), ("e-7", "e-8", "e-9"), ("Linear(", "Conv", "matmul(", "mm(", "einsum(")),
    (("autocast",), ('"cpu"', "'cpu'"), _NARROW),
    ((".scale(", ".unscale_("), ("backward",)),
    (("mixed_precision",), ("cpu=True",)),
    (("precision",), ("accelerator=", "accelerator ="), ("Trainer(", "Fabric(")),
    (("allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction"),),
    (("caler.step(", "caler.scale("), ("state_dict",)),
    (("backward(",), ("% ",), ("accum", "ACCUM", "micro", "update_freq", "grad_acc"), ("zero_grad",)),
    ((".half()", ".to(torch.float16", ".to(torch.half"), ("_loss(", "cross_entropy(", "kl_div(")),
)
"""Every finding needs a word of each group of one row; a file without them is not parsed."""

_OPTIMIZER = re.compile(r"[A-Z]\w*\(\s*(?:params\s*=\s*)?[\w.\[\]'\"()]+\.parameters\(\)")
_AVERAGE = re.compile(r"(?<![A-Za-z0-9])(ema|swa|averaged?)(_\w*|model\w*)?\s*=[^=]", re.IGNORECASE)
_MARK = "\ufeff"
"""What editors on Windows write before the first character."""

Rule = Callable[[ScriptFacts], Iterator[LocatedFinding]]


def check_code(file: str, text: str) -> list[LocatedFinding]:
    """Return the findings in a Python file, by line; a note where it cannot be read. Never raises.

    The edits of a finding have been tried: they remove it, and bring no other.
    """
    found = check_untried(file, text)
    tried = islice((one for one in found if one.edits), MOST_TRIED if len(text) <= LARGEST_TRIED else 0)
    proven = {id(one) for one in tried if _is_fixed_by_edits(one, text, found)}
    return [one if id(one) in proven or not one.edits else replace(one, edits=()) for one in found]


def check_untried(file: str, text: str) -> list[LocatedFinding]:
    """Return the same findings with the edits that the rules propose."""
    if not _may_have_findings(text):
        return []
    if len(text) > LARGEST:
        return [_build_unread_finding(file, f"it has {len(text):,} characters, more than {LARGEST:,}")]
    try:
        facts = build_script_facts(file, text)
        if facts.count > MOST:
            return [
                _build_unread_finding(file, f"it has {facts.count:,} calls of autocast and scalers, more than {MOST}")
            ]
        found = [finding for rule in import_rules() for finding in rule(facts)]
    except (SyntaxError, ValueError) as error:
        # ValueError: a null byte, or a lone surrogate.
        return [_build_unread_finding(file, f"{error.__class__.__name__}: {error}", getattr(error, "lineno", None))]
    except (RecursionError, MemoryError):
        return [_build_unread_finding(file, "it is nested too deeply")]
    return sorted(found, key=lambda finding: (finding.line or 0, finding.id))


def _may_have_findings(text: str) -> bool:
    words = collect_words(text)
    if not words.has_any(*_LIBRARIES):
        return False
    opens = can_open_autocast(text)
    rows = (row for row in _NEEDED if opens or row[0] != ("autocast",))
    if any(all(words.has_any(*group) for group in row) for row in rows):
        return True
    # Weights in 16 bits matter where an optimizer is made over them, or where they are an average.
    if not words.has_any(*_NARROW):
        return False
    if ".parameters()" in words and _OPTIMIZER.search(text):
        return True
    lower = text.lower()
    return any(word in lower for word in ("ema", "swa", "average")) and bool(_AVERAGE.search(text))


def _is_fixed_by_edits(finding: LocatedFinding, text: str, found: list[LocatedFinding]) -> bool:
    """Return whether a finding's edits leave a file that can be read, without this finding and with no new one."""
    before = Counter(one.id for one in found)
    after = Counter(one.id for one in check_untried(finding.file, apply_line_edits(text, finding.edits)))
    return after[finding.id] < before[finding.id] and after <= before


def check_file(folder: Path, name: str) -> list[LocatedFinding]:
    """Return the findings in a file of a folder; a note where it cannot be read, or leads out of the folder."""
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        content = _read_regular_file(path) if inside else None
        if content is None:
            return [_build_unread_finding(name, "it is no regular file of this folder, or too large")]
        return check_code(name, content.decode("utf-8").removeprefix(_MARK))
    except (OSError, ValueError, RuntimeError) as error:
        # UnicodeDecodeError is a ValueError; Python before 3.13 raises RuntimeError for a link that leads to itself.
        return [_build_unread_finding(name, str(error))]


@cache
def import_rules() -> tuple[Rule, ...]:
    """Return the rules of the folder `rules`, in the order of their names."""
    names = sorted(info.name for info in pkgutil.iter_modules(rules.__path__))
    return tuple(importlib.import_module(f"{rules.__name__}.{name}").look for name in names)


def _read_regular_file(path: Path) -> bytes | None:
    # Non-blocking: a named pipe in the file's place would otherwise wait forever for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > 4 * LARGEST:
            return None
        return file.read(4 * LARGEST)


def _build_unread_finding(file: str, why: str, line: int | None = None) -> LocatedFinding:
    shown = why if why.isprintable() else repr(why)
    fix = "if Python itself runs this file, report it; otherwise leave it out"
    return LocatedFinding("code.unread", "note", f"not checked: {shown[:200]}", fix, file, line)
