"""Run rows of the fault matrix and print a line for each."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import faults
from faults import mutants
from faults.outcome import Outcome
from faults.record import record

FAILED, BROKEN = 1, 3
"""Exit codes: a row that does not hold, and one that could not be run, which says nothing about what it tests."""


def rows() -> dict[str, ModuleType]:
    """Every row, by its id: the files `fNN_*.py` of this folder."""
    names = sorted(info.name for info in pkgutil.iter_modules(faults.__path__) if info.name[:1] == "f")
    found = {}
    for name in names:
        module = importlib.import_module(f"{faults.__name__}.{name}")
        if module.ID in found:
            raise SystemExit(f"{module.ID} is the id of two rows")
        found[module.ID] = module
    return found


def run_row(row: ModuleType, full: bool) -> Outcome:
    """A row that stops with an error has failed; the others still run."""
    try:
        outcome: Outcome = row.run(full)
    except Exception as error:
        traceback.print_exc()
        said = f": {str(error).splitlines()[0][:80]}" if str(error) else ""
        return Outcome(0, 1, f"stopped with {type(error).__name__}{said}", broken=not isinstance(error, AssertionError))
    return outcome


def held(outcome: Outcome) -> bool:
    return outcome.n > 0 and outcome.passed == outcome.n


def judge_rows(known: dict[str, ModuleType], names: Sequence[str], full: bool, as_json: bool) -> tuple[int, list[Any]]:
    code, found = 0, []
    for name in counted(names, "rows of the fault matrix"):
        outcome = run_row(known[name], full)
        code = max(code, BROKEN if outcome.broken else FAILED if not held(outcome) else 0)
        facts = {"id": name, "what": known[name].WHAT, "pass": outcome.passed, "n": outcome.n, "worst": outcome.worst}
        print(json.dumps(facts) if as_json else f"{name} {outcome}", flush=True)
        found.append(facts)
    return code, found


def judge_mutants(known: dict[str, ModuleType], names: Sequence[str], as_json: bool) -> tuple[int, list[Any]]:
    """Each defect in a process of its own, which runs the rows that must see it."""
    code, found = 0, []
    for name in counted(names, "defects put into halfstep"):
        mutant = known[name]
        by = [row for row in mutant.ROWS if _goes_red(row, name)]
        code = code if by else FAILED
        facts = {"mutant": name, "what": mutant.WHAT, "killed": bool(by), "by": by}
        line = f"{name} killed by {', '.join(by)}" if by else f"{name} SURVIVED {', '.join(mutant.ROWS)}"
        print(json.dumps(facts) if as_json else f"{line}: {mutant.WHAT}", flush=True)
        found.append(facts)
    return code, found


def _goes_red(row: str, mutant: str) -> bool:
    command = [sys.executable, "-m", faults.__name__, row]
    environment = {**os.environ, mutants.VARIABLE: mutant}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == FAILED


def counted(names: Sequence[str], what: str) -> Iterator[str]:
    """One after the other, with a bar on a terminal that says how long it will take."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield from progress.track(names)


def _chosen(given: Sequence[str], known: dict[str, ModuleType], parser: argparse.ArgumentParser) -> list[str]:
    if unknown := sorted(set(given) - set(known)):
        parser.error(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return list(given or known)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="rows to run, such as F01, or defects, such as M03; or all"
    )
    parser.add_argument("--full", action="store_true", help="the matrix's own counts, through the command line")
    parser.add_argument("--mutants", action="store_true", help="put known defects into halfstep: a row must see each")
    parser.add_argument("--record", action="store_true", help="keep what was found in docs/faults.json")
    parser.add_argument("--json", action="store_true", help="one JSON object for each row")
    given = parser.parse_args(arguments)
    if given.record and not (given.full or given.mutants):
        parser.error("--record keeps full counts: add --full")
    if given.mutants:
        known = mutants.mutants()
        code, found = judge_mutants(known, _chosen(given.ids, known, parser), given.json)
    else:
        known = rows()
        try:
            mutants.apply(mutants.current())
        except (AttributeError, LookupError) as error:
            parser.exit(BROKEN, f"{error}\n")
        code, found = judge_rows(known, _chosen(given.ids, known, parser), given.full, given.json)
    if given.record:
        record("mutants" if given.mutants else "rows", found)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
