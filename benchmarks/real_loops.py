"""Training loops as people write them, each checked against the promise of the step.

    python benchmarks/real_loops.py [--only NAME] [--json] [--record]

A loop `held` if what it was promised is true of its tensors (bitwise as the loop by hand, or as before a bad batch, or
refused by name); `documented` if it met a limit that docs/step.md states; `failed` otherwise. `--only` takes a loop or
a family. `--record` keeps counts and outcomes in benchmarks/real_loops.json. The exit code is 1 if any loop failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.loops.harness import Loop

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
HELD, DOCUMENTED, FAILED = "held", "documented", "failed"
LONGEST = 150
"""Characters of evidence in the table."""


def all_loops() -> dict[str, Loop]:
    """Every loop by name: the folder is the registry."""
    from benchmarks.loops import harness

    for path in sorted((ROOT / "benchmarks" / "loops").glob("*.py")):
        importlib.import_module(f"benchmarks.loops.{path.stem}")
    return harness.LOOPS


def outcome_of(loop: Loop) -> dict[str, Any]:
    """Run one loop from a known beginning, and say what came of it."""
    from benchmarks.loops.harness import Documented

    torch.manual_seed(0)
    random.seed(0)
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        dynamo.counters.clear()  # each loop stands for a program of its own, which has compiled nothing yet
    begun = time.perf_counter()
    try:
        said = loop.run()
        outcome = DOCUMENTED if isinstance(said, Documented) else HELD
    except Exception as error:
        outcome = FAILED
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    seconds = round(time.perf_counter() - begun, 2)
    return {"name": loop.name, "family": loop.family, "outcome": outcome, "evidence": said, "seconds": seconds}


def run(loops: Sequence[Loop]) -> list[dict[str, Any]]:
    """Run them, family by family, with the time left on standard error."""
    from benchmarks.loops import ranks

    begun, rows = time.perf_counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done, loop in enumerate(loops, 1):
            rows.append(outcome_of(loop))
            left = (time.perf_counter() - begun) / done * (len(loops) - done)
            told = f"{done:3}/{len(loops)} {loop.family}/{loop.name} {rows[-1]['outcome']}"
            print(f"{told} ({rows[-1]['seconds']:.1f} s, {left:.0f} s left)", file=sys.stderr, flush=True)
    ranks.stop_all()
    return rows


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", metavar="NAME", help="only this loop, or this family")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    given = options.parse_args()
    chosen = [one for one in all_loops().values() if given.only in (None, one.name, one.family)]
    if not chosen:
        print(f"no loop and no family is called {given.only}", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    rows = run(chosen)
    report = {**counted(rows), "seconds": round(time.perf_counter() - begun), "rows": rows}
    if given.record:
        _record(report)
    if given.json:
        print(json.dumps(report, indent=1))
    else:
        _table(rows)
    print(in_words(report))
    return 1 if report[FAILED] else 0


def counted(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    outcomes = [row["outcome"] for row in rows]
    return {"loops": len(rows), **{word: outcomes.count(word) for word in (HELD, DOCUMENTED, FAILED)}}


def in_words(counts: dict[str, Any]) -> str:
    return " ".join(f"{word}={counts[word]}" for word in ("loops", HELD, DOCUMENTED, FAILED))


def _record(report: dict[str, Any]) -> None:
    from halfstep.measure.conditions import collect_conditions

    kept = {word: report[word] for word in ("loops", HELD, DOCUMENTED, FAILED, "seconds")}
    by_family: dict[str, dict[str, str]] = {}
    for row in report["rows"]:
        by_family.setdefault(row["family"], {})[row["name"]] = row["outcome"]
    kept = {"command": "python benchmarks/real_loops.py --record", **kept, "conditions": collect_conditions()}
    RECORD.write_text(json.dumps({**kept, "outcomes": by_family}, indent=1) + "\n", encoding="utf-8")


def _table(rows: Sequence[dict[str, Any]]) -> None:
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            print(f"\n{family}")
        print(f"  {row['name']:44} {row['outcome']:10} {row['evidence'][:LONGEST]}")
    print()


def compute_bf16_everywhere() -> None:
    """Without bf16 instructions torch computes the same numbers more slowly; loops look at the numbers."""
    from tests.support.cpu import described_with_bf16

    if "HALFSTEP_CPUINFO" not in os.environ and (description := described_with_bf16(Path("/proc/cpuinfo"))):
        described = Path(tempfile.gettempdir()) / f"halfstep-cpuinfo-{os.getuid()}"
        described.write_text(description, encoding="utf-8")
        os.environ["HALFSTEP_CPUINFO"] = str(described)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # so that loops can be imported by name
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    compute_bf16_everywhere()
    sys.exit(main())
