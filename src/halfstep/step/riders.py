"""What rides on an applied update and must not move on a skipped one: the schedule, the average, the counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import StateMismatch, WrongUse
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
        if set(state) != set(vars(self)):
            raise StateMismatch(f"counters {sorted(state)}", allowed=str(sorted(vars(self))), do="save them anew")
        vars(self).update({**state, "skipped": Counter(state["skipped"])})


class Ema:
    """An exponential moving average of a model's parameters, in fp32, with its buffers copied along.

    In 16 bits an average with decay 0.9999 never moves: the change is below half the spacing of the format.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0.0 < decay < 1.0:
            raise WrongUse(f"an average with decay={decay}", allowed="a number between 0 and 1", do="Ema(model, 0.999)")
        self.decay = decay
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters: list[Tensor] = list(named.values())
        self._place = {id(p): i for i, p in enumerate(self._parameters)}
        self._names = list(named)
        self._averages = [p.detach().float().clone() for p in self._parameters]
        self._buffers = Buffers(model)
        self._copies = [b.detach().clone() for b in self._buffers]

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor] | None = None) -> None:
        """After an applied update; only for the parameters that the update could move, where these are named."""
        averages, current = self._averages, self._parameters
        if parameters is not None and len(parameters) != len(current):
            places = [self._place[id(p)] for p in parameters if id(p) in self._place]
            averages, current = [averages[i] for i in places], [current[i] for i in places]
        torch._foreach_lerp_(averages, current, 1.0 - self.decay)
        if self._copies:
            torch._foreach_copy_(self._copies, list(self._buffers))

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The model wears the averages inside this context, and its own weights again after it."""
        own = [t.detach().clone() for t in self._targets()]
        try:
            self._put(self._averages + self._copies)
            yield
        finally:
            self._put(own)

    def averages(self) -> dict[str, Tensor]:
        """The averaged parameters by name."""
        return dict(zip(self._names, self._averages, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "averages": self.averages(), "buffers": list(self._copies)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved, buffers = state["averages"], state["buffers"]
        differing = sorted(set(saved) ^ set(self._names))
        if differing or len(buffers) != len(self._copies):
            raise StateMismatch(
                f"averages of another model: {', '.join(differing[:5]) or f'{len(buffers)} buffers'} differ",
                allowed=f"{len(self._names)} parameters and {len(self._copies)} buffers of this model",
                do="build the model that was saved",
            )
        self.decay = float(state["decay"])
        with torch.no_grad():
            for name, average in zip(self._names, self._averages, strict=True):
                average.copy_(saved[name])
            for copy, buffer in zip(self._copies, buffers, strict=True):
                copy.copy_(buffer)

    def _targets(self) -> list[Tensor]:
        return [*self._parameters, *self._buffers]

    def _put(self, values: Sequence[Tensor]) -> None:
        for target, value in zip(self._targets(), values, strict=True):
            target.detach().copy_(value)
        # Weights cast by an autocast that is still open would otherwise be the ones from before the swap.
        torch.clear_autocast_cache()


def checked_schedule(schedule: Any) -> Any:
    """A schedule that moves once per applied update."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise WrongUse(
            "ReduceLROnPlateau as the schedule of a step",
            allowed="a schedule that is a function of the number of updates",
            do="call plateau.step(metric) in your loop, where you evaluate",
        )
    return schedule
