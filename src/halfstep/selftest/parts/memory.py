"""The memory that `estimate` predicts, compared with what the device's own allocator counts."""

from __future__ import annotations

import gc

import torch

from halfstep.measure.candidate import Candidate, peak_of
from halfstep.measure.case import Case, case_of
from halfstep.measure.memory.estimate import ledger_of
from halfstep.measure.setting import StepSetting
from halfstep.precision.precision import Precision
from halfstep.selftest.part import Measured, PartContext, PartSkipped, require
from halfstep.selftest.small import batch, classified, convolutional_model

WITHIN = 1.25
"""The largest factor between the two. What a kernel takes inside itself is not predicted, and differs by device."""
_COUNTED = ("cpu", "cuda", "rocm", "xpu")
"""Devices whose allocator keeps its peak, or can be listened to."""
_SAMPLES = {"cpu": 16}
_MANY = 256


def check(place: PartContext) -> Measured:
    """Compare the peaks of one update."""
    kind = place.described.kind
    if kind not in _COUNTED:
        raise PartSkipped(f"the allocator of {kind} keeps no peak")
    samples = _SAMPLES.get(kind, _MANY)
    host = torch.device("cpu")
    case = case_of(convolutional_model(host, width=64), classified, batch(host, samples=samples, size=32))
    precisions = {precision.name: precision for precision in (place.native()[0], place.chosen())}
    pairs = {name: _pair(case, precision, place) for name, precision in precisions.items()}
    for name, (predicted, counted) in pairs.items():
        factor = max(predicted, counted) / max(1, min(predicted, counted))
        words = f"{name}: {predicted / 2**20:.1f} MiB were predicted, and {counted / 2**20:.1f} MiB counted"
        require(factor <= WITHIN, f"{words}, more than a factor of {WITHIN} apart")
    words = "; ".join(
        f"{name} {predicted / 2**20:.1f} MiB predicted, {predicted / counted - 1:+.1%}"
        for name, (predicted, counted) in pairs.items()
    )
    figures = {name: {"predicted": predicted, "counted": counted} for name, (predicted, counted) in pairs.items()}
    return Measured(words, figures)


def _pair(case: Case, precision: Precision, place: PartContext) -> tuple[int, int]:
    setting = StepSetting(precision.name)
    predicted = ledger_of(lambda: case, setting, place.device).peak
    if place.described.kind == "cpu":
        return predicted, peak_of(Candidate(case, setting, place.device))
    # A first one for what stays afterwards, such as the workspaces of cuBLAS, which is no part of an update.
    Candidate(case, setting, place.device).step()
    gc.collect()
    before = torch.accelerator.memory_allocated(place.device)
    return predicted, peak_of(Candidate(case, setting, place.device)) - before
