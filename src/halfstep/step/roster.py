"""Who takes part in a step: modules, their parameters, the optimizers' own. Noticed when it changes.

Heads are replaced, layers unfrozen and parameter groups added in the middle of training; what was looked up once must
then be looked up again. The check compares identities: microseconds, and no tensor is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


def owned_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's parameters, over all of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class Roster:
    """The members as they were when last looked at."""

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self.look()

    def changed(self) -> bool:
        """Whether anybody came, left, was unfrozen or cast since the last look."""
        members = self._members_now()
        same = len(members) == len(self._members) and all(map(is_, members, self._members))
        return not same or [(p.requires_grad, p.dtype) for p in self._parameters] != self._kinds

    def _members_now(self) -> list[Any]:
        found = [member for slots in self._slots for member in slots.values()]
        for optimizer in self._optimizers:
            found += owned_by(optimizer)
        return found

    def look(self) -> None:
        modules = list(self._model.modules())
        self._slots: list[dict[str, Any]] = [slots for m in modules for slots in (m._modules, m._parameters)]
        self._members = self._members_now()
        unique = {id(member): member for member in self._members if isinstance(member, Tensor)}
        self._parameters = list(unique.values())
        self._kinds = [(p.requires_grad, p.dtype) for p in self._parameters]
        owned = {id(p) for optimizer in self._optimizers for p in owned_by(optimizer)}
        self.strays = [p for p in self._parameters if p.requires_grad and id(p) not in owned]
        """Parameters that backward reaches and no optimizer owns: their gradients must not pile up."""
