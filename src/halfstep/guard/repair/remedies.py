"""Place remedies on a run, record them, lift them, and place them again on a resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import nn

from halfstep.errors import HalfstepError
from halfstep.guard.verdict import Culprit, ProposedRemedy, Verdict
from halfstep.precision.island import find_islands, island, remove_island
from halfstep.step.stepper import Stepper

RemedyKind = Literal["island", "precision", "eager"]


@dataclass(frozen=True)
class Remedy:
    """One change that made a failed step finite."""

    kind: RemedyKind
    target: str
    """The path of an island, or the name of a precision; empty for eager."""
    culprit: str
    """The origin of the failure that it was placed for."""
    step: int
    """The number of applied updates when it was placed."""
    before: str = ""
    """The precision that it replaced."""
    for_good: bool = False
    """Whether it was lifted once and the same failure came back; such a remedy is not lifted again."""

    def facts(self) -> dict[str, object]:
        """Return the remedy as the facts of an event."""
        facts = asdict(self)
        return {"remedy": facts.pop("kind"), **facts}

    def __str__(self) -> str:
        if self.kind == "island":
            return f"{self.target or 'the model'} computes in fp32"
        return f"the run computes in {self.target}" if self.kind == "precision" else "compiled code is not used"


@dataclass
class Remedies:
    """The remedies in place, the newest last."""

    placed: list[Remedy] = field(default_factory=list)
    lifted: list[str] = field(default_factory=list)
    """The origins whose remedy was lifted after a time without failures."""

    @property
    def islands(self) -> list[str]:
        return [remedy.target for remedy in self.placed if remedy.kind == "island"]

    @property
    def precision(self) -> str | None:
        """Return the precision that replaces the requested one, or None."""
        return next((remedy.target for remedy in reversed(self.placed) if remedy.kind == "precision"), None)

    @property
    def eager(self) -> bool:
        return any(remedy.kind == "eager" for remedy in self.placed)

    def apply_to(self, model: nn.Module) -> None:
        """Place the islands and drop compiled calls on a resumed run's model, before its Stepper is built.

        The caller builds the Stepper with `precision`.
        """
        for path in self.islands:
            _place_island(model, path)
        if self.eager:
            drop_compiled_calls(model)

    def as_dict(self) -> dict[str, object]:
        """Return the remedies as plain data."""
        return {"placed": [asdict(remedy) for remedy in self.placed], "lifted": list(self.lifted)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Remedies:
        """Return the remedies from `as_dict()`."""
        return cls([Remedy(**remedy) for remedy in plain["placed"]], [str(culprit) for culprit in plain["lifted"]])


def drop_compiled_calls(model: nn.Module) -> Callable[[], None]:
    """Make every module run eagerly; return a function that undoes that."""
    undo: list[Callable[[], None]] = []
    # Not imported here: that is slow, and as long as Dynamo is not loaded no module can be compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    for module in list(model.modules()):
        # torch.compile leaves its traces in three places: module.compile() sets this attribute, torch.compile(model)
        # returns a wrapper, and module.forward = torch.compile(module.forward) replaces the method.
        if module._compiled_call_impl is not None:
            undo.append(_build_setter(module, "_compiled_call_impl", module._compiled_call_impl))
            module._compiled_call_impl = None
        elif dynamo is not None and isinstance(module, dynamo.OptimizedModule):
            wrapper: Any = module
            undo.append(_build_setter(module, "forward", wrapper.forward))
            wrapper.forward = wrapper._orig_mod.__call__
        elif (plain := getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)) is not None:
            undo.append(_build_setter(module, "forward", module.forward))
            module.forward = plain  # type: ignore[method-assign]

    def restore() -> None:
        for put_back in undo:
            put_back()

    return restore


def _build_setter(module: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


class RemedyApplier:
    """The changes to a run between two steps, the smallest first."""

    def __init__(self, stepper: Stepper, most_islands: int) -> None:
        self._stepper, self._most = stepper, most_islands
        self.remedies = Remedies()
        self._recompile: Callable[[], None] | None = None

    def apply_first(self, verdict: Verdict) -> Remedy | None:
        """Place the first remedy that was tried and works, and return it; None if there is none."""
        for proposed in verdict.remedies:
            remedy = self._remedy(proposed, build_origin_key(verdict)) if proposed.works else None
            if remedy is not None and self._placed(remedy):
                self.remedies.placed.append(remedy)
                return remedy
        return None

    def lift_newest(self) -> Remedy | None:
        """Lift the newest remedy on probation and return it; None if there is none."""
        remedy = next((remedy for remedy in reversed(self.remedies.placed) if not remedy.for_good), None)
        if remedy is None:
            return None
        self._lift(remedy)
        self.remedies.lifted.append(remedy.culprit)
        return remedy

    def resume(self, remedies: Remedies) -> None:
        """Replace the current remedies with those of a saved run; what the caller has already placed stays."""
        for remedy in reversed(self.remedies.placed.copy()):
            if remedy not in remedies.placed:
                self._lift(remedy)
        self.remedies = remedies
        model = self._stepper.model
        for path in remedies.islands:
            if path not in find_islands(model):
                _place_island(model, path)
        self._compute_in(remedies.precision)
        if remedies.eager and self._recompile is None:
            self._recompile = drop_compiled_calls(model)

    def _lift(self, remedy: Remedy) -> None:
        placed = self.remedies.placed
        at = placed.index(remedy)
        del placed[at]
        if remedy.kind == "island":
            remove_island(self._stepper.model, remedy.target)
        elif remedy.kind == "precision":
            self._leave_out(remedy, at)
            self._compute_in(self.remedies.precision or remedy.before)
        elif self._recompile is not None:
            self._recompile()
            self._recompile = None

    def _leave_out(self, remedy: Remedy, at: int) -> None:
        """Let a newer change of precision go back to what the lifted one had replaced."""
        placed = self.remedies.placed
        newer = next((i for i in range(at, len(placed)) if placed[i].kind == "precision"), None)
        if newer is not None:
            placed[newer] = replace(placed[newer], before=remedy.before)

    def _compute_in(self, name: str | None) -> None:
        """Change the precision unless it is the current one."""
        # A change would restart the loss scale.
        if name not in (None, self._stepper.precision.name):
            self._stepper.change_precision(name or "")

    def _remedy(self, proposed: ProposedRemedy, culprit: str) -> Remedy | None:
        """Return the remedy to place, or None if it is already in place or not allowed."""
        # The same remedy twice would not help, and the run would never end. If it was lifted before, it now stays for
        # good.
        step, for_good = self._stepper.counts.applied, culprit in self.remedies.lifted
        if proposed.kind == "island" and len(self.remedies.islands) < self._most:
            there = proposed.target in find_islands(self._stepper.model)
            return None if there else Remedy("island", proposed.target, culprit, step, for_good=for_good)
        if proposed.kind == "precision" and proposed.target != self._stepper.precision.name:
            return Remedy("precision", proposed.target, culprit, step, self._stepper.precision.name, for_good)
        if proposed.kind == "eager" and not self.remedies.eager:
            return Remedy("eager", "", culprit, step, for_good=for_good)
        return None

    def _placed(self, remedy: Remedy) -> bool:
        """Place a remedy and return whether that was possible.

        A module that holds compiled code cannot become an island.
        """
        try:
            if remedy.kind == "island":
                _place_island(self._stepper.model, remedy.target)
            elif remedy.kind == "precision":
                self._stepper.change_precision(remedy.target)
            else:
                self._recompile = drop_compiled_calls(self._stepper.model)
        except HalfstepError:
            return False
        return True


def _place_island(model: nn.Module, path: str) -> None:
    island(model, *filter(None, [path]))  # the empty path is the model itself


def build_origin_key(verdict: Verdict) -> str:
    """Return a key for the origin of a failure, to recognize it when it comes back."""
    found: Culprit | None = verdict.culprit
    return verdict.cause if found is None else f"{found.module or 'the model'} {found.operation or found.outside}"
