"""A real step over two devices: what it computes, what clipping sees, and what a skip puts back on both."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.step.two_devices import BAD, SITUATIONS, STEPS


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
def test_steps_over_two_devices_are_those_of_one(tmp_path: Path) -> None:
    """In a process of its own: a device type is registered for the rest of it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.step.two_devices", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(outcome["precision"], tuple(outcome["places"])) for outcome in outcomes] == SITUATIONS
    for outcome in outcomes:
        assert set(outcome["held"]) == set(outcome["places"])
        assert outcome["applied"] == [number != BAD for number in range(STEPS)]
        assert outcome["bad_step_moved"] == []
        assert all(norm > 0.1 for norm in outcome["norms"] if math.isfinite(norm)), "nothing was clipped"
        assert outcome["furthest_from_one_device"] < 1e-6, outcome
