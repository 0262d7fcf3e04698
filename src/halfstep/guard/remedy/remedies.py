"""What was done to a run so that it could go on: recorded, undone again, and placed anew when the run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn

from halfstep.guard.remedy.compiled_calls import drop_compiled_calls
from halfstep.precision.island import island

RemedyKind = Literal["island", "precision", "eager"]


@dataclass(frozen=True)
class Remedy:
    """One change that made a failed step finite."""

    kind: RemedyKind
    target: str
    """The path of an island, or the name of a precision; empty for eager."""
    culprit: str
    """What it was placed for."""
    step: int
    """Updates that had been applied when it was placed."""
    before: str = ""
    """The precision that another one replaced."""
    for_good: bool = False
    """It was lifted once, and the same trouble came back."""

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        return {"remedy": facts.pop("kind"), **facts}

    def __str__(self) -> str:
        if self.kind == "island":
            return f"{self.target or 'the model'} computes in fp32"
        return f"the run computes in {self.target}" if self.kind == "precision" else "compiled code is not used"


@dataclass
class Remedies:
    """Those in place, the newest last."""

    placed: list[Remedy] = field(default_factory=list)
    lifted: list[str] = field(default_factory=list)
    """Culprits whose remedy was lifted after a time without trouble."""

    @property
    def islands(self) -> list[str]:
        return [remedy.target for remedy in self.placed if remedy.kind == "island"]

    @property
    def precision(self) -> str | None:
        """In place of the one that was asked for; None where that is still right."""
        return next((remedy.target for remedy in reversed(self.placed) if remedy.kind == "precision"), None)

    @property
    def eager(self) -> bool:
        return any(remedy.kind == "eager" for remedy in self.placed)

    def apply_to(self, model: nn.Module) -> None:
        """For a run that is resumed, before its Stepper is built; the precision is for whoever builds that."""
        for path in self.islands:
            island(model, path) if path else island(model)
        if self.eager:
            drop_compiled_calls(model)

    def newest_on_probation(self) -> Remedy | None:
        return next((remedy for remedy in reversed(self.placed) if not remedy.for_good), None)

    def as_dict(self) -> dict[str, Any]:
        return {"placed": [asdict(remedy) for remedy in self.placed], "lifted": list(self.lifted)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Remedies:
        return cls([Remedy(**remedy) for remedy in plain["placed"]], [str(culprit) for culprit in plain["lifted"]])
