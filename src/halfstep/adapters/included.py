"""What a skip rolls back and what it holds, in a loop that moves its schedule and its average by itself.

A module's buffers are copied when a window begins, and put back on a skip. A schedule or an average is not copied: its
own method does nothing where it is called after a skip.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.step.buffers import Buffers
from halfstep.step.optimizer_slot import ParamTracker

Moves = tuple[int, int]
"""How many updates were attempted, and how many of them applied."""

# -- held -------------------------------------------------------------------------------------------------------------

MOVING = ("step", "step_update", "update", "update_parameters")
"""The methods by which schedules and averages of torch, timm, diffusers and torch_ema move."""


def moving_methods(thing: Any, named: str | None) -> list[str]:
    """Return the methods that move a schedule or an average; none for anything else.

    A module counts only where it is an average, as torch's `AveragedModel` and timm's `ModelEmaV3` are: other models
    may well have a method called `update`. Raises WrongUse if `named` is no method.
    """
    if named is not None:
        if not callable(getattr(type(thing), named, None)):
            raise WrongUse(f"hold={named!r}", allowed=f"a method of {type(thing).__name__}", do="hold='update'")
        return [named]
    if isinstance(thing, nn.Module) and not (hasattr(thing, "update_parameters") or hasattr(thing, "decay")):
        return []
    return [name for name in MOVING if callable(getattr(type(thing), name, None))]


class _Gate:
    """Whether a call passes: if an update was applied since the calls before it."""

    def __init__(self, moves: Callable[[], Moves]) -> None:
        self._moves, self._seen, self._open = moves, moves(), True

    def passes(self) -> bool:
        attempted, applied = now = self._moves()
        if attempted != self._seen[0]:
            # Of a schedule that steps once an epoch, all updates of the epoch: it is held where none was applied.
            self._open, self._seen = applied != self._seen[1], now
        return self._open


def hold_methods(thing: Any, methods: Sequence[str], moves: Callable[[], Moves]) -> None:
    """Make these methods do nothing while no update was applied; raise WrongUse if the object does not allow that."""
    kind = type(thing)
    members: dict[str, Any] = {name: _held(getattr(kind, name), _Gate(moves)) for name in methods}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced_as(kind)}
    try:
        # Another class rather than an attribute of the instance: a schedule's state_dict() holds all its attributes.
        thing.__class__ = type(kind.__name__, (kind,), members)
    except TypeError as error:
        raise WrongUse(
            f"include({kind.__name__}), whose methods cannot be held",
            allowed="an object of a Python class without __slots__",
            do="call it under `if scaler.report.applied:`",
        ) from error


def _held(method: Any, gate: _Gate) -> Any:
    @functools.wraps(method)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if gate.passes() else None

    return held


def _reduced_as(kind: Any) -> Any:
    """Return a `__reduce_ex__` that copies and pickles an object as one of the class that it had."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        made, arguments, *rest = kind.__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # Called directly: pickle refuses __newobj__ for another class than the object's own.
            made, arguments = kind.__new__, (kind, *arguments[1:])
        return made, arguments, *rest

    return reduce_ex


# -- rolled back ------------------------------------------------------------------------------------------------------


class Included:
    """Buffers of modules, and states of other objects: copied where a window begins, put back on a skip."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._modules: list[tuple[nn.Module, ParamTracker]] = []
        self._with_state: list[Any] = []
        self._states: list[Any] = []
        self._begun, self._seen, self._undecided = False, False, True

    def add(self, thing: Any) -> None:
        """Cover a module, or an object with a state; raise WrongUse for anything else."""
        if isinstance(thing, nn.Module):
            self._modules.append((thing, ParamTracker(thing, [])))
            self._look_at_modules()
            thing.register_forward_pre_hook(_OnForward(self.begin))
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._with_state.append(thing)
        else:
            raise WrongUse(
                f"include({type(thing).__name__}), which a skip can neither hold nor roll back",
                allowed="a module, an optimizer, a schedule, an average, or an object with state_dict()",
                do="include(thing, hold='name of the method that moves it')",
            )
        self._remember()

    def _look_at_modules(self) -> None:
        self._buffers.follow(pair for module, _ in self._modules for pair in module.named_modules())

    def begin(self) -> None:
        """Save everything, where a module's first forward pass of a window begins."""
        if not self._begun:
            self._begun = self._seen = True
            self._remember()

    def _remember(self) -> None:
        if any([tracker.change() for _, tracker in self._modules]):
            for _, tracker in self._modules:
                tracker.look()
            self._look_at_modules()
        self._buffers.remember()
        self._states = [copy.deepcopy(thing.state_dict()) for thing in self._with_state]
        self._undecided = True

    def largest(self) -> list[Tensor]:
        """Return the largest magnitude in each buffer that once was finite; on the device, nothing is read."""
        return self._buffers.largest()

    def first_not_finite(self) -> str | None:
        """Return the name of a buffer that this window made non-finite, or None; reads the device."""
        return self._buffers.first_not_finite()

    def look(self) -> None:
        """Look for buffers that are written silently, after the last backward."""
        self._buffers.compare()

    def decided(self, *, applied: bool) -> None:
        """Accept what was written until now, or put everything back to where the window began."""
        # Of several optimizers that are decided on one after another, an applied one has used what forward wrote:
        # a later skip does not take that back.
        if not applied and self._undecided:
            self._restore()
        self._undecided = self._undecided and not applied
        self._begun = False

    def _restore(self) -> None:
        lost = self._buffers.restore()
        for thing, state in zip(self._with_state, self._states, strict=True):
            thing.load_state_dict(copy.deepcopy(state))
        if lost:
            warnings.warn(str(_lost(lost)), stacklevel=4)

    def window_over(self) -> None:
        """Save everything now if no forward pass of this window was seen, as with a compiled inner module."""
        if not self._seen and (self._modules or self._with_state):
            self._remember()
        self._seen = False


class _OnForward:
    """A forward hook that belongs to one model: copies of the model, such as an average, do not have it."""

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        self._begin = None if begin is None else weakref.WeakMethod(begin)

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        # Evaluation, and the recalibration of statistics without gradients, belong to no window.
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        begin = None if self._begin is None else self._begin()
        if begin is not None:
            begin()

    def __deepcopy__(self, _memo: object) -> _OnForward:
        return _OnForward()

    def __reduce__(self) -> tuple[type[_OnForward], tuple[()]]:
        return _OnForward, ()


def _lost(names: Sequence[str]) -> Finding:
    return Finding(
        "rollback.first_write",
        "warning",
        f"{', '.join(names[:5])} was written without a version change, and could not be rolled back in this step",
        "nothing: from now on a copy is kept before each step",
    )
