"""The guard of a run: its remedies, its saved state, and its events in the journal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from halfstep.errors import BadData, Diverged, advise_new_run, check_same_keys
from halfstep.guard.alarms.spike import REFUSED
from halfstep.guard.failed_steps.writing import build_step_recorder
from halfstep.guard.guardian import Guardian
from halfstep.guard.monitors.monitors import Meters
from halfstep.guard.repair.remedies import Remedies
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import DATA, GuardEvent
from halfstep.journal import events
from halfstep.journal.events import Journal
from halfstep.numbers import format_first_items, pluralize_noun
from halfstep.recipe.changes import compute_recipe_digest
from halfstep.recipe.schema import GuardOptions
from halfstep.step.report import BUFFER_NOT_FINITE, GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, LOSS_NOT_FINITE, StepReport
from halfstep.step.stepper import Stepper
from halfstep.train.epoch_metrics import RunProgress
from halfstep.train.run_folder import RECIPE


def read_guard_remedies(guards: Mapping[str, object]) -> Remedies | None:
    """Return the remedies in the guards' states of a checkpoint; None if the run had no guard.

    Raises BadData if the state is not one that a guard wrote.
    """
    saved = guards.get(Guardian.name)
    if saved is None:
        return None
    return _validate_remedies(saved.get("remedies") if isinstance(saved, Mapping) else None)


def read_result_remedies(result: Mapping[str, object]) -> Remedies:
    """Return the remedies in the result of a finished run, if any; raise BadData like `read_guard_remedies`."""
    plain = result.get("remedies", result.get("cures"))  # the name in results of earlier versions
    return Remedies() if plain is None else _validate_remedies(plain)


def _validate_remedies(plain: object) -> Remedies:
    try:
        return TypeAdapter(Remedies).validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadData(
            f"the guard's saved remedies are damaged: {'.'.join(map(str, first['loc']))} {first['msg']}",
            allowed="a checkpoint written by halfstep",
            do=f"use another checkpoint, or {advise_new_run()}",
        ) from error


def reapply_remedies(model: nn.Module, remedies: Remedies) -> list[str]:
    """Place the remedies in the model, and return a note for the journal.

    A remedy whose module does not exist is left out: the comparison with the checkpoint reports the difference.
    """
    paths = {path for path, _ in model.named_modules()}
    fitting = [one for one in remedies.placed if one.kind != "island" or one.target in paths]
    replace(remedies, placed=fitting).apply_to(model)
    return [f"placed again by the guard: {'; '.join(map(str, fitting))}"] if fitting else []


OWN = (Guardian.name, "spike")
"""Guards that `guard.mode` switches on and off."""
_OF_A_STREAK = ("skips", "collapse", "streak", "streaks")
"""The keys of a Guardian's state that count failed steps."""


class DisabledGuard:
    """The state of a guard that is switched off, saved for a launch that switches it on again."""

    same_on_all_ranks = True

    def __init__(self, name: str, state: Mapping[str, object]) -> None:
        self.name, self._state = name, dict(state)

    def passes(self, report: StepReport) -> bool:
        """Pass every step."""
        return True

    def state_dict(self) -> dict[str, object]:
        """Return the saved state."""
        return dict(self._state)


def list_stateful_guards(stepper: Stepper) -> list[Any]:
    """Return the guards of `stepper` that have a state to save."""
    return [guard for guard in stepper.guards if hasattr(guard, "state_dict")]


def check_guard_states(stepper: Stepper, saved: Mapping[str, Mapping[str, object]]) -> None:
    """Raise where a guard would refuse its saved state; change nothing."""
    guards = {guard.name: guard for guard in list_stateful_guards(stepper)}
    others = [name for name in guards if name not in OWN], [name for name in saved if name not in OWN]
    check_same_keys("guards of the run", *others)
    for name in guards.keys() & saved.keys():
        if hasattr(guards[name], "check_state"):
            guards[name].check_state(saved[name])
        else:
            # A guard of the user may have no `check_state`: loading into a copy is the only way to try it.
            copy.deepcopy(guards[name]).load_state_dict(saved[name])


def load_guard_states(stepper: Stepper, saved: Mapping[str, Mapping[str, object]]) -> None:
    """Load the saved states of the guards; a guard that was not in the checkpoint starts fresh."""
    guards = {guard.name: guard for guard in list_stateful_guards(stepper)}
    for name, state in saved.items():
        if name in guards:
            guards[name].load_state_dict(state)
        else:
            stepper.guards.append(DisabledGuard(name, state))


def remove_saved_remedies(saved: Mapping[str, Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the states without remedies: they were made for the precision that the run no longer uses."""
    kept = dict(saved)
    if Guardian.name in kept:
        kept[Guardian.name] = {**kept[Guardian.name], "remedies": Remedies().as_dict()}
    return kept


def reset_skip_counts(
    now: Mapping[str, Mapping[str, object]], saved: Mapping[str, Mapping[str, object]]
) -> dict[str, Mapping[str, object]]:
    """Return the states with the counts of failed steps reset: skips under the old settings do not count."""
    kept = dict(saved)
    # A guard that is switched off now keeps its counts for later.
    if Guardian.name in kept and Guardian.name in now:
        fresh = {key: now[Guardian.name][key] for key in _OF_A_STREAK if key in kept[Guardian.name]}
        kept[Guardian.name] = {**kept[Guardian.name], **fresh}
    return kept


OVERFLOWS = 3
"""Consecutive overflows from which on the loss scale is no longer just adapting."""
PROOF = 3
"""Consecutive applied steps after which the weights count as good again."""
_ALARMING = (LOSS_NOT_FINITE, GRADIENT_NOT_FINITE, BUFFER_NOT_FINITE, REFUSED)


class Guarding:
    """Build the guard of a run, write its events to the journal, and tell whether the weights are in doubt."""

    def __init__(
        self, stepper: Stepper, options: GuardOptions, journal: Journal, folder: Path, remedies: Remedies | None = None
    ) -> None:
        """Build the guard that `options` ask for. `remedies` are those of an earlier launch, already in place."""
        self._stepper, self._journal = stepper, journal
        self.mode = options.mode
        self._placed = remedies or Remedies()
        self._events: list[GuardEvent] = []
        """Events of the present step; its own event is written to the journal first."""
        self._notes: list[tuple[str, str]] = []
        self._meters: Meters | None = None
        self.guardian: Guardian | None = None
        if options.mode != "off":
            limits = Limits(**options.model_dump(exclude={"mode"}))
            self._meters = Meters(stepper)
            self.guardian = Guardian(
                stepper,
                mode=options.mode,
                limits=limits,
                tell=self._events.append,
                record=build_step_recorder(
                    folder,
                    stepper.model,
                    lambda *note: self._notes.append(note),
                    partial(compute_recipe_digest, folder / RECIPE),
                ),
                meters=self._meters,
            )
        self.rolled_back: Callable[[int], object] = lambda attempt: None
        """A callback with the attempt of the weights that the guard rolled back."""
        self.applied_at = 0
        """The attempt that made the present weights."""
        self._applied = 0
        self.progress = RunProgress()
        """The position of the run, which holds what a resume needs of the alarm."""
        self.guilty: list[int] = []
        """The samples with non-finite values, of the last step that had any."""

    def taken_up(self, attempt: int, checkpoint: str = "") -> None:
        """Record that the run resumes from a checkpoint of `attempt`.

        Where no step is applied after it, these are the weights that fail.
        """
        if self.guardian is not None and checkpoint:
            self.guardian.taken_up_from(checkpoint)
        self.applied_at, self._applied = attempt, self._stepper.counts.applied

    def handle_events(self, report: StepReport, guilty: Sequence[int], ended: Diverged | None = None) -> None:
        """Handle the events of a step after the step itself was written to the journal; then raise `ended`, if given.

        `guilty` are the samples of the step with non-finite values.
        """
        # The last step of a streak may have finite samples; the message names those of an earlier one.
        self.guilty = list(guilty) or self.guilty
        if self._events or self._notes:
            self._tell(describe_guilty_samples(guilty))
        if ended is not None:
            raise ended
        # Single overflows are how a dynamic loss scale finds its value.
        progress = self.progress
        progress.overflows = progress.overflows + 1 if report.reason == GRADIENT_OVERFLOW else 0
        if report.applied:
            suspect = self.guardian is not None and self.guardian.in_trouble
            progress.unproved, self.applied_at = PROOF if suspect else max(0, progress.unproved - 1), report.attempt
        # Non-finite samples explain a failed step: the weights are then not in doubt.
        elif progress.overflows >= OVERFLOWS or (not guilty and report.reason in _ALARMING):
            progress.unproved = PROOF
        applied = self._stepper.counts.applied
        # Applied steps are fewer only after a rollback.
        if applied < self._applied:
            self.rolled_back(self.applied_at)
        self._applied = applied

    @property
    def alarmed(self) -> bool:
        """Return whether the weights may be corrupt: steps failed, and neither data nor loss scale explains it."""
        return self.guardian is not None and self.progress.unproved > 0

    @property
    def remedies(self) -> Remedies:
        """The remedies in place now."""
        return self._placed if self.guardian is None else self.guardian.remedies

    @property
    def readings(self) -> dict[str, Any]:
        """The newest readings of the meters."""
        return {} if self._meters is None else dict(self._meters.readings)

    def _tell(self, guilty: str) -> None:
        for event in self._events:
            if "do" not in event.facts:  # advice: the end event of the run has it
                text = event.text + (guilty if event.facts.get("cause") == DATA else "")
                self._journal.emit(events.GUARD, kind=event.kind, level=event.level, text=text, facts=event.facts)
        for text, level in self._notes:
            self._journal.note(text, level)
        self._events.clear()
        self._notes.clear()


def describe_guilty_samples(guilty: Sequence[int]) -> str:
    """Return text that names the samples of a verdict by their numbers in the data set; empty without samples."""
    if not guilty:
        return ""
    return f" (in the data set: {pluralize_noun(len(guilty), 'sample')} {format_first_items(guilty)})"
