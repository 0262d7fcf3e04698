"""A small training in 16 bits compared with fp32, over several seeds, judged as `bench` judges."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep.measure.parity import compare_paired_metrics, compute_margin, compute_smallest_margin
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.random_state import use_seeded_generators
from halfstep.selftest.part import PartContext, PartResult, require
from halfstep.step.stepper import Stepper

SEEDS, STEPS = 5, 120
_INPUTS, _WIDTH, _SAMPLES, _UNSEEN = 8, 32, 128, 1024
_NOISE = 0.1
_RATE = 1e-3
"""So low that updates vanish where weights are rounded to 16 bits: the loss is then a third higher than fp32's."""
_ATTEMPTS = 30
"""A loss scale in fp16 may have to fall; the batch is taken again, so that all runs have as many updates."""


def check(place: PartContext) -> PartResult:
    """Train both ways from the same weights on the same batches, and compare the losses on other data."""
    chosen = place.chosen()
    # bf16 on a device that only emulates it gives the same numbers, slowly.
    narrow = chosen if chosen.casts else resolve_precision_name("bf16")
    base = [_train_and_validate(place.device, resolve_precision_name("fp32"), seed) for seed in range(SEEDS)]
    other = [_train_and_validate(place.device, narrow, seed) for seed in range(SEEDS)]
    margin = compute_margin(base, points=compute_smallest_margin(base, higher_is_better=False))
    found = compare_paired_metrics(base, other, margin, higher_is_better=False)
    mean = sum(base) / SEEDS
    apart = (sum(other) / SEEDS - mean) / mean
    words = f"{narrow} loss {apart:+.2%} of fp32's, margin {margin.size / mean:.1%}"
    require(found.verdict == "same", f"{words}: {found.verdict} ({found.note or 'outside of the margin'})")
    figures = {"fp32": base, narrow.name: other, "margin": margin.size, "verdict": found.verdict}
    return PartResult(words, figures)


def _train_and_validate(device: torch.device, precision: Precision, seed: int) -> float:
    """Return the loss on data that was not trained on; the seed decides which samples are."""
    with use_seeded_generators(0):
        teacher, model = _build_network(), _build_network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    stepper = Stepper(model, optimizer, precision=precision, schedule=schedule)
    generator = torch.Generator().manual_seed(1 + seed)
    for _ in range(STEPS):
        data = _batch(teacher, _SAMPLES, generator, device)
        taken = any(stepper.step(_loss, data).applied for _ in range(_ATTEMPTS))
        require(taken, f"{precision}: a batch was skipped {_ATTEMPTS} times in a row")
    with precision.inference(device):
        return float(_loss(model, _batch(teacher, _UNSEEN, torch.Generator().manual_seed(0), device)))


def _build_network() -> nn.Module:
    return nn.Sequential(nn.Linear(_INPUTS, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 4))


@torch.no_grad()
def _batch(teacher: nn.Module, samples: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(samples, _INPUTS, generator=generator)
    targets = teacher(inputs)
    targets += _NOISE * torch.randn(targets.shape, generator=generator)
    return inputs.to(device), targets.to(device)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1])
