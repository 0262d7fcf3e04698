"""The loss of a loop as a loss function: the loop's own statements, with the variables of one step."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast

from halfstep.adapters.loop_code import LoopSlice, holds_attributes
from halfstep.errors import WrongUse
from halfstep.observe.backward_calls import replace_backward_calls
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.random_state import set_torch_rng_states

_PLAIN = (int, float, str, bool, type(None))
_CONTAINERS = (list, dict, set, deque)
_MOST_ITEMS = 10_000


@dataclass(frozen=True)
class RecordedPass:
    """One forward and backward pass of a loop: the loss, the statements that made it, and their variables."""

    loss: Tensor | None
    """None if backward did not start from one number."""
    code: LoopSlice | None = None
    """None if the source of the loop is not available."""
    values: Mapping[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    """The global variables."""
    random: Sequence[Tensor] = ()
    autocast_around: torch.dtype | None = None
    """The dtype of an autocast around the statements; None without one."""
    autocast: torch.dtype | None = None
    """The dtype of an autocast around the statements or the forward pass."""
    nth: int = 0
    """How many backward passes from these statements and this forward pass came before."""

    @property
    def bytes(self) -> int:
        """The size of the batch that it keeps alive; what a trainer or a library holds lives longer in any case."""
        data = [value for value in self.values.values() if is_batch_data(value) or is_batch_object(value)]
        return sum(leaf.nbytes for _, leaf in iterate_tensor_leaves(data) if not leaf.is_sparse)


def is_batch_data(value: Any) -> bool:
    """Return whether a variable is data of the step: tensors, numbers and containers of these."""
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (Tensor, *_PLAIN)):
        return True
    if isinstance(value, Mapping):
        return all(is_batch_data(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) <= _MOST_ITEMS and all(is_batch_data(item) for item in value)
    return False


def is_batch_object(value: Any) -> bool:
    """Return whether an object holds data of the step and nothing else."""
    return holds_attributes(value) and is_batch_data(vars(value))


def detach_graph(value: Any) -> Any:
    """Return data without the graph of an earlier pass, which backward has released."""
    if isinstance(value, Tensor):
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: detach_graph(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(detach_graph(item) for item in value)
    return value


class _LossFound(BaseException):
    """Ends the statements at the backward pass; not an Exception, which the loop may catch."""


class LoopLoss:
    """A loss function that runs the statements of a loop up to a backward pass, and returns what it starts from."""

    def __init__(self, passes: Sequence[RecordedPass], model: nn.Module, device: torch.device) -> None:
        self._codes = [each.code for each in passes]
        self._random = _Hidden([list(each.random) for each in passes])
        self._around = [each.autocast_around for each in passes]
        self._nth = [each.nth for each in passes]
        self._known = _Hidden([each.known for each in passes])
        self._device = device
        batches = [
            {key: detach_graph(value) for key, value in each.values.items() if is_batch_data(value)} for each in passes
        ]
        self._batches = _Hidden(batches)
        self.held = [
            {
                key: value
                for key, value in each.values.items()
                if not is_batch_data(value) and value is not model and "*" not in key
            }
            for each in passes
        ]
        """The other variables of each pass."""
        self._models = [[key for key, value in each.values.items() if value is model] for each in passes]
        self._next = 0
        self._forces = True
        self.inner_autocast = False
        """Whether the model enters autocast by itself, so that none is around the statements."""
        self.seen_autocast: torch.dtype | None = None
        """The dtype of the last enabled autocast that the statements entered."""

    @property
    def batches(self) -> list[dict[str, Any]]:
        """The data of each pass, by the names of variables."""
        found: list[dict[str, Any]] = self._batches.thing
        return found

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        place, self._next = self._next, (self._next + 1) % len(self._codes)
        try:
            loss = self._run(place, model, batch)
            # The mean over the passes is taken of it, where the loop takes the sum.
            return loss if len(self._codes) == 1 else loss.float() * len(self._codes)
        except BaseException:
            self._next = 0
            raise

    def _run(self, place: int, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        code = self._codes[place]
        assert code is not None, "only passes with statements are run"
        values = {**self.held[place], **batch, **dict.fromkeys(self._models[place], model)}
        values = {key: _UnreadIterator() if isinstance(value, Iterator) else value for key, value in values.items()}
        namespace = {**self._known.thing[place], **{key: value for key, value in values.items() if "." not in key}}
        roots: list[Tensor] = []
        left = [-1]

        def on_backward(found: Sequence[Tensor]) -> None:
            if left[0] == 0:
                roots.append(found[0])
                raise _LossFound
            left[0] -= left[0] > 0

        def capture() -> None:
            left[0] = self._nth[place]

        set_torch_rng_states(self._random.thing[place], self._device)
        with (
            _preserve_objects(namespace, values),
            self._use_autocast(self._around[place]),
            replace_backward_calls(on_backward),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            with contextlib.suppress(_LossFound):
                code.run(namespace, capture)
        if not roots:
            raise WrongUse(
                "a rerun that did not reach backward()", allowed="the statements of the step", do="see above"
            )
        root = roots[0]
        return root if root.ndim == 0 else root.sum()

    @contextmanager
    def leave_autocast(self) -> Iterator[None]:
        """Let the statements enter autocast as they do in the loop, inside."""
        self._forces = False
        try:
            yield
        finally:
            self._forces = True

    @contextmanager
    def _use_autocast(self, around: torch.dtype | None) -> Iterator[None]:
        """Run the statements in the precision of the rerun, in the parts of them that the loop runs under autocast."""
        kind = self._device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        plain, forces = autocast.__enter__, self._forces
        changed: list[tuple[Any, bool, Any]] = []

        def enter(context: Any) -> Any:
            if context._enabled and context.device == kind:
                self.seen_autocast = context.fast_dtype
                if forces:
                    changed.append((context, context._enabled, context.fast_dtype))
                    context._enabled, context.fast_dtype = enabled, dtype
            return plain(context)

        outer = torch.autocast(kind, dtype=dtype, enabled=enabled and around is not None)
        with outer:
            type.__setattr__(autocast, "__enter__", enter)
            try:
                yield
            finally:
                type.__setattr__(autocast, "__enter__", plain)
                for context, was_enabled, own in reversed(changed):
                    context._enabled, context.fast_dtype = was_enabled, own


class _UnreadIterator(Iterator[Any]):
    """Takes the place of an iterator of the loop in a rerun, which must not take items from it."""

    def __next__(self) -> Any:
        raise WrongUse(
            "an iterator that is read between the forward pass and backward()",
            allowed="a rerun, which leaves the loop's iterators alone",
            do="read the batch before the forward pass",
        )


class _Hidden:
    """An object that a search through attributes does not enter: what it holds is no input of the step."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing


@contextmanager
def _preserve_objects(namespace: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes to the step's values, and restore all attributes and containers that the statements change.

    Iterators among the attributes cannot be read inside: their items would be missing afterwards.
    """
    names = {key.partition(".")[0] for key in values}
    objects = {id(thing): thing for name in names if holds_attributes(thing := namespace.get(name))}
    kept = [(thing, dict(vars(thing))) for thing in objects.values()]
    members = [*(namespace.get(name) for name in names), *(v for _, attributes in kept for v in attributes.values())]
    containers = [
        (each, each.copy())
        for each in {id(m): m for m in members if type(m) in _CONTAINERS and len(m) <= _MOST_ITEMS}.values()
    ]
    for thing, attributes in kept:
        vars(thing).update((key, _UnreadIterator()) for key, value in attributes.items() if isinstance(value, Iterator))
    for key, value in values.items():
        name, _, attribute = key.partition(".")
        if attribute and "." not in attribute and id(namespace.get(name)) in objects:
            vars(namespace[name])[attribute] = value
    try:
        yield
    finally:
        for thing, attributes in kept:
            _restore_attributes(vars(thing), attributes)
        for each, before in containers:
            _restore_items(each, before)


def _restore_attributes(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _restore_items(now: Any, before: Any) -> None:
    """Give a container of the loop its items from before, and leave it alone if it has them."""
    same = len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if same and (not isinstance(now, dict) or all(now[key] is before[key] for key in before)):
        return
    now.clear()
    if isinstance(now, (list, deque)):
        now.extend(before)
    else:
        now.update(before)
