"""Fake models on a device and in a layout: `Module.to` swaps tensors, which fakes do not allow."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def placed(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """The model itself, with its tensors replaced by such as lie there; tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = moved.setdefault(id(tensor), _moved(tensor, device, channels_last))  # type: ignore[assignment]
    return model


def _moved(tensor: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    kernel = channels_last and tensor.dim() == 4 and isinstance(tensor, nn.Parameter)
    plain = tensor.detach()
    if tensor.device == device and not kernel:
        if plain.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return tensor
        there = plain  # A fake that was deep-copied has other memory than its views, which would count twice.
    else:
        layout = torch.channels_last if kernel else torch.preserve_format
        there = torch.empty_like(tensor, device=device, memory_format=layout)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
