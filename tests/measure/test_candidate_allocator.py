"""The allocator's own count: the bytes that were there, and not a word on standard error."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from halfstep.measure.candidate import measure_peak_bytes

QUIET = """
import torch
from halfstep.measure.candidate import measure_peak_bytes
assert measure_peak_bytes(lambda: torch.empty(1 << 20), torch.device("cpu"), []) >= 4 << 20
"""


def test_the_profiler_says_nothing() -> None:
    """In a process of its own: it reads what it may say when it is first used."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KINETO")}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=120, check=False, env=plain
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_what_is_held_and_what_is_made_together() -> None:
    held = torch.zeros(1000)

    def call() -> None:
        first = torch.empty(500)
        del first
        torch.empty(700)

    assert measure_peak_bytes(call, torch.device("cpu"), [held, held.view(10, 100)]) == 4 * (1000 + 700)
