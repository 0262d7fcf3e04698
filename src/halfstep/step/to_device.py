"""Move models and batches to the device, in the memory format of the computation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move_model_to_device(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Return the model on its device, with the weights of 2d convolutions in the memory format of its images."""
    model = model.to(device)
    for parameter in model.parameters() if channels_last else ():
        if parameter.dim() == 4:
            # A copy: `contiguous` keeps the strides of 1×1 kernels, and their gradients would then have others.
            laid_out = torch.empty_like(parameter.data, memory_format=torch.channels_last)
            parameter.data = laid_out.copy_(parameter.data)
    return model


def move_to_device(tensor: Tensor, device: torch.device, channels_last: bool, *, non_blocking: bool = False) -> Tensor:
    """Return a tensor of a batch on its device; images in the memory format of the model's weights."""
    images = channels_last and tensor.dim() == 4 and tensor.is_floating_point()
    layout = torch.channels_last if images else torch.preserve_format
    return tensor.to(device, non_blocking=non_blocking, memory_format=layout)
