"""The average of the weights and the step counters: both change only with an applied update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import StateMismatch, WrongUse, check_same_keys
from halfstep.formats import widen
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.step.census import SHAPE, Buffers, are_same, read_version_counter
from halfstep.step.memory import SMALL, have_different_bits

if TYPE_CHECKING:
    from halfstep.step.storage.weight_format import NarrowWeights


class StepCounts:
    """How many steps were attempted, applied and skipped, and why."""

    def __init__(self) -> None:
        self.attempted = 0
        self.applied = 0
        self.skipped: Counter[str] = Counter()
        self.skipped_in_a_row = 0

    def count(self, reason: str | None) -> None:
        """Count a step that was applied, or skipped for `reason`."""
        if reason is None:
            self.applied += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped[reason] += 1
            self.skipped_in_a_row += 1

    def __repr__(self) -> str:
        why = ", ".join(f"{reason} {many}" for reason, many in self.skipped.items())
        skipped = f"{sum(self.skipped.values())} skipped" + (f" ({why})" if why else "")
        return f"Counts({self.attempted} attempted, {self.applied} applied, {skipped})"

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {**vars(self), "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load counters; raise StateMismatch if their names differ."""
        check_same_keys("counters", vars(self), state)
        vars(self).update({**state, "skipped": Counter(state["skipped"])})


class EmaState(TypedDict):
    """The saved state of an average."""

    decay: float
    averages: dict[str, Tensor]
    buffers: dict[str, Tensor]
    non_persistent_buffers: list[str]


class Ema:
    """An exponential moving average of a model's parameters in fp32 or wider, with its buffers copied.

    In 16 bits an average with decay 0.9999 never changes: each change is below half the spacing of the format.

    Args:
        model: The model to average.
        decay: The weight of the old average in each update.

    Raises:
        WrongUse: The decay is outside of (0, 1), or a parameter is lazy.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 < decay < 1.0:
            raise WrongUse(f"an average with decay={decay}", allowed="a number between 0 and 1", do="Ema(model, 0.999)")
        self.decay, self._model = decay, model
        self.weights: NarrowWeights | None = None
        """Where the weights are stored in bf16: their values in fp32."""
        self._parameters: list[Tensor] = []
        self._averages: list[Tensor] = []
        self.follow()

    def follow(self) -> None:
        """Update the set of parameters after some were added, removed, frozen or unfrozen.

        A parameter that was trained once stays averaged while it is frozen: GANs freeze one half in every other step.
        New ones start with their weights.
        """
        known = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        named = {
            strip_compile_wrappers(n): p for n, p in self._model.named_parameters() if p.requires_grad or id(p) in known
        }
        lazy = [name for name, p in named.items() if is_lazy(p)]
        if lazy:
            raise WrongUse(
                f"an average of {', '.join(lazy[:5])}, which have no shape before the first batch",
                allowed="initialized parameters",
                do="run a batch through the model, then build the optimizer and Ema(model)",
            )
        self._names, self._parameters = list(named), list(named.values())
        self._averages = [known.get(id(p), self._wide(p).clone()) for p in self._parameters]
        self._buffers = Buffers(self._model)
        self._copies = _clone_tensors(self._named_buffers())
        self._sources: list[Tensor | None] | None = None
        """The buffers that the copies belong to; None if they are to be paired anew."""
        self._small_buffers: list[Tensor] = []
        self._small_copies: list[Tensor] = []
        self._small_shapes: list[torch.Size] = []
        self._large: list[tuple[Tensor, Tensor, int]] = []

    def _wide(self, p: Tensor) -> Tensor:
        return widen(p.detach()) if self.weights is None else self.weights.wide(p)

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Update the averages after an applied update, only for `parameters` if these are given."""
        averages, current = self._averages, self._parameters
        if parameters is not None:
            moved = set(map(id, parameters))
            places = [i for i, p in enumerate(current) if id(p) in moved]
            averages, current = [averages[i] for i in places], [current[i] for i in places]
        if not averages:
            return
        # In place: no temporary of the size of the model.
        if self.weights is None:
            torch._foreach_lerp_(averages, current, 1.0 - self.decay)
        else:  # one at a time: each is in fp32 only here
            for average, p in zip(averages, current, strict=True):
                average.lerp_(self._wide(p), 1.0 - self.decay)
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        """Copy small buffers each time, and large ones, such as masks, if they were written since."""
        if (
            self._sources is None
            or not are_same(self._buffers.values(), self._sources)
            or list(map(SHAPE, self._small_buffers)) != self._small_shapes
        ):
            self._look_at_buffers()
        if self._small_buffers:
            torch._foreach_copy_(self._small_copies, self._small_buffers)
        for place, (copy, buffer, version) in enumerate(self._large):
            if buffer._version != version:
                copy.copy_(buffer)
                self._large[place] = copy, buffer, buffer._version

    def _look_at_buffers(self) -> None:
        """Rebuild the pairs after buffers were registered, replaced or resized."""
        named = self._named_buffers()
        if not _have_same_shapes(self._copies, named):
            self._copies = _clone_tensors(named)
        self._sources = self._buffers.values()
        pairs = [(self._copies[name], buffer) for name, buffer in named.items()]
        small = [pair for pair in pairs if pair[1].numel() <= SMALL or read_version_counter(pair[1]) < 0]
        self._small_copies, self._small_buffers = [copy for copy, _ in small], [buffer for _, buffer in small]
        self._small_shapes = list(map(SHAPE, self._small_copies))
        known = set(map(id, self._small_buffers))
        self._large = [(copy, buffer, -1) for copy, buffer in pairs if id(buffer) not in known]

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Copy large buffers that were written through `.data`, without a version change, before they are read."""
        for copy, buffer, _ in self._large:
            if copy.shape == buffer.shape and have_different_bits(copy, buffer):
                copy.copy_(buffer)

    def _named_buffers(self) -> dict[str, Tensor]:
        return {strip_compile_wrappers(name): buffer for name, buffer in self._buffers.named().items()}

    def averages_some_of(self, model: nn.Module) -> bool:
        """Return whether any parameter of `model` is averaged here."""
        own = set(map(id, self._parameters))
        return any(id(p) in own for p in model.parameters())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the model inside the context, and restore its own weights afterwards."""
        self._catch_up()
        own = [p.detach().clone() for p in self._parameters]
        own_buffers = _clone_tensors(self._named_buffers())
        try:
            self._load_average(self._averages, self._copies)
            yield
        finally:
            self._load_average(own, own_buffers)

    def averages(self) -> dict[str, Tensor]:
        """Return the averaged parameters by name."""
        return dict(zip(self._names, self._averages, strict=True))

    def average_of(self, parameter: Tensor) -> Tensor | None:
        """Return the average of one parameter, or None if it is not averaged."""
        pairs = zip(self._parameters, self._averages, strict=True)
        return next((average for p, average in pairs if p is parameter), None)

    def state_dict(self) -> EmaState:
        """Return the state. It holds references, as torch's own: copy it if training continues."""
        self._catch_up()
        own = ((f"{path}." if path else "", module) for path, module in self._model.named_modules())
        non_persistent = {
            strip_compile_wrappers(path + name) for path, module in own for name in module._non_persistent_buffers_set
        }
        return {
            "decay": self.decay,
            "averages": self.averages(),
            "buffers": dict(self._copies),
            "non_persistent_buffers": sorted(set(self._copies) & non_persistent),
        }

    def load_state_dict(self, state: EmaState) -> None:
        """Load a state; raise StateMismatch for the averages or buffers of another model."""
        if not _have_same_shapes(self.averages(), state["averages"]):
            differing = sorted(set(state["averages"]) ^ set(self._names)) or ["shapes"]
            raise StateMismatch(
                f"averages of another model: {', '.join(differing[:5])} differ",
                allowed=f"the {len(self._names)} trainable parameters of this model",
                do="build the saved model",
            )
        # Non-persistent buffers may be registered only by the model's first batch.
        modules = {strip_compile_wrappers(path) for path, _ in self._model.named_modules()}
        later = {name for name in state.get("non_persistent_buffers", ()) if name.rpartition(".")[0] in modules}
        unknown = sorted(set(state["buffers"]) - set(map(strip_compile_wrappers, self._buffers.names())) - later)
        if unknown:
            raise StateMismatch(
                f"buffers of another model: {', '.join(unknown[:5])}",
                allowed="buffers that this model registers",
                do="build the saved model",
            )
        self.decay = float(state["decay"])
        with torch.no_grad():
            for name, average in self.averages().items():
                average.copy_(state["averages"][name])
        # Without sources the next update pairs the loaded copies with the model's buffers again.
        self._copies, self._sources = _clone_tensors(state["buffers"]), None
        self._large = []

    # Not on `in_place`: round a generator torch (2.10 to 2.15) raises with a call that Python 3.12 deprecates.
    @torch.no_grad()
    def _load_average(self, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        for target, value in zip(self._parameters, parameters, strict=True):
            # Into the parameters themselves: the optimizer and DistributedDataParallel hold references to them.
            target.detach().copy_(value)
        for name, buffer in self._buffers.named().items():
            if strip_compile_wrappers(name) in buffers:
                self._load_buffer(name, buffer, buffers[strip_compile_wrappers(name)])
        # Otherwise an autocast that is still open would use casts of the weights from before the swap.
        torch.clear_autocast_cache()

    def _load_buffer(self, name: str, buffer: Tensor, value: Tensor) -> None:
        try:
            if buffer.shape == value.shape:
                buffer.copy_(value)
                return
        except RuntimeError:  # expanded: several of its elements share one place in memory
            pass
        path, _, own = name.rpartition(".")
        module = dict(self._model.named_modules())[path]  # those of torch.jit have no get_submodule()
        module._buffers[own] = value.clone()  # its size has changed since


def _clone_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _have_same_shapes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)


def check_ema_model(ema: Ema | None, model: nn.Module) -> Ema | None:
    """Return `ema`; raise WrongUse if it is no Ema or averages another model."""
    if ema is not None and not isinstance(ema, Ema):
        raise WrongUse(
            f"ema={type(ema).__name__}, whose updates a skip could not leave out",
            allowed="a halfstep.Ema of the model that is trained",
            do="ema=halfstep.Ema(model, decay=0.999)",
        )
    if ema is not None and not ema.averages_some_of(model):
        raise WrongUse("an Ema of another model", allowed="an Ema of the model that is trained", do="ema=Ema(model)")
    return ema
