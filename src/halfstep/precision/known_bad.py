"""Known defects of devices and library versions: `known_bad.json`. Imports no torch."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import TypedDict

from halfstep.finding import Severity


class KnownBadEntry(TypedDict, total=False):
    """An entry of the table; it is about versions of a package, about some GPUs, or about both."""

    id: str
    severity: Severity
    what: str
    fix: str
    sources: list[str]
    package: str
    versions: str
    gpu: str
    """A regular expression for the GPU's name."""
    wrong_formats: list[str]
    only_cpu: bool
    only_gpu: bool
    only_apple: bool


@cache
def read_known_bad() -> tuple[KnownBadEntry, ...]:
    """Return the table; each entry has its sources."""
    text = resources.files("halfstep.precision").joinpath("known_bad.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))


@cache
def explain_wrong_gpu_format(name: str, format_name: str) -> str | None:
    """Return why computing in this format gives wrong numbers on a GPU, with sources; None if nothing is known."""
    for entry in read_known_bad():
        if format_name in entry.get("wrong_formats", ()) and re.search(entry["gpu"], name):
            return f"known to be wrong: {entry['what']} ({', '.join(entry['sources'])})"
    return None
