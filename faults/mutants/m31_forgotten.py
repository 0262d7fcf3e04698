"""A part of the state that is read, and not put back: one defect for each part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from halfstep.train import resume
from halfstep.train.resume import FoundCheckpoint
from halfstep.train.state import COMPONENTS, RunObjects, State


@dataclass(frozen=True)
class Forgotten:
    component: str
    ROWS: tuple[str, ...] = ("F31",)

    @property
    def WHAT(self) -> str:
        return f"{self.component} is not restored"

    def apply(self) -> None:
        restore = resume.restore_state

        def forgetful(live: RunObjects, saved: State, accepted: Collection[str] = ()) -> list[str]:
            own = getattr(State.of(live), self.component)
            return restore(live, replace(saved, **{self.component: own}), accepted)

        resume.restore_state = forgetful
        if self.component == "auto_choices":
            # It is used before anything is restored.
            FoundCheckpoint.auto_choices_for = lambda found, recipe: None  # type: ignore[method-assign]


MUTANTS = {f"M31-{component}": Forgotten(component) for component in COMPONENTS}
