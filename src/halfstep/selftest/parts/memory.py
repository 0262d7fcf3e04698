"""The memory that `estimate` predicts, compared with what the device's own allocator counts."""

from __future__ import annotations

import gc

import torch

from halfstep.measure.candidate import Candidate, measure_update_peak
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.estimate import estimate_ledger
from halfstep.measure.setting import StepSetting
from halfstep.precision.precision import Precision
from halfstep.selftest.part import PartContext, PartResult, PartSkipped, require
from halfstep.selftest.small import build_convolutional_model, compute_classification_loss, create_image_batch

WITHIN = 1.25
"""The largest factor between the two. What a kernel takes inside itself is not predicted, and differs by device."""
_COUNTED = ("cpu", "cuda", "rocm", "xpu")
"""Devices whose allocator keeps its peak, or can be listened to."""
_SAMPLES = {"cpu": 16}
_MANY = 256


def check(place: PartContext) -> PartResult:
    """Compare the peaks of one update."""
    kind = place.described.kind
    if kind not in _COUNTED:
        raise PartSkipped(f"the allocator of {kind} keeps no peak")
    samples = _SAMPLES.get(kind, _MANY)
    host = torch.device("cpu")
    case = build_case(
        build_convolutional_model(host, width=64),
        compute_classification_loss,
        create_image_batch(host, samples=samples, size=32),
    )
    precisions = {precision.name: precision for precision in (place.native()[0], place.chosen())}
    pairs = {name: _measure_peaks(case, precision, place) for name, precision in precisions.items()}
    for name, (predicted, counted) in pairs.items():
        factor = max(predicted, counted) / max(1, min(predicted, counted))
        words = f"{name}: {predicted / 2**20:.1f} MiB were predicted, and {counted / 2**20:.1f} MiB counted"
        require(factor <= WITHIN, f"{words}, more than a factor of {WITHIN} apart")
    words = "; ".join(
        f"{name} {predicted / 2**20:.1f} MiB predicted, {predicted / counted - 1:+.1%}"
        for name, (predicted, counted) in pairs.items()
    )
    figures = {name: {"predicted": predicted, "counted": counted} for name, (predicted, counted) in pairs.items()}
    return PartResult(words, figures)


def _measure_peaks(case: Case, precision: Precision, place: PartContext) -> tuple[int, int]:
    setting = StepSetting(precision.name)
    predicted = estimate_ledger(lambda: case, setting, place.device).peak
    if place.described.kind == "cpu":
        return predicted, measure_update_peak(Candidate(case, setting, place.device))
    # A first one for what stays afterwards, such as the workspaces of cuBLAS, which is no part of an update.
    Candidate(case, setting, place.device).step()
    gc.collect()
    before = torch.accelerator.memory_allocated(place.device)
    return predicted, measure_update_peak(Candidate(case, setting, place.device)) - before
