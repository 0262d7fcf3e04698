"""What rides on an applied update and must not move on a skipped one: the schedule, the average, the counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import StateMismatch, WrongUse, same_keys
from halfstep.precision.precision import widen
from halfstep.step.buffers import Buffers


class Counts:
    """How many steps were attempted, applied and skipped, and why."""

    def __init__(self) -> None:
        self.attempted = 0
        self.applied = 0
        self.skipped: Counter[str] = Counter()
        self.skipped_in_a_row = 0

    def count(self, reason: str | None) -> None:
        if reason is None:
            self.applied += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped[reason] += 1
            self.skipped_in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "skipped": dict(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        same_keys("counters", vars(self), state)
        vars(self).update({**state, "skipped": Counter(state["skipped"])})


class Ema:
    """An exponential moving average of a model's parameters, in fp32, with its buffers copied along.

    In 16 bits an average with decay 0.9999 never moves: the change is below half the spacing of the format.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 < decay < 1.0:
            raise WrongUse(f"an average with decay={decay}", allowed="a number between 0 and 1", do="Ema(model, 0.999)")
        self.decay, self._model = decay, model
        self._parameters: list[Tensor] = []
        self._averages: list[Tensor] = []
        self.follow()

    def follow(self) -> None:
        """Parameters came, left or were unfrozen: old averages go on, new ones begin with the weights as they are."""
        known = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._averages = [known.get(id(p), widen(p.detach()).clone()) for p in self._parameters]
        self._buffers = Buffers(self._model)
        self._copies = _clones(self._buffers.named())

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor] | None = None) -> None:
        """After an applied update; only for the parameters that the update could move, where these are named."""
        averages, current = self._averages, self._parameters
        if parameters is not None:
            moved = set(map(id, parameters))
            places = [i for i, p in enumerate(current) if id(p) in moved]
            averages, current = [averages[i] for i in places], [current[i] for i in places]
        if not averages:
            return
        torch._foreach_lerp_(averages, current, 1.0 - self.decay)
        buffers = self._buffers.named()
        if _same_shapes(self._copies, buffers):
            if buffers:
                torch._foreach_copy_(list(self._copies.values()), list(buffers.values()))
        else:
            self._copies = _clones(buffers)

    def averages_some_of(self, model: nn.Module) -> bool:
        own = set(map(id, self._parameters))
        return any(id(p) in own for p in model.parameters())

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The model wears the averages inside this context, and its own weights again after it."""
        own = [p.detach().clone() for p in self._parameters]
        own_buffers = _clones(self._buffers.named())
        try:
            self._put(self._averages, self._copies)
            yield
        finally:
            self._put(own, own_buffers)

    def averages(self) -> dict[str, Tensor]:
        """The averaged parameters by name."""
        return dict(zip(self._names, self._averages, strict=True))

    def average_of(self, parameter: Tensor) -> Tensor | None:
        """The average of one parameter, where it is averaged."""
        pairs = zip(self._parameters, self._averages, strict=True)
        return next((average for p, average in pairs if p is parameter), None)

    def state_dict(self) -> dict[str, Any]:
        """References, as in torch's own: copy it to keep it while training goes on."""
        kept = {"averages": self.averages(), "buffers": dict(self._copies)}
        return {"decay": self.decay, **kept, "fleeting": sorted(set(self._copies) & _fleeting(self._model))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not _same_shapes(self.averages(), state["averages"]):
            differing = sorted(set(state["averages"]) ^ set(self._names)) or ["shapes"]
            raise StateMismatch(
                f"averages of another model: {', '.join(differing[:5])} differ",
                allowed=f"the {len(self._names)} trainable parameters of this model",
                do="build the model that was saved",
            )
        # Those that a model does not save by itself may come with its first batch.
        modules = {path for path, _ in self._model.named_modules()}
        later = {name for name in state.get("fleeting", ()) if name.rpartition(".")[0] in modules}
        unknown = sorted(set(state["buffers"]) - self._buffers.names() - later)
        if unknown:
            raise StateMismatch(
                f"buffers of another model: {', '.join(unknown[:5])}",
                allowed="buffers that this model registers",
                do="build the model that was saved",
            )
        self.decay = float(state["decay"])
        with torch.no_grad():
            for name, average in self.averages().items():
                average.copy_(state["averages"][name])
        self._copies = _clones(state["buffers"])

    def _put(self, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        for target, value in zip(self._parameters, parameters, strict=True):
            target.detach().copy_(value)
        for name, buffer in self._buffers.named().items():
            if name in buffers:
                self._put_buffer(name, buffer, buffers[name])
        # Weights cast by an autocast that is still open would otherwise be the ones from before the swap.
        torch.clear_autocast_cache()

    def _put_buffer(self, name: str, buffer: Tensor, value: Tensor) -> None:
        try:
            if buffer.shape == value.shape:
                buffer.copy_(value)
                return
        except RuntimeError:  # expanded: several of its elements share one place in memory
            pass
        path, _, own = name.rpartition(".")
        self._model.get_submodule(path)._buffers[own] = value.clone()  # it has grown since


def _fleeting(model: nn.Module) -> set[str]:
    """Buffers that a model does not save by itself."""
    own = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return {path + name for path, module in own for name in module._non_persistent_buffers_set}


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _same_shapes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)


def checked_average(ema: Ema | None, model: nn.Module) -> Ema | None:
    if ema is not None and not ema.averages_some_of(model):
        raise WrongUse("an Ema of another model", allowed="an Ema of the model that is trained", do="ema=Ema(model)")
    return ema


def checked_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule that moves this optimizer once per applied update."""
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise WrongUse(
            f"a {type(schedule).__name__} of another optimizer",
            allowed="a schedule of the optimizer that it is given with",
            do=f"{type(schedule).__name__}(optimizer, ...)",
        )
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise WrongUse(
            "ReduceLROnPlateau as the schedule of a step",
            allowed="a schedule that is a function of the number of updates",
            do="call plateau.step(metric) in your loop, where you evaluate",
        )
    return schedule
