"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn, optim

from halfstep.train.recipe.schema import OptimizerOptions

_KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
}


def make_optimizer(options: OptimizerOptions, model: nn.Module) -> optim.Optimizer:
    """Fused where asked for and possible; one kernel per operation otherwise."""
    arguments: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name == "sgd":
        arguments |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    else:
        arguments["betas"] = (options.momentum, 0.999)
    if options.fused:
        try:
            return _KINDS[options.name](_groups(model), fused=True, **arguments)
        except RuntimeError:  # torch's word for a device that has no fused kernel
            pass
    return _KINDS[options.name](_groups(model), **arguments)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors (biases, scales of normalisations) are not decayed: zero means nothing to them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
