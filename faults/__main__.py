"""Run rows of the fault matrix and print a line for each."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

import faults
from faults.outcome import Outcome


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
        return Outcome(0, 1, f"stopped with {type(error).__name__}")
    return outcome


def held(outcome: Outcome) -> bool:
    return outcome.n > 0 and outcome.passed == outcome.n


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows to run, such as F01; all of them if left out")
    parser.add_argument("--full", action="store_true", help="the matrix's own counts, through the command line")
    parser.add_argument("--json", action="store_true", help="one JSON object for each row")
    given, known = parser.parse_args(arguments), rows()
    if unknown := sorted(set(given.ids) - set(known)):
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(known)}")
    failed = 0
    for name in given.ids or known:
        outcome = run_row(known[name], given.full)
        failed += not held(outcome)
        facts = {"id": name, "what": known[name].WHAT, "pass": outcome.passed, "n": outcome.n, "worst": outcome.worst}
        line = f"{name} pass={outcome.passed} n={outcome.n} worst={outcome.worst}"
        print(json.dumps(facts) if given.json else line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
