"""Objects that a skip rolls back or holds, in a loop that advances its schedule and its average itself.

A module's buffers are copied at the start of a window and restored on a skip. A schedule or an average is not copied:
its own method does nothing when called after a skip.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.step.census import Census
from halfstep.step.checks import check_no_lazy_modules, check_no_optimizer_in_backward
from halfstep.step.rollback import Rollback, has_state_dict
from halfstep.user_code import warn_user

Moves = tuple[int, int]
"""How many updates were attempted, and how many of them applied."""

MOVING = ("step", "step_update", "update", "update_parameters")
"""The methods by which schedules and averages of torch, timm, diffusers and torch_ema move."""


def find_moving_methods(thing: Any, named: str | Literal[False] | None, others: Sequence[nn.Module] = ()) -> list[str]:
    """Return the methods that move a schedule or an average; none for anything else.

    `others` are the other known modules, of which a module may hold an averaged copy. `named` is the method, or False
    if there is none. Raises WrongUse if `named` is not a method, and for a module that may be either an average or a
    part of the model.
    """
    if named is False:
        return []
    if named is not None:
        if not (isinstance(named, str) and callable(getattr(type(thing), named, None))):
            raise WrongUse(f"hold={named!r}", allowed=f"a method of {type(thing).__name__}", do="hold='update'")
        return [named]
    methods = [name for name in MOVING if _is_own_method(type(thing), name)]
    if not isinstance(thing, nn.Module):
        return methods
    # Many models have a method `update` or `step` that forward uses, and metrics have `update`: a module counts only
    # if it holds a copy of trained parameters, which the method can move.
    # torchmetrics' Metric: its `update` counts a batch.
    is_metric = all(callable(getattr(type(thing), name, None)) for name in ("update", "compute", "reset"))
    if is_metric or any(isinstance(held, torch.optim.Optimizer) for held in vars(thing).values()):
        return []
    # Copies in timm's averages still require gradients: nothing else distinguishes these averages from a model.
    timms = sys.modules.get("timm.utils.model_ema")  # not imported: then nobody has one
    is_timms = timms is not None and isinstance(thing, (timms.ModelEmaV2, timms.ModelEmaV3))
    copies = is_timms or callable(getattr(type(thing), "update_parameters", None))
    averages = copies or _holds_averaged_copy(thing, methods, [*others, *_find_hidden_modules(thing)])
    if averages is None or (averages and not methods):
        raise _build_ambiguous_average_error(thing, methods)
    return methods if averages else []


def _is_own_method(kind: type, name: str) -> bool:
    """Return whether a class has this method; not the `update` of torch's containers, which adds members."""
    method = getattr(kind, name, None)
    return callable(method) and method not in (nn.ModuleDict.update, nn.ParameterDict.update)


def _find_hidden_modules(module: nn.Module) -> list[nn.Module]:
    """Return modules that are held outside of the children, as averages hold the model that they average."""
    held = [
        item for value in vars(module).values() for item in (value if isinstance(value, (list, tuple)) else [value])
    ]
    held = [item() if isinstance(item, weakref.ref) else item for item in held]
    return [item for item in held if isinstance(item, nn.Module)]


def _holds_averaged_copy(module: nn.Module, methods: Sequence[str], others: Sequence[nn.Module]) -> bool | None:
    """Return whether a module holds an averaged copy of a trained one, by its parameters; None if that is not clear."""
    trained = _count_shapes(p for p in module.parameters() if p.requires_grad)
    frozen = _count_shapes(p for p in module.parameters() if not p.requires_grad)
    if trained and frozen and methods:
        # The trained model and its copy in one, as in ema_pytorch's EMA; or a model that contains its target network.
        # Parameters that the model itself freezes appear twice.
        rest = frozen - trained
        whole = trained <= frozen and (
            _count_copies(rest, trained) is not None or not any(n % 2 for n in rest.values())
        )
        if whole and all(_needs_no_argument(module, name) for name in methods):
            return True
        return None if trained <= frozen or frozen <= trained else False
    copied = [other for other in others if other is not module and _is_copy(module, other)]
    if not (trained or frozen):
        return bool(copied)
    if not methods:
        return False
    if frozen or any(_wraps_module(module, other) for other in copied):
        return True if copied else None
    return None if copied else False  # a twin, such as the second generator of two


def _count_shapes(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    # Without scalars, in which averages keep counts and rates.
    return Counter(tuple(tensor.shape) for tensor in tensors if tensor.ndim)


def _count_copies(own: Counter[tuple[int, ...]], of: Counter[tuple[int, ...]]) -> int | None:
    """Return how many copies of other shapes these are; None if they are something else."""
    times = own.total() // of.total() if of else 0
    return times if own == Counter({shape: times * many for shape, many in of.items()}) else None


def _is_copy(module: nn.Module, other: nn.Module) -> bool:
    """Return whether the tensors of a module are one copy or more of another's parameters, and nothing else."""
    shared = {id(p) for p in other.parameters()}
    tensors: list[Tensor] = [*module.parameters()] or [*module.buffers()]
    own = _count_shapes(t for t in tensors if id(t) not in shared and t.is_floating_point())
    trained = _count_shapes(p for p in other.parameters() if p.requires_grad)
    return bool(own) and any(_count_copies(own, of) for of in (_count_shapes(other.parameters()), trained))


def _wraps_module(module: nn.Module, other: nn.Module) -> bool:
    """Return whether a module has one child that is of the other's class and holds all of its parameters."""
    inner = dict(other.named_children()).get("_orig_mod") or other  # compiled
    kinds = {type(other), type(inner), type(dict(inner.named_children()).get("module"))}  # in DistributedDataParallel
    many = len(list(module.parameters()))
    return any(type(child) in kinds and len(list(child.parameters())) == many for child in module.children())


def _needs_no_argument(module: nn.Module, method: str) -> bool:
    wanted = inspect.signature(getattr(module, method)).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in wanted)


def _build_ambiguous_average_error(module: nn.Module, methods: Sequence[str]) -> WrongUse:
    kind, method = type(module).__name__, methods[0] if methods else "forward"
    has = f"has {', '.join(f'{name}()' for name in methods)}, and" if methods else "holds a copy of weights, and"
    return WrongUse(
        f"include({kind}), which {has} may be an average that moves with an update, or a part of the model",
        allowed="an average by the method that moves it, or a module that no method moves",
        do=f"include(thing, hold={method!r}) for an average, include(thing, hold=False) for a part of the model",
    )


class _UpdateGate:
    """Whether a call passes: if an update was applied since the calls before it."""

    def __init__(self, moves: Callable[[], Moves]) -> None:
        self._moves, self._seen, self._open = moves, moves(), True

    def passes(self) -> bool:
        attempted, applied = now = self._moves()
        if attempted != self._seen[0]:
            # Of a schedule that steps once an epoch, all updates of the epoch: it is held where none was applied.
            self._open, self._seen = applied != self._seen[1], now
        return self._open


def skip_methods_without_update(thing: Any, methods: Sequence[str], moves: Callable[[], Moves]) -> None:
    """Make these methods do nothing while no update was applied; raise WrongUse if the object does not allow that."""
    kind = type(thing)
    members: dict[str, Any] = {name: _gate_method(getattr(kind, name), _UpdateGate(moves)) for name in methods}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _make_reduce(kind)}
    try:
        # Another class rather than an attribute of the instance: a schedule's state_dict() holds all its attributes.
        thing.__class__ = type(kind.__name__, (kind,), members)
    except TypeError as error:
        raise WrongUse(
            f"include({kind.__name__}), whose methods cannot be postponed",
            allowed="an object of a Python class without __slots__",
            do="call it under `if scaler.report.applied:`",
        ) from error


def _gate_method(method: Any, gate: _UpdateGate) -> Any:
    @functools.wraps(method)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if gate.passes() else None

    return held


def _make_reduce(kind: Any) -> Any:
    """Return a `__reduce_ex__` that copies and pickles an object as one of the class that it had."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        made, arguments, *rest = kind.__reduce_ex__(self, protocol)
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # Called directly: pickle refuses __newobj__ for another class than the object's own.
            made, arguments = kind.__new__, (kind, *arguments[1:])
        return made, arguments, *rest

    return reduce_ex


class IncludedObjects:
    """Modules and stateful objects: saved at the start of a window, restored on a skip."""

    def __init__(self) -> None:
        self._census = Census()
        self._rollback = Rollback(_warn_about_findings, self._census)
        self._empty = True
        self._begun, self._seen, self._undecided = False, False, True
        self._trained = False
        """Whether a module has run with gradients on in this window."""
        self._before: Counter[nn.Module] = Counter()
        """How often modules have run in training mode and without gradients since the last decision, before that."""
        self._teachers: Counter[nn.Module] | None = None
        """How often the teachers do so in each window; None before the first one is over."""

    def add(self, thing: Any) -> None:
        """Cover a module, or an object with a state; raise WrongUse for anything else."""
        if isinstance(thing, nn.Module):
            check_no_lazy_modules(thing)
            check_no_optimizer_in_backward(thing, {})
            # Those of torch.jit accept no hook: everything is saved after each update, as for a compiled module.
            if not isinstance(thing, torch.jit.ScriptModule):
                thing.register_forward_pre_hook(_ForwardHook(self.forward_begins))
        elif not has_state_dict(thing):
            raise WrongUse(
                f"include({type(thing).__name__}), which a skip can neither hold nor roll back",
                allowed="a module, an optimizer, a schedule, an average, or an object with state_dict()",
                do="include(thing, hold='name of the method that moves it')",
            )
        self._rollback.include(thing)
        self._empty = False
        self._remember()

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are covered."""
        return self._census.included

    def forward_begins(self, module: nn.Module) -> None:
        """Save everything at the first forward pass of a window: one with gradients enabled, or a teacher's.

        In the first window, modules that run before this pass and only without gradients are identified as teachers;
        their forward pass starts later windows too. A teacher that runs more often is being recalibrated.
        """
        if torch.is_grad_enabled():
            # The passes without gradients of a module that is trained are no part of the window.
            ran_before = self._before.pop(module, 0) > 0
            if not self._trained and (ran_before or not self._begun):
                self._begin()
            self._trained = True
        elif not self._trained:
            self._before[module] += 1
            often = 0 if self._teachers is None else self._teachers[module]
            if often and (not self._begun or self._before[module] > often):
                self._before = Counter([module])
                self._begin()

    def _begin(self) -> None:
        self._begun = self._seen = True
        self._remember()

    def _remember(self) -> None:
        self._census.update()
        self._rollback.remember()
        self._undecided = True

    def zeros_if_finite(self) -> list[Tensor]:
        """Return numbers on the device, zero if all buffers that once were finite still are; else one is NaN."""
        return self._rollback.zeros_if_finite()

    def first_not_finite(self) -> str | None:
        """Return the name of a buffer that this window made non-finite, or None; reads the device."""
        return self._rollback.first_not_finite()

    def unseen_writes(self) -> list[Tensor]:
        """Return flags on the device for `look`, while nothing is decided."""
        return self._rollback.unseen_writes() if self._undecided and self._begun else []

    def look(self, flags: Sequence[float]) -> None:
        """Look for writes to tensors without a copy; `flags` are those of `unseen_writes`, as read."""
        # Not after an update, nor in a window that no forward pass began: writes of the loop are among them.
        if self._undecided and self._begun:
            self._rollback.look(flags)

    def decided(self, *, applied: bool) -> None:
        """Accept the changes made so far, or restore the state at the start of the window."""
        # Of several optimizers that are decided on one after another, an applied one has used what forward wrote:
        # a later skip does not take that back.
        if self._undecided:
            if applied:
                self._rollback.keep()
            else:
                self._rollback.restore()
        self._undecided = self._undecided and not applied
        if self._teachers is None and self._trained:
            self._teachers = self._before
        self._before = Counter()
        self._begun = self._trained = False

    def window_over(self) -> None:
        """Save everything now if no forward pass of this window was seen, as with a compiled inner module."""
        if not (self._seen or self._empty):
            self._remember()
        self._seen = False


class _ForwardHook:
    """A forward hook that belongs to one model: copies of the model, such as an average, do not have it."""

    def __init__(self, begins: Callable[[nn.Module], None] | None = None) -> None:
        self._begins = None if begins is None else weakref.WeakMethod(begins)

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        # Evaluation belongs to no window.
        if torch.compiler.is_compiling() or not module.training:
            return
        begins = None if self._begins is None else self._begins()
        if begins is not None:
            begins(module)

    def __deepcopy__(self, _memo: object) -> _ForwardHook:
        return _ForwardHook()

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()


def _warn_about_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        warn_user(str(finding))
