"""Convolutions that begin with weights under which a signal stays as loud as it came."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn

Layer = TypeVar("Layer", nn.Conv2d, nn.ConvTranspose2d)


@torch.no_grad()
def as_loud(layer: Layer) -> Layer:
    """For a layer before or after a ReLU, which takes half of the signal away.

    As torch begins, each layer leaves less than half of it: after four, positions drown what is seen, slots divide a
    frame into regions, and stay with that.
    """
    # What one output adds up: a kernel's worth of each input, or of a kernel that is moved in strides, a part of it.
    moved = math.prod(layer.stride) if isinstance(layer, nn.ConvTranspose2d) else 1
    added_up = layer.in_channels * math.prod(layer.kernel_size) / moved
    layer.weight.normal_(0.0, math.sqrt(2.0 / added_up))
    if layer.bias is not None:
        layer.bias.zero_()
    return layer
