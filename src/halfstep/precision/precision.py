"""A precision: how a run stores, computes, reduces and protects numbers. A value, not a switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.formats import FP16, FP32, TF32, Format, is_narrow
from halfstep.precision import flags
from halfstep.precision.half_convolutions import spare_half_convolutions


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What one name stands for. Each file in `kinds/` holds one of these."""

    name: str
    summary: str
    computes: Format
    """The format of matrix multiplications and convolutions."""
    stores: Format = FP32
    """The format of trainable weights and of optimizer state."""
    reduces: Format = FP32
    """The format in which gradients are summed over processes."""
    scaled: bool = False
    """Small gradients vanish in this format, so the loss is scaled up before backward."""
    falls_to: str | None = None
    """The next rung down, for devices that cannot compute in this format."""

    @property
    def casts(self) -> bool:
        """Whether weights are cast for computing, or used as they are stored."""
        return self.computes not in (self.stores, TF32)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Round the forward pass, and nothing else. Reusable, one thread at a time."""
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.computes.dtype)

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        """Round forward and backward: process-wide switches, as before afterwards.

        Numbers that stay in fp32 are computed in real fp32, in islands too, unless tf32 was asked for by name.
        """
        fp32 = flags.fp32_scope("tf32" if self.computes is TF32 else "ieee", device)
        return flags.MkldnnKept(fp32) if self._spares_convolutions(device) else fp32

    @contextmanager
    def inference(self, device: torch.device) -> Iterator[None]:
        """Round forward passes that nothing is learnt from: evaluation and prediction."""
        with torch.no_grad(), self.scope(device), self.autocast(device):
            yield

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Once, before the first step."""
        if self._spares_convolutions(device):
            spare_half_convolutions(model)

    def _spares_convolutions(self, device: torch.device) -> bool:
        return self.computes is FP16 and device.type == "cpu"

    def __str__(self) -> str:
        return self.name


def widen(tensor: Tensor) -> Tensor:
    """The same numbers in at least fp32: for sums, norms and losses. Wide ones are not touched."""
    return tensor.float() if is_narrow(tensor.dtype) else tensor
