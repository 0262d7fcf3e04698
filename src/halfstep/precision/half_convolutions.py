"""fp16 convolutions on a CPU: oneDNN has no kernel for their backward and falls to a reference loop.

Switching oneDNN off just while a convolution's backward node runs is the quickest of the ways tried; switched off
throughout, matrix products in fp16 become slower by two orders of magnitude.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

_MARK = "_halfstep_spared"


def spare_half_convolutions(model: nn.Module) -> int:
    """Run the backward of each fp16 convolution in `model` without oneDNN; returns how many modules that concerns."""
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    for module in convolutions:
        if not hasattr(module, _MARK):
            module.register_forward_hook(_spare)
            setattr(module, _MARK, True)
    return len(convolutions)


def _spare(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    node = output.grad_fn
    if node is None or output.dtype is not torch.float16 or output.device.type != "cpu":
        return
    before = torch.backends.mkldnn.enabled
    node.register_prehook(lambda _grads: _switch(False))
    node.register_hook(lambda _in, _out: _switch(before))


def _switch(on: object) -> None:
    torch.backends.mkldnn.enabled = on  # type: ignore[assignment]
