"""Steppers on one rank, on ranks with copies and on ranks with shards, and every bit that a skip must not move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper, distributed
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.loss import DynamicScale
from tests.support.digest import digest_of
from tests.support.models import buffered_model, plain_model

INTERVAL, SCALE = 3, 2.0**12
"""Clean steps after which the loss scale grows, and its first value: low enough for these models to be clean."""


def make(
    mode: str,
    precision: str,
    *,
    interval: int = INTERVAL,
    on_gradients: Callable[[list[Tensor]], object] | None = None,
) -> Stepper:
    """A Stepper with all that moves with a step: optimizer state, schedule, average, loss scale; `mode` as a recipe's.

    Shards have no buffers here: FSDP2 gives each rank its own.
    """
    model = plain_model() if mode == "fsdp" else buffered_model()
    if mode == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scale = DynamicScale(init_scale=SCALE, growth_interval=interval) if precision == "fp16" else None
    return Stepper(
        model,
        optimizer,
        precision=resolve_precision_name(precision),
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99),
        ema=Ema(model),
        loss_scale=scale,
        clip_norm=1.0,
        observe=False,
        on_gradients=on_gradients,
    )


def weights(stepper: Stepper) -> str:
    """A digest of the whole weights, which must be the same on all ranks; every rank calls it."""
    return digest_of({name: distributed.gather_full_tensor(p) for name, p in stepper.model.named_parameters()})


def held(stepper: Stepper) -> str:
    """A digest of what a skip must not move on this rank; the loss scale is not in it, which does move."""
    state = stepper.state_dict()
    own = {name: (one["optimizer"], _plain(one["schedule"])) for name, one in state["optimizers"].items()}
    model = stepper.model
    tensors = (dict(model.named_parameters()), dict(model.named_buffers()), own, state["ema"])
    return digest_of(_local(tensors), stepper.counts.applied)


def scale(stepper: Stepper) -> dict[str, Any]:
    """The state of the loss scale; empty in a precision that has none."""
    [kept] = stepper.state_dict()["losses"].values()
    found: dict[str, Any] = kept["loss_scale"]
    return found


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def _local(value: Any) -> Any:
    if isinstance(value, Tensor):
        return distributed.unwrap_local_tensor(value)
    if isinstance(value, dict):
        return {key: _local(one) for key, one in value.items()}
    return [_local(one) for one in value] if isinstance(value, (list, tuple)) else value


def _plain(schedule: dict[str, Any] | None) -> Any:
    """A schedule's state without the functions in it, whose repr holds an address."""
    return {name: value for name, value in (schedule or {}).items() if not callable(value)}
