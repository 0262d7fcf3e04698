"""Freeze parts of a model by name, with the statistics of their normalization."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from halfstep.errors import BadRecipe, UnknownName


def freeze_parts(model: nn.Module, parts: list[str]) -> list[str]:
    """Freeze `parts`, dotted names of modules or parameters; return a line for each.

    The statistics of their batch normalization are frozen too, also after `model.train()`. Raises UnknownName for an
    unknown name, and BadRecipe where nothing is left to train.
    """
    # All names are resolved first, so that a wrong one leaves the model unchanged.
    found: dict[str, list[nn.Parameter]] = {}
    for part in parts:
        # The final dot makes `layer1` match `layer1.weight` and not `layer10.weight`.
        found[part] = [p for name, p in model.named_parameters() if part and f"{name}.".startswith(f"{part}.")]
        if not found[part]:
            raise _unknown_part_error(model, part)
    frozen = {id(parameter) for parameters in found.values() for parameter in parameters}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in frozen]
    if parts and not trained:
        raise BadRecipe(
            f"model.freeze: {', '.join(parts)} leaves nothing to train",
            allowed="at least one trainable part",
            do=f"leave out one of {', '.join(parts)}",
        )
    for part, parameters in found.items():
        for parameter in parameters:
            parameter.requires_grad_(False)
        if part in dict(model.named_modules()):
            for below in model.get_submodule(part).modules():
                if isinstance(below, _NormBase) and below.track_running_stats:
                    below.eval()
                    # A class, not a hook or an instance method: copies of the model, such as an EMA, are frozen too.
                    below.__class__ = _make_frozen_class(type(below))  # type: ignore[assignment]
    return [f"{part} is frozen: {sum(p.numel() for p in each):,} parameters" for part, each in found.items()]


def _unknown_part_error(model: nn.Module, part: str) -> UnknownName:
    names = {name for name, module in model.named_modules() if name and any(True for _ in module.parameters())}
    names |= {name for name, _ in model.named_parameters()}
    near = difflib.get_close_matches(part, sorted(names), n=1, cutoff=0.6)
    top = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    return UnknownName(
        f"model.freeze: the model has no module {part!r} with parameters",
        allowed=f"{', '.join(top[:20])}, or a part of one, such as {max(names, key=len, default='none')}",
        do=f"did you mean {near[0]!r}?" if near else "use one of the allowed names",
    )


class FrozenNormMixin:
    """A mixin for normalization layers with frozen statistics: `train()` has no effect."""

    def train(self, mode: bool = True) -> Any:
        """Set evaluation mode, ignoring `mode`."""
        return super().train(False)  # type: ignore[misc]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _make_frozen_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, FrozenNormMixin):
        return kind
    if kind not in _CLASSES:
        _CLASSES[kind] = type(f"Still{kind.__name__}", (FrozenNormMixin, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]
