"""Synchronize gradients over ranks: replicas, and shards of FSDP2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def reshard_gathered_parameters(model: nn.Module) -> None:
    """Reshard parameters that a forward pass outside of a step left gathered."""
    # FSDP2 is slow to load, and loaded already where a model is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FSDPModule):
        from halfstep.step.synchronizers.sharded import reshard_parameters

        reshard_parameters(model)
