"""Healthy fp16 runs whose loss scale has yet to find its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Pictures, Plain, Transformer, Vae, batch_for, squares, vae_loss
from benchmarks.plants.plant import Expected, Plant, Scene, plants


def _weighed(loss_fn: Callable[..., Tensor], weight: float) -> Callable[..., Any]:
    return lambda model, batch: weight * loss_fn(model, batch)


def _begins(model: Callable[[], nn.Module], loss_fn: Any, exponent: int, weight: float) -> Scene:
    built = model()
    return Scene(built, _weighed(loss_fn, weight), batch_for(built), rate=1e-6, scale=2.0**exponent)


def all_of_them() -> list[Plant]:
    models: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "perceptron": (Perceptron, squares),
        "transformer": (Transformer, squares),
        "pictures": (Pictures, squares),
        "plain": (Plain, squares),
        "vae": (Vae, vae_loss),
    }
    return [
        plant
        for name, (model, loss_fn) in models.items()
        # So high that it takes at least three falls until gradients fit.
        for exponent, weight in ((24, 16.0), (24, 1024.0), (22, 256.0), (23, 64.0))
        for plant in plants(
            f"warm_up_of_{name}_{exponent}_{weight:g}",
            "fp16",
            partial(_begins, model, loss_fn, exponent, weight),
            Expected("warm_up", words=("fit without one",)),
        )
    ]
