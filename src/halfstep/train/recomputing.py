"""Activation checkpointing: activations inside a block are computed again in backward instead of kept."""

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
    """Make every block of a model compute its activations twice; returns how many blocks there are."""
    found = list(blocks(model))
    for block in found:
        block.forward = functools.partial(_checkpointed, block, block.forward)  # type: ignore[method-assign]
    return len(found)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Parts of a model that are called as a whole and have parts themselves: single layers have nothing to save."""
    for child in model.children():
        if isinstance(child, _LISTS) or _holds_blocks(child):
            yield from blocks(child)
        elif _has_parts(child):
            yield child


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _holds_blocks(module: nn.Module) -> bool:
    """A chain of blocks, or a model within the model, such as a U-Net: one block of it all would save nothing."""
    if isinstance(module, nn.Sequential):
        return any(map(_has_parts, module))
    return any(isinstance(child, _LISTS) and any(map(_has_parts, child.children())) for child in module.children())


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _checkpointed(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _statistics_kept(block)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Batch normalisation must not count a batch a second time when its forward is repeated."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    kept = [(norm, norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
    try:
        for norm, *buffers in kept:
            norm.running_mean, norm.running_var, norm.num_batches_tracked = (
                None if buffer is None else buffer.clone() for buffer in buffers
            )
        yield
    finally:
        for norm, mean, variance, batches in kept:
            norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, variance, batches
