"""`scripts/test --quick`: the tests nearest to a change by the graph of imports, as many as two minutes hold.

A test file is as far from a change as the shortest way from it, import by import, to a file that was changed. The
nearest are run first; `tests/durations.json` says how long each takes, without the tests marked `ranks` and `slow`
(`seconds`) and with them (`all_seconds`). `scripts/test --record-durations` writes it anew.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import defaultdict, deque
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests" / "durations.json"
SECONDS = 100.0
"""Of the two minutes; the others go into starting and collecting."""
# Not by syntax trees: a thousand files take seconds to parse, and every worker needs the graph.
IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w.]+))", re.MULTILINE)
LEFT_OUT = ("ranks", "slow", "full", "gpu")
UNKNOWN = 5.0
"""Seconds for a file that was never timed."""
LONG = 10.0
"""Seconds of a file that should not be the last one of its worker."""


def long_files() -> set[Path]:
    """Return the test files that take a worker longer than LONG, with all tests of CI."""
    return {ROOT / name for name, taken in json.loads(DURATIONS.read_text())["all_seconds"].items() if taken > LONG}


def changed_files(since: str) -> list[Path]:
    """Return the files that differ from a commit, and those that git does not know yet."""
    differ = _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")
    return [ROOT / name for name in differ]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def module_files() -> dict[str, Path]:
    """Return every module of the package and of the tests, by the name that imports use."""
    found = {}
    for base, folder in ((ROOT / "src", "halfstep"), (ROOT, "tests"), (ROOT, "faults"), (ROOT, "zoo")):
        for path in (base / folder).rglob("*.py"):
            found[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imported_by(path: Path, known: dict[str, Path]) -> set[Path]:
    """Return the files that a file imports, wherever in it the import stands."""
    names: set[str] = set()
    for module, listed, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        names |= {plain} if plain else {module, *(f"{module}.{name}" for name in re.findall(r"\w+", listed))}
    return {known[name] for name in names & known.keys()}


@functools.cache
def importers() -> dict[Path, set[Path]]:
    """Return for every file those that import it."""
    known = module_files()
    found: dict[Path, set[Path]] = defaultdict(set)
    for path in known.values():
        for other in imported_by(path, known):
            found[other].add(path)
    return found


def distances(changed: list[Path]) -> dict[Path, int]:
    """Return for every file that reaches a changed one how many imports lie between them."""
    found = {path: 0 for path in changed}
    waiting = deque(changed)
    while waiting:
        path = waiting.popleft()
        for importer in importers().get(path, set()) - found.keys():
            found[importer] = found[path] + 1
            waiting.append(importer)
    return found


def chosen(far: dict[Path, int], files: list[Path], seconds: dict[str, float], workers: int) -> list[Path]:
    """Return the nearest test files, as many as the time holds; among equally near ones the quickest first."""

    def cost(path: Path) -> float:
        return seconds.get(str(path.relative_to(ROOT)), UNKNOWN)

    left, taken = SECONDS * workers, []
    for path in sorted((path for path in files if path in far), key=lambda path: (far[path], cost(path))):
        # A single file keeps one worker busy, however many there are.
        if cost(path) <= min(left, SECONDS):
            taken.append(path)
            left -= cost(path)
    return taken


class Quick:
    """Keeps pytest from opening test files that are far from the change, and drops their slow tests."""

    def __init__(self, since: str, workers: int) -> None:
        far = distances(changed_files(since))
        seconds = json.loads(DURATIONS.read_text())["seconds"] if DURATIONS.exists() else {}
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        self.taken = set(chosen(far, files, seconds, workers))
        reached = sum(path in far for path in files)
        self.said = f"quick: {len(self.taken)} of {reached} test files that the change reaches; scripts/test runs all"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
        return True if is_test and collection_path not in self.taken else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        slow = [item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]

    def pytest_report_header(self) -> str:
        return self.said


class Stopwatch:
    """Adds up the seconds of each test file, and writes them down at the end."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.seconds: dict[str, float] = defaultdict(float)
        self.all_seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.all_seconds[file] += report.duration
        if not any(name in report.keywords for name in LEFT_OUT):
            self.seconds[file] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept: dict[str, object] = {"command": self.command}
        for key, found in (("seconds", self.seconds), ("all_seconds", self.all_seconds)):
            kept[key] = {name: round(value, 1) for name, value in sorted(found.items())}
        DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")
