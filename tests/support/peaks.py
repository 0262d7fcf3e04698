"""The real peak of an update, by a loop that knows nothing of ledgers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.measure.candidate import measure_peak_bytes


def peak_of_update(model: nn.Module, loss_fn: Callable[..., Any], batch: Any, optimizer: Any, precision: str) -> int:
    """Return the peak bytes of a second update on the CPU: the first one creates the optimizer's state."""

    def update() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    update()
    tree = [list(model.parameters()), list(model.buffers()), batch, list(optimizer.state.values())]
    held = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return measure_peak_bytes(update, torch.device("cpu"), held)
