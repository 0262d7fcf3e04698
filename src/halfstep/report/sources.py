"""Recognize runs, benches and plans by their contents, and read each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Union

from halfstep.errors import BadData, WrongUse
from halfstep.files import LARGEST_JSON, read_json
from halfstep.report.run_facts import RunFacts, read_run_facts
from halfstep.train.run_folder import RECIPE

if TYPE_CHECKING:
    from halfstep.report.bench_facts import BenchFacts
    from halfstep.report.plan_facts import PlanFacts

MOST = 12
"""Runs, benches and plans on one page: more curves are indistinguishable."""
BENCH = "bench.json"
ALLOWED = f"the folder of a run (with {RECIPE}) or of a bench (with {BENCH}), or the output of `halfstep plan --json`"

Source = Union[RunFacts, "BenchFacts", "PlanFacts"]


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """Return the contents of each path, in the given order.

    Raises BadData if a path is none of a run, a bench and a plan, and WrongUse for too many of them.
    """
    if len(paths) > MOST:
        raise WrongUse(f"{len(paths)} runs on one page", allowed=f"up to {MOST}", do="make several reports")
    return [read_source(path) for path in paths]


def read_source(path: Path) -> Source:
    """Return the run, bench or plan at a path; raise BadData if it is none of these, or cannot be read."""
    if path.is_dir():
        if (path / RECIPE).is_file():
            return read_run_facts(path)
        if (path / BENCH).is_file():
            return _read_json_source(path / BENCH)
        raise _build_no_run_error(path)
    if path.name == RECIPE and path.is_file():
        return read_run_facts(path.parent)
    if path.is_file():
        return _read_json_source(path)
    raise _build_wrong_source_error(path, "does not exist")


def _build_no_run_error(path: Path) -> BadData:
    """Return the error for a folder that is no run; one with runs in it names the first."""
    runs = sorted(entry.name for entry in path.iterdir() if (entry / RECIPE).is_file())
    if runs:
        names = f"{', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}"
        return _build_wrong_source_error(path, f"is a folder of runs ({names}), and not one of them", path / runs[0])
    return _build_wrong_source_error(path, "holds no run" if any(path.iterdir()) else "is empty")


def _read_json_source(path: Path) -> Source:
    found = read_json(path)
    if not isinstance(found, dict):
        raise _build_wrong_source_error(path, f"is not a JSON object of at most {LARGEST_JSON >> 20} MiB")
    if {"ladder", "choice", "baseline"} <= found.keys():
        from halfstep.report.plan_facts import parse_plan

        return parse_plan(found, path)
    if {"rows", "metric", "seeds", "name"} <= found.keys():
        from halfstep.report.bench_facts import parse_bench

        return parse_bench(found, path)
    raise _build_wrong_source_error(path, f"has the fields {', '.join(map(str, list(found)[:5])) or '(none)'}")


def _build_wrong_source_error(path: Path, what: str, run: Path = Path("runs/segmentation_tiny")) -> BadData:
    return BadData(f"{path} {what}", allowed=ALLOWED, do=shlex.join(["halfstep", "report", str(run)]))
