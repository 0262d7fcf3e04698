"""Remedies placed on a run and lifted from it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from halfstep.errors import HalfstepError
from halfstep.guard.remedy.compiled_calls import drop_compiled_calls
from halfstep.guard.remedy.remedies import Remedies, Remedy
from halfstep.guard.verdict import Culprit, Cure, Verdict
from halfstep.precision.island import island, islands, lift_island
from halfstep.step.transaction import Stepper


class Surgery:
    """Changes a run between two steps, the smallest change first."""

    def __init__(self, stepper: Stepper, most_islands: int) -> None:
        self._stepper, self._most = stepper, most_islands
        self.remedies = Remedies()
        self._recompile: Callable[[], None] | None = None

    def treat(self, verdict: Verdict) -> Remedy | None:
        """Place the first cure that was tried and works; None where there is none."""
        for cure in verdict.cures:
            remedy = self._remedy(cure, key_of(verdict)) if cure.works else None
            if remedy is not None and self._placed(remedy):
                self.remedies.placed.append(remedy)
                return remedy
        return None

    def lift_newest(self) -> Remedy | None:
        """Try without it; None where nothing is on probation."""
        remedy = self.remedies.newest_on_probation()
        if remedy is None:
            return None
        self._lift(remedy)
        self.remedies.lifted.append(remedy.culprit)
        return remedy

    def resume(self, remedies: Remedies) -> None:
        """Those of a saved run in place of ours; what whoever resumed it has placed already stays as it is."""
        for remedy in reversed(self.remedies.placed.copy()):
            if remedy not in remedies.placed:
                self._lift(remedy)
        self.remedies = remedies
        model = self._stepper.model
        for path in remedies.islands:
            if path not in islands(model):
                self._raise(path)
        self._compute_in(remedies.precision)
        if remedies.eager and self._recompile is None:
            self._recompile = drop_compiled_calls(model)

    def _lift(self, remedy: Remedy) -> None:
        placed = self.remedies.placed
        at = placed.index(remedy)
        del placed[at]
        if remedy.kind == "island":
            lift_island(self._stepper.model, remedy.target)
        elif remedy.kind == "precision":
            self._leave_out(remedy, at)
            self._compute_in(self.remedies.precision or remedy.before)
        elif self._recompile is not None:
            self._recompile()
            self._recompile = None

    def _leave_out(self, remedy: Remedy, at: int) -> None:
        """What a newer one replaced is now what this one had replaced."""
        placed = self.remedies.placed
        newer = next((i for i in range(at, len(placed)) if placed[i].kind == "precision"), None)
        if newer is not None:
            placed[newer] = replace(placed[newer], before=remedy.before)

    def _compute_in(self, name: str | None) -> None:
        """Where it is that one already, its loss scale goes on."""
        if name not in (None, self._stepper.precision.name):
            self._stepper.change_precision(name or "")

    def _remedy(self, cure: Cure, culprit: str) -> Remedy | None:
        """None for what is in place already, or may not be: the same thing twice would not help, and never end."""
        step, for_good = self._stepper.counts.applied, culprit in self.remedies.lifted
        if cure.kind == "island" and len(self.remedies.islands) < self._most:
            there = cure.target in islands(self._stepper.model)
            return None if there else Remedy("island", cure.target, culprit, step, for_good=for_good)
        if cure.kind == "precision" and cure.target != self._stepper.precision.name:
            return Remedy("precision", cure.target, culprit, step, self._stepper.precision.name, for_good)
        if cure.kind == "eager" and not self.remedies.eager:
            return Remedy("eager", "", culprit, step, for_good=for_good)
        return None

    def _placed(self, remedy: Remedy) -> bool:
        """Whether it could be: a module that holds compiled code cannot become an island."""
        try:
            if remedy.kind == "island":
                self._raise(remedy.target)
            elif remedy.kind == "precision":
                self._stepper.change_precision(remedy.target)
            else:
                self._recompile = drop_compiled_calls(self._stepper.model)
        except HalfstepError:
            return False
        return True

    def _raise(self, path: str) -> None:
        model = self._stepper.model
        if path:
            island(model, path)
        else:
            island(model)


def key_of(verdict: Verdict) -> str:
    """One word for a culprit, to know it again."""
    found: Culprit | None = verdict.culprit
    return verdict.cause if found is None else f"{found.module or 'the model'} {found.operation or found.outside}"
