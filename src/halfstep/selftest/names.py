"""The parts in the order in which they run, and the names of their results. Imports no torch."""

from __future__ import annotations

from typing import Any, TypedDict

PARTS = {
    "transaction": "a skipped step changes no tensor, an applied one updates them, an error in the loss is rolled back",
    "scale": "fp16: the loss scale cancels out in the update, falls on an overflow, rises after clean steps",
    "observed": "the first step runs in the requested precision; a step that does not is refused",
    "probe": "every native format runs forward and backward; what `auto` chooses is one of them",
    "memory": "`estimate` against the allocator of this device, in fp32 and in what `auto` chooses",
    "overhead": "a step against the same step written by hand, interleaved",
    "replay": "an overflow of fp16 and a logarithm of 0 are planted: the diagnosis names their operation and module",
    "parity": "120 updates in 16 bits and in fp32 over 5 seeds: the validation loss is the same by `bench`'s own test",
    "plan": "a plan of a few seconds: its choice was measured, is native and trains as fp32 does",
    "resume": "a run is saved half-way and resumed by a new build: every loss and tensor is bitwise an unbroken run's",
    "ranks": "several ranks: a NaN or an error on one skips or fails the step on all, and all keep the same weights",
}
"""A line about each part; `parts/NAME.py` has its `check`."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class PartRow(TypedDict):
    """The result of one part, as the report's JSON has it."""

    part: str
    result: str
    figure: str
    figures: Any
    error: str | None
    seconds: float


FORM = 1
"""The form of the JSON."""
