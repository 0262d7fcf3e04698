"""The parameters and buffers of a model that are saved, and the buffers that a saved state is put into."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from halfstep.step.census import put_buffer


def select_saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to a checkpoint: all, but for those that a model names as `not_saved`.

    A model with an adapter does so for its frozen base, which has its own files.
    """
    left_out: frozenset[str] = getattr(model, "not_saved", frozenset())
    return {name: parameter for name, parameter in model.named_parameters() if name not in left_out}


def list_non_persistent_buffers(model: nn.Module) -> list[str]:
    """Return the names of the non-persistent buffers that exist now."""
    own = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return sorted(
        path + name
        for path, module in own
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    )


def select_assignable_buffers(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return those names whose module exists in the model and has nothing else under that name."""
    modules = dict(model.named_modules())
    return {name for name in names if _has_room(modules.get(name.rpartition(".")[0]), name.rpartition(".")[2])}


def _has_room(module: nn.Module | None, name: str) -> bool:
    if module is None or not name:
        return False
    if name in module._buffers:
        return name in module._non_persistent_buffers_set
    # Some modules set the attribute to None, and register a buffer in its place later.
    return not hasattr(type(module), name) and getattr(module, name, None) is None and name not in module._parameters


def put_buffers(model: nn.Module, values: Mapping[str, Tensor], non_persistent_buffers: Collection[str]) -> None:
    """Set all these buffers; those in `list_non_persistent_buffers` are registered where they are missing."""
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own not in module._buffers and name in non_persistent_buffers:
            # register_buffer refuses a name that is already an attribute.
            module.__dict__.pop(own, None)
            module.register_buffer(own, value, persistent=False)
        else:
            put_buffer(module._buffers, own, value)
