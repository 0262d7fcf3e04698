"""What one step executes, counted: limits on Python's work and on torch's operations that no other load changes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.step_counts import Executed, StepWork

ROOT = Path(__file__).parents[2]
LIMITS = {
    "tiny.halfstep": (5_100, 215),
    "tiny.guarded": (6_050, 260),
    "resnet_shape.halfstep": (35_800, 1_430),
    "transformer_shape.halfstep": (53_100, 2_200),
}
"""Bytecodes and calls of Python functions in one step, torch's own among them, on Python 3.11 with torch 2.15."""
MARGIN = 1.05 if sys.version_info[:2] == (3, 11) else 1.3
"""Other versions of Python compile the same code to other bytecodes."""
MORE_OPERATIONS = 6
"""Operations of a step beyond those of a loop by hand that neither checks nor restores anything."""
MOST_LINES = 7_500
"""Lines of halfstep in a process that uses its GradScaler and nothing else."""


@cache
def _count_all(again: bool = False) -> dict[str, StepWork]:
    """Count in a process without other tests: hooks and patches that they left would be counted too."""
    arms = [*LIMITS, "tiny.bare", "resnet_shape.bare"]
    command = [sys.executable, "-m", "benchmarks.step_counts", *(["tiny.halfstep"] if again else arms), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return {
        name: StepWork(Executed(**work["whole"]), Executed(**work["own"]), work["operations"])
        for name, work in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("arm", LIMITS)
def test_a_step_executes_no_more_than_its_limit(arm: str) -> None:
    bytecodes, calls = LIMITS[arm]
    whole = _count_all()[arm].whole
    assert whole.bytecodes <= MARGIN * bytecodes, f"{whole.bytecodes} bytecodes"
    assert whole.calls <= MARGIN * calls, f"{whole.calls} calls"


def test_the_count_is_the_same_each_time() -> None:
    again = _count_all(again=True)["tiny.halfstep"]
    assert again == _count_all()["tiny.halfstep"]
    assert again.own.bytecodes < again.whole.bytecodes


def test_the_operations_of_torch_do_not_grow_with_the_buffers() -> None:
    """By hand and in a step, the same operations but for a few: none for each buffer."""
    for shape in ("tiny", "resnet_shape"):
        by_hand, stepped = (_count_all()[f"{shape}.{kind}"].operations for kind in ("bare", "halfstep"))
        assert stepped <= by_hand + MORE_OPERATIONS


def test_the_gradient_scaler_loads_few_lines() -> None:
    code = (
        "import sys, halfstep; halfstep.GradScaler\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'halfstep']\n"
        "print(sum(len(open(file).readlines()) for file in files))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= MOST_LINES
