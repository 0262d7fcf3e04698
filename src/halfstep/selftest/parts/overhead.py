"""The cost of a step, compared with the same step written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from halfstep import clock
from halfstep.measure.timing import Stopwatch
from halfstep.precision.precision import Precision
from halfstep.selftest.part import PartContext, PartResult, require
from halfstep.selftest.small import Batch, build_convolutional_model, compute_classification_loss, create_image_batch
from halfstep.step.stepper import Stepper

MOST = 1.5
"""The median of the pairs may not exceed this: far above what is measured anywhere, so that only a defect does."""
_PAIRS, _WARM = 30, 3
_ROUNDS = 3
"""A burst of other work can last for all pairs; a defect is there in every round."""
_SIZES = {"cpu": (8, 32)}
_LARGE = (64, 64)


def check(place: PartContext) -> PartResult:
    """Time both, in the precision that `auto` chooses, and the one written by hand against itself."""
    device, precision = place.device, place.chosen()
    samples, size = _SIZES.get(device.type, _LARGE)
    data = create_image_batch(device, samples=samples, size=size)
    model, optimizer = _make_trained(device, precision)
    stepper = Stepper(model, optimizer, precision=precision)
    arms = {
        "by hand": _build_handwritten_step(device, precision, data),
        "again": _build_handwritten_step(device, precision, data),
        "stepper": lambda: stepper.step(compute_classification_loss, data),
    }
    for arm in arms.values():
        for _ in range(_WARM):
            arm()
    for _ in range(_ROUNDS):
        watch = Stopwatch(device)
        turns = list(
            clock.iterate_interleaved_times({name: partial(watch.seconds, arm) for name, arm in arms.items()}, _PAIRS)
        )
        base = [times["by hand"] for times in turns]
        found, itself = (
            clock.compare_paired_times([times[name] for times in turns], base) for name in ("stepper", "again")
        )
        if found.median <= MOST:
            break
    require(
        found.median <= MOST, f"a step takes {found.median:.2f} times as long as one written by hand, more than {MOST}"
    )
    added = found.added_seconds * 1e6
    figures = {"ratio": found.median, "against_itself": itself.median, "added_us": added, "pairs": found.pairs}
    words = f"{found.median:.3f}x of by hand in {precision} (aa {itself.median:.3f}x)"
    return PartResult(words, figures | {"precision": precision.name})


def _build_handwritten_step(device: torch.device, precision: Precision, data: Batch) -> Callable[[], object]:
    model, optimizer = _make_trained(device, precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scaled)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast(device):
            loss = compute_classification_loss(model, data)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())  # as a loop reads its loss; a step reads the device once, too

    return step


def _make_trained(device: torch.device, precision: Precision) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = copy.deepcopy(build_convolutional_model(device, width=32))
    precision.prepare(model, device)
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
