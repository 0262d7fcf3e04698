"""Activation checkpointing: recompute the activations of a block in backward instead of storing them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> int:
    """Recompute the activations of every block of `model` in backward; return the number of blocks."""
    found = list(iterate_checkpointable_blocks(model))
    for block in found:
        # The instance's forward is replaced, not the module: names in the state dict stay the same.
        block.forward = functools.partial(_checkpoint_block, block, block.forward)  # type: ignore[method-assign]
    return len(found)


def iterate_checkpointable_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost submodules that are worth checkpointing; a single layer has nothing to save.

    A model with a method `activation_blocks` names them itself.
    """
    if hasattr(model, "activation_blocks"):
        yield from model.activation_blocks()  # type: ignore[operator]
        return
    for child in model.children():
        # ModuleList and ModuleDict have no forward to wrap.
        if isinstance(child, _LISTS) or _holds_blocks(child):
            yield from iterate_checkpointable_blocks(child)
        elif _has_submodules(child):
            yield child


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _holds_blocks(module: nn.Module) -> bool:
    """Return whether `module` is a chain of blocks or a nested model such as a U-Net.

    Checkpointed as one block, it would recompute everything at once and save nothing.
    """
    if isinstance(module, nn.Sequential):
        return any(map(_has_submodules, module))
    return any(isinstance(child, _LISTS) and any(map(_has_submodules, child.children())) for child in module.children())


def _has_submodules(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _checkpoint_block(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    # Under `no_grad` no activations are stored, so recomputation would only cost time.
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _preserve_batchnorm_statistics(block)

    # The reentrant variant needs an input that requires grad, takes no keyword arguments and has no context_fn.
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _preserve_batchnorm_statistics(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of batch normalization unchanged while the forward pass is repeated."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    kept = [(norm, norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
    try:
        for norm, *buffers in kept:
            # Clones take the update of the second pass; the originals already counted this batch in the first.
            norm.running_mean, norm.running_var, norm.num_batches_tracked = (
                None if buffer is None else buffer.clone() for buffer in buffers
            )
        yield
    finally:
        for norm, mean, variance, batches in kept:
            norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, variance, batches
