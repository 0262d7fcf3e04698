"""Which modules and weights of a model are looked at: looked up once, and again where the model has changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from halfstep.guard.replay.compiled import uses_compiled
from halfstep.precision.island import islands
from halfstep.step.transaction import Stepper

FORMS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Their output is that of a module inside them."""
TABLES = (nn.Embedding, nn.EmbeddingBag)
"""They multiply nothing: their gradients are sums, and zero for a word that is not in the batch."""


class Members:
    """Of a stepper's model."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._known: Any = None
        self._modules: list[nn.Module] = []

    def look(self) -> None:
        """Ahead of a sample. Whether anything changed is a comparison of identities; no tensor is touched."""
        if self._known is None or self._stepper._roster.changed() or self._known != self._kinds():
            self._look_anew()

    def _look_anew(self) -> None:
        model = self._stepper.model
        self._modules = list(model.modules())
        self._known = self._kinds()
        self.compiled = uses_compiled(model)
        self.metered = metered(model)
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.not_multiplied = not_multiplied(model)

    def _kinds(self) -> Any:
        """An island is another class; what is compiled has another call or another forward."""
        own = [vars(module) for module in self._modules]
        compiled = [(slots.get("_compiled_call_impl"), slots.get("forward")) for slots in own]
        return self._stepper.followed, list(map(type, self._modules)), compiled


def metered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with weights of their own, and blocks of them, whose residual sums no other module shows.

    Not the model's own output, which a loss may well take in fp32, and nothing inside an island, which computes there.
    """
    inside = tuple(f"{path}." if path else "" for path in islands(model))
    found = [
        (path, module)
        for path, module in model.named_modules()
        if path
        and not (inside and path.startswith(inside))
        and not isinstance(module, FORMS)
        and (module._parameters or module._modules)
    ]
    return found or [("", model)]


def not_multiplied(model: nn.Module) -> set[int]:
    """Weights whose gradients are not computed in the format of the run: those of islands, and of tables."""
    wide = [*islands(model).values(), *(module for module in model.modules() if isinstance(module, TABLES))]
    return {id(parameter) for module in wide for parameter in module.parameters()}
