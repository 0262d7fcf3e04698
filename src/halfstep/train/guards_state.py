"""The guards of a run in its checkpoint: those of a person must be there again, halfstep's own may come and go."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from halfstep.errors import same_keys
from halfstep.guard.guardian import Guardian
from halfstep.guard.remedy.remedies import Remedies
from halfstep.step.report import StepReport
from halfstep.step.transaction import Stepper

OWN = (Guardian.name, "spike")
"""Guards that `guard.mode` switches on and off."""
_OF_A_STREAK = ("skips", "collapse", "streak", "streaks")
"""What a Guardian counts while steps fail."""


class Resting:
    """The state of a guard that is switched off: kept, for a launch that switches it on again."""

    def __init__(self, name: str, state: Mapping[str, Any]) -> None:
        self.name, self._state = name, dict(state)

    def passes(self, report: StepReport) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)


def stateful(stepper: Stepper) -> list[Any]:
    return [guard for guard in stepper.guards if hasattr(guard, "state_dict")]


def check_guards(stepper: Stepper, saved: Mapping[str, Any]) -> None:
    """A guard may refuse what it is given, and must not do so when half of the run is put back."""
    guards = {guard.name: guard for guard in stateful(stepper)}
    others = [name for name in guards if name not in OWN], [name for name in saved if name not in OWN]
    same_keys("guards of the run", *others)
    for name in guards.keys() & saved.keys():
        if hasattr(guards[name], "check_state"):
            guards[name].check_state(saved[name])
        else:
            copy.deepcopy(guards[name]).load_state_dict(saved[name])


def put_guards(stepper: Stepper, saved: Mapping[str, Any]) -> None:
    """A guard that was not there when the run was saved begins anew."""
    guards = {guard.name: guard for guard in stateful(stepper)}
    for name, state in saved.items():
        if name in guards:
            guards[name].load_state_dict(state)
        else:
            stepper.guards.append(Resting(name, state))


def without_cures(saved: Mapping[str, Any]) -> dict[str, Any]:
    """For a run that goes on in another precision, which its cures were not made for."""
    kept = dict(saved)
    if Guardian.name in kept:
        kept[Guardian.name] = {**kept[Guardian.name], "remedies": Remedies().as_dict()}
    return kept


def forgiven(now: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """For a run that goes on under other settings: the skips under the old ones are not counted against it."""
    kept = dict(saved)
    if Guardian.name in kept and Guardian.name in now:
        fresh = {key: now[Guardian.name][key] for key in _OF_A_STREAK if key in kept[Guardian.name]}
        kept[Guardian.name] = {**kept[Guardian.name], **fresh}
    return kept
