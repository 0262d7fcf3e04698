"""One optimizer in a step: its gradients, its clipping, its schedule, its state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import StateMismatch, WrongUse, same_keys, same_presence
from halfstep.step.gradients import Gradients

# -- param tracker ----------------------------------------------------------------------------------------------------
# Track which modules and parameters take part in a step, and notice changes before the next one.
# Heads are replaced, layers unfrozen and parameter groups added in the middle of training; cached lists must then be
# rebuilt. The check compares identities: it takes microseconds and touches no tensor.


def owned_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, over all of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


MEMBERS, KINDS = "members", "kinds"


class ParamTracker:
    """The modules and parameters at the last look."""

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self.look()

    def change(self) -> str | None:
        """Return MEMBERS if modules or parameters were added or removed, KINDS if frozen or cast, else None."""
        members = self._members_now()
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            return MEMBERS
        return KINDS if [(p.requires_grad, p.dtype) for p in self._parameters] != self._kinds else None

    def _members_now(self) -> list[Any]:
        found = [member for slots in self._slots for member in slots.values()]
        for optimizer in self._optimizers:
            found += owned_by(optimizer)
        return found

    def look(self) -> None:
        """Record the current modules and parameters."""
        modules = list(self._model.modules())
        # The modules' own dictionaries, which stay the same objects: no walk over the model before each step.
        self._slots: list[dict[str, Any]] = [slots for m in modules for slots in (m._modules, m._parameters)]
        self._members = self._members_now()
        unique = {id(member): member for member in self._members if isinstance(member, Tensor)}
        self._parameters = list(unique.values())
        self._kinds = [(p.requires_grad, p.dtype) for p in self._parameters]
        owned = {id(p) for optimizer in self._optimizers for p in owned_by(optimizer)}
        self.strays = [p for p in self._parameters if p.requires_grad and id(p) not in owned]
        """Trainable parameters that no optimizer owns: their gradients must not accumulate over the steps."""


# -- optimizer slot ---------------------------------------------------------------------------------------------------


class OptimizerSlot:
    """One optimizer by name, with its gradients, limits and schedule. Raises WrongUse for an unusable schedule."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Any = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.name, self.optimizer, self.schedule = name, optimizer, checked_schedule(schedule, optimizer)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.gradients = Gradients(owned_by(optimizer))
        self.norm = self.multiplier = math.nan
        """The norm of its gradients, unscaled and before clipping, and the factor that they were multiplied by."""

    def follow(self) -> None:
        """Rebuild the list of parameters after some were added, removed or unfrozen."""
        self.gradients = Gradients(owned_by(self.optimizer))

    def ready(self) -> None:
        """Scale and clip the gradients for the optimizer."""
        self.gradients.multiply_(self.multiplier)
        if self.clip_value is not None:
            self.gradients.clamp_(self.clip_value)

    def apply(self) -> None:
        """Step the optimizer, then its schedule."""
        self.optimizer.step()
        if self.schedule is not None:
            # After the optimizer: torch's schedules set the lr of the next step.
            self.schedule.step()

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer and schedule, with their types."""
        return {
            "kind": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "schedule_kind": None if self.schedule is None else type(self.schedule).__name__,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch for the state of another optimizer, schedule or model; nothing is changed."""
        ours = self.state_dict()
        same_keys(f"optimizer {self.name!r}", ours, state)
        self._check_kind("optimizer", ours["kind"], state["kind"])
        same_presence("a schedule", "schedule", ours, state)
        self._check_kind("schedule", ours["schedule_kind"], state["schedule_kind"])
        if ours["schedule"] is not None:
            same_keys(f"the {ours['schedule_kind']} of {self.name!r}", ours["schedule"], state["schedule"])
        self._check_groups(state["optimizer"]["param_groups"])
        self._check_tensors(state["optimizer"]["state"])

    def _check_kind(self, what: str, ours: str | None, saved: str | None) -> None:
        if ours != saved:
            raise StateMismatch(
                f"the {what} of {self.name!r} was saved as {saved}",
                allowed=f"the state of {ours}, which this Stepper has",
                do=f"build the Stepper with {saved}, or begin with a new {what}",
            )

    def _check_groups(self, saved: list[dict[str, Any]]) -> None:
        held = self.optimizer.param_groups
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in held]:
            many = [sum(len(group["params"]) for group in groups) for groups in (saved, held)]
            raise StateMismatch(
                f"optimizer {self.name!r} was saved with {many[0]} parameters in {len(saved)} groups",
                allowed=f"{many[1]} in {len(held)}",
                do="build the model and the optimizer as they were when they were saved",
            )
        for mine, theirs in zip(held, saved, strict=True):
            # Newer versions of torch add options, so an older state may lack some; options are never renamed.
            unknown = sorted(set(theirs) - set(mine) - _SCHEDULES_OWN)
            if unknown:
                raise StateMismatch(
                    f"optimizer {self.name!r} was saved with the options {', '.join(unknown)}",
                    allowed=", ".join(sorted(set(mine) - {"params"})),
                    do=f"build the {type(self.optimizer).__name__} that was saved",
                )

    def _check_tensors(self, saved: Mapping[Any, Mapping[str, Any]]) -> None:
        for index, parameter in enumerate(owned_by(self.optimizer)):
            own, theirs = self.optimizer.state.get(parameter, {}), saved.get(index, {})
            if own and theirs and set(own) != set(theirs):
                same_keys(f"the state of parameter {index} of {self.name!r}", own, theirs)
            for name, value in theirs.items():
                _check_shape(name, index, value, parameter)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of optimizer and schedule."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])


_SCHEDULES_OWN = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Options that schedules write into an optimizer's groups."""


def _check_shape(name: str, index: int, value: Any, parameter: Tensor) -> None:
    # Factored or scalar state has other shapes; a full moment has as many dimensions as its parameter and must fit.
    full = isinstance(value, Tensor) and value.ndim == parameter.ndim > 0 and value.numel() > 1
    if full and any(a not in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)):
        raise StateMismatch(
            f"{name} of parameter {index} was saved with shape {tuple(value.shape)}",
            allowed=str(tuple(parameter.shape)),
            do="build the model as it was when it was saved",
        )


def checked_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return `schedule`; raise WrongUse if it does not step this optimizer once per applied update."""
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
