"""Lightning itself, as the zoo needs it: fp16 on a CPU, and without its notices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning remarks on: few workers, no GPU, no logger."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield


with quiet():
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as FabricPrecision
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision


def fabric_with_fp16(init_scale: float = 2.0**16) -> Fabric:
    """Return a Fabric in fp16; asked by name on a CPU it takes bf16, so it is given its own plugin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with quiet():
        return Fabric(accelerator="cpu", devices=1, plugins=FabricPrecision("16-mixed", "cpu", scaler))


def fabric_in(precision: str) -> Fabric:
    """Return a Fabric in a precision that it has on a CPU."""
    with quiet():
        return Fabric(accelerator="cpu", devices=1, precision=precision)


def fit_in_fp16(module: LightningModule, batches: Any, *, max_steps: int, init_scale: float) -> Trainer:
    """Train with Lightning's own loop in fp16, and return the Trainer."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with quiet():
        trainer = Trainer(
            accelerator="cpu", devices=1, plugins=plugin, max_steps=max_steps, enable_model_summary=False, **silent
        )
        trainer.fit(module, batches)
    return trainer
