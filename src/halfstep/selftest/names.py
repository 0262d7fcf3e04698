"""The parts in the order in which they run, and the names of their results. Imports no torch."""

from __future__ import annotations

from typing import Any, TypedDict

PARTS = {
    "transaction": "a skipped step changes no tensor, an applied one updates them, an error in the loss is rolled back",
    "scale": "fp16: the loss scale cancels out in the update, falls on an overflow, rises after clean steps",
    "observed": "the first step runs in the requested precision; a step in another one is refused",
    "probe": "every native format runs forward and backward; `auto` chooses one of them",
    "memory": "memory predicted by `estimate` and measured on this device, in fp32 and in the precision of `auto`",
    "overhead": "a step next to the same step written by hand, interleaved",
    "replay": "the diagnosis names the operation and module of an injected fp16 overflow and a logarithm of 0",
    "parity": "120 updates in 16 bits and in fp32 over 5 seeds: the validation loss is the same by `bench`'s own test",
    "plan": "a plan of a few seconds: its choice was measured, is native and trains as fp32 does",
    "resume": "a run is saved half-way and resumed from the checkpoint: losses and tensors equal an unbroken run's",
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
