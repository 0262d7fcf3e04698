"""Buffers that a model does not save by itself: some come with the first batch, and some grow with the longest one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from halfstep.step.buffers import put_buffer


def fleeting(model: nn.Module) -> list[str]:
    """The names of those that are there now."""
    own = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return sorted(
        path + name
        for path, module in own
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    )


def with_a_place(model: nn.Module, names: Collection[str]) -> set[str]:
    """Those of the names that the model has a module for, and nothing else in their place."""
    modules = dict(model.named_modules())
    return {name for name in names if _has_room(modules.get(name.rpartition(".")[0]), name.rpartition(".")[2])}


def _has_room(module: nn.Module | None, name: str) -> bool:
    if module is None or not name:
        return False
    if name in module._buffers:
        return name in module._non_persistent_buffers_set
    # Some set it to None, and register a buffer in its place later.
    return not hasattr(type(module), name) and getattr(module, name, None) is None and name not in module._parameters


def put_buffers(model: nn.Module, values: Mapping[str, Tensor], fleeting: Collection[str]) -> None:
    """All of these into the model; those that are fleeting are registered where they are not."""
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own not in module._buffers and name in fleeting:
            module.__dict__.pop(own, None)
            module.register_buffer(own, value, persistent=False)
        else:
            put_buffer(module._buffers, own, value)
