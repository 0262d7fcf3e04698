"""Restore every tensor that a step can write to its value before the window's first micro-batch.

That covers the buffers and parameters of the model and of every module that the loss function holds, and what the user
includes. It does not cover state outside of torch: Python objects and numbers, files, metrics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.step.buffers import Buffers, differ

# -- written parameters -----------------------------------------------------------------------------------------------
# Restore parameters that a forward pass writes: momentum encoders, target networks, norm constraints.
# They are not copied before each window, because a frozen base may have billions of them. Parameters that are written
# while the first step is observed are copied just before the write, and before each window from then on. The others are
# watched: by their version, and by their storage, which `parameter.data = ...` replaces without a version change. The
# old storage is kept alive for the length of a window, so that such a write can always be undone.


class WrittenParameters:
    """The parameters that forward writes: restored where a copy exists, reported where none does."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._watched: list[Tensor] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By id: the parameter, and its content before the window."""
        self._by_storage: dict[int, list[Tensor]] | None = None
        self._lost: list[str] = []
        self.follow({})

    def follow(self, named: dict[str, Tensor]) -> None:
        """Watch these parameters from now on; known written ones keep their copies."""
        plain = {name: p for name, p in named.items() if _has_storage(p)}
        self._names, self._watched = list(plain), list(plain.values())
        own = {id(p) for p in self._watched}
        self._copies = {key: pair for key, pair in self._copies.items() if key in own}
        self._versions = [p._version for p in self._watched]
        self._pointers = list(map(_POINTER, self._watched))
        # detach() shares the storage and keeps it alive without copying.
        self._storages = [p.detach() for p in self._watched]

    def remember(self) -> None:
        """Save the copies, before the first micro-batch."""
        watched = self._watched
        self._by_storage, self._lost = None, []
        self._versions = [p._version for p in watched]
        pointers = list(map(_POINTER, watched))
        if pointers != self._pointers:
            for place, (now, before) in enumerate(zip(pointers, self._pointers, strict=True)):
                if now != before:
                    self._storages[place] = watched[place].detach()
            self._pointers = pointers
        if self._copies:
            pairs = self._copies.values()
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in pairs], [parameter.detach() for parameter, _ in pairs])

    @torch.no_grad()
    def before_write(self, written: Iterable[Tensor]) -> None:
        """Copy parameters that an operation is about to write; called while a step is observed.

        Views and `.data` share the parameter's storage, and are recognized by it.
        """
        if self._by_storage is None:
            self._by_storage = {}
            for parameter in self._watched:
                self._by_storage.setdefault(_storage(parameter), []).append(parameter)
        for tensor in written:
            for parameter in self._by_storage.get(_storage(tensor), ()):
                if id(parameter) not in self._copies:
                    self._copies[id(parameter)] = parameter, parameter.detach().clone()

    def first_writes(self) -> list[str]:
        """Return the names of parameters that were written without a copy; they are copied from now on.

        Call this after the last backward.
        """
        versions = [p._version for p in self._watched]
        if versions == self._versions:
            return []
        moved = [
            place
            for place, (now, before) in enumerate(zip(versions, self._versions, strict=True))
            if now != before and id(self._watched[place]) not in self._copies
        ]
        for place in moved:
            parameter = self._watched[place]
            self._copies[id(parameter)] = parameter, parameter.detach().clone()
        # These copies hold the written values already: they serve the following windows, not this one.
        self._lost = [self._names[place] for place in moved]
        return self._lost

    @torch.no_grad()
    def restore(self) -> None:
        """Restore replaced storages and written contents after a skip."""
        for place, parameter in enumerate(self._watched):
            # Storages first: contents belong into the one that the window began with.
            if parameter.data_ptr() != self._pointers[place]:
                parameter.data = self._storages[place]
        for parameter, before in self._copies.values():
            # Compared first: an unnecessary write would increase the version of a parameter that nothing has touched.
            if differ(parameter.detach(), before):
                parameter.copy_(before)


_POINTER: Any = Tensor.data_ptr


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrapper subclasses around several tensors, and sparse ones
        return 0


def _has_storage(parameter: Tensor) -> bool:
    """Return whether a parameter has memory of its own; shards, fake and meta tensors have none."""
    try:
        return not parameter.is_inference() and parameter.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False


# -- rollback ---------------------------------------------------------------------------------------------------------


LOSS_FUNCTION = "(loss function)."
"""The prefix of names of tensors that belong to no module of the model."""


class Rollback:
    """Everything that a step may write: saved before the window, restored if it is not applied."""

    def __init__(self, model: nn.Module, emit: Callable[[Sequence[Finding]], None]) -> None:
        self._model, self._emit = model, emit
        self.buffers, self.parameters = Buffers(), WrittenParameters()
        self._beside: list[nn.Module] = []
        self._included: list[nn.Module] = []
        self._with_state: list[Any] = []
        self._states: list[Any] = []
        self._first: list[str] = []
        self.follow()

    def include(self, thing: Any) -> None:
        """Cover one more module, or an object with `state_dict`; raise WrongUse for anything else.

        The state of such an object is copied before each window.
        """
        if isinstance(thing, nn.Module):
            self._included.append(thing)
            self.follow()
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._with_state.append(thing)
        else:
            raise WrongUse(
                f"include({type(thing).__name__}), which has no state to go back to",
                allowed="a module, or an object with state_dict() and load_state_dict()",
                do="give the object these two methods, or make its tensors buffers of a module",
            )

    def look_beside(self, modules: Sequence[nn.Module]) -> None:
        """Cover the modules that the loss function holds."""
        if modules != self._beside:
            self._beside = list(modules)
            self.follow()

    def follow(self) -> None:
        """Rebuild the lists after modules or parameters were added or removed."""
        modules = list(_named(self._model, [*self._beside, *self._included]))
        self.buffers.follow(modules)
        self.parameters.follow(_parameters(modules))

    # -- one window ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Save everything, before the first micro-batch."""
        self.buffers.remember()
        self.parameters.remember()
        if self._with_state:
            self._states = [copy.deepcopy(thing.state_dict()) for thing in self._with_state]

    def look(self) -> None:
        """Look for unexpected writes, after the last backward and before the decision."""
        self.buffers.compare()
        self._first = self.parameters.first_writes()

    def keep(self) -> None:
        """Accept what forward wrote: the window was applied."""
        if self._first:
            self._emit([_first_write(self._first, taken_back=True)])

    def restore(self) -> None:
        """Restore the state before the window's first micro-batch, after a skip or an error."""
        lost = self.buffers.restore() + self._first
        self.parameters.restore()
        for thing, state in zip(self._with_state, self._states, strict=True):
            # A copy, because an object may keep the state that it is given, and this one may be needed again.
            thing.load_state_dict(copy.deepcopy(state))
        if lost:
            self._first = []
            self._emit([_first_write(lost, taken_back=False)])


def _named(model: nn.Module, beside: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    yield from model.named_modules()
    for module in beside:
        for path, part in module.named_modules():
            yield f"{LOSS_FUNCTION}{type(module).__name__}{'.' if path else ''}{path}", part


def _parameters(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Return each parameter once, by the first of its names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
    return dict(found.values())


def _first_write(names: Sequence[str], *, taken_back: bool) -> Finding:
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    end = "" if taken_back else "; this step was not applied, and what it wrote there could not be taken back"
    return Finding(
        "rollback.first_write",
        "note" if taken_back else "warning",
        f"the loss function wrote {some} for the first time since the first step was observed{end}",
        "nothing: from now on a copy is kept before each step; observe=True in the first step sees such writes in time",
    )
