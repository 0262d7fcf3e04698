"""Check which precision really runs: the first step is observed, and not applied if it is the wrong one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from halfstep.errors import PrecisionNotObserved
from halfstep.finding import Finding
from halfstep.formats import BF16, FP16, FP32, FP64
from halfstep.numbers import share
from halfstep.observe.flops import StepWork, computed_in, guessed, has_no_narrow_kernel
from halfstep.observe.lint.functions import OwnFunctions
from halfstep.observe.lint.listener import placed
from halfstep.observe.recorder import MemoryListener, Operation, Recorder, eagerly, uses_compiled
from halfstep.precision.conversion import converted_layers
from halfstep.precision.island import islands
from halfstep.precision.precision import Precision

SHARE_REQUIRED = 0.9
"""The share of the work outside islands; the rest is what autocast leaves in fp32 on purpose."""
DOUBT = 10
"""The estimate for an operation without a formula may be too small by this factor."""
_NAMED = 5


@dataclass(frozen=True)
class Observation:
    """The work of one step by the format it was done in."""

    expected: str
    flops: Mapping[str, int]
    """Matrix products, convolutions and recurrent layers outside islands, forward and backward."""
    island_flops: int
    strays: Mapping[str, int]
    """Work done in another format than expected, by module, most first."""
    idle_islands: tuple[str, ...] = ()
    """Islands in which nothing ran: their weights may be used without calling them, which protects nothing."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Operations without a formula, by name, module and format, with estimated work, most first."""
    unknown_as_expected: int = 0
    """The part of it whose inputs were in the expected format."""
    fp8: Mapping[str, int] = field(default_factory=dict)
    """Work that the model itself requested in fp8, which autocast never does. It is not in `flops`."""

    @property
    def share(self) -> float | None:
        """The share of the counted work that was in the expected format; None if there was none."""
        total = sum(self.flops.values())
        return self.flops.get(self.expected, 0) / total if total else None

    @property
    def confidence(self) -> float:
        """The share of all work that is known, with estimates for unknown operations."""
        known = sum(self.flops.values()) + sum(self.fp8.values()) + self.island_flops
        total = known + sum(self.unknown.values())
        return known / total if total else 1.0

    @property
    def as_asked(self) -> bool:
        """Whether the precision is acceptable; False only if no format of the unknown work could change that."""
        # A wrong refusal stops a good run, so unknown work counts in favor of the step, ten times over.
        unseen = DOUBT * sum(self.unknown.values())
        total = sum(self.flops.values())
        return not total or (self.flops.get(self.expected, 0) + unseen) / (total + unseen) >= SHARE_REQUIRED

    @property
    def in_doubt(self) -> bool:
        """Whether the unknown work decides: without it the step would be refused, or it had another format."""
        if not self.unknown or not self.as_asked:
            return False
        total = sum(self.flops.values()) + sum(self.unknown.values())
        likely = (self.flops.get(self.expected, 0) + self.unknown_as_expected) / total if total else 1.0
        return min(likely, 1.0 if self.share is None else self.share) < SHARE_REQUIRED

    def __str__(self) -> str:
        islands = f", {self.island_flops:.3g} FLOPs in islands" if self.island_flops else ""
        fp8 = "".join(f", {work:.3g} FLOPs in {name}" for name, work in self.fp8.items())
        doubt = f", {share(self.confidence)} of the work known" if self.unknown else ""
        if self.share is None:
            other = "other " if self.fp8 else ""
            return f"{self.expected}: no {other}matrix product or convolution was seen{islands}{fp8}{doubt}"
        return f"{self.expected}: {share(self.share)} of {sum(self.flops.values()):.3g} FLOPs{islands}{fp8}{doubt}"


def not_observed(asked: str, seen: Observation) -> PrecisionNotObserved:
    """Return the error for a step that ran in another precision than requested."""
    if seen.as_asked:
        return PrecisionNotObserved(
            f"{asked} was asked for, but no product ran in fp8: no layer that was converted ran",
            allowed="converted layers that are called, not only read by their weight",
            do="precision='bf16', or a policy that names the layers which run",
        )
    most = max(seen.flops, key=lambda name: seen.flops[name])
    remedy = "remove what casts or switches autocast off there, declare it with island(), or ask for another precision"
    if most == FP64.name:
        remedy = "precision='fp64' for a model in float64, or model.float() and batches in float32"
    elif seen.expected == FP32.name and most in (BF16.name, FP16.name):
        remedy = f"precision={most!r} for a base stored in {most}, or model.float()"
    return PrecisionNotObserved(
        f"{asked} was asked for, but matrix products and convolutions ran in {_by_format(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        allowed=f"{SHARE_REQUIRED:.0%} of the work outside islands in {seen.expected}",
        do=remedy,
    )


def changed(asked: str, seen: Observation) -> Finding:
    """Return the finding for a running run whose precision changed; it does not end the run."""
    return Finding(
        "precision.changed",
        "warning",
        f"{asked} was asked for, but now matrix products and convolutions run in {_by_format(seen)}: "
        + ", ".join(list(seen.strays)[:_NAMED]),
        "take out what casts or switches autocast off there, or declare it with island()",
    )


def doubtful(asked: str, seen: Observation) -> Finding:
    """Return the finding for a step whose precision can be neither refused nor confirmed."""
    known = "nothing else was seen" if seen.share is None else f"of the rest {share(seen.share)} ran in {seen.expected}"
    return Finding(
        "precision.unknown",
        "warning",
        f"whether this ran in {asked} is not known: no rule counts the work of "
        f"{', '.join(list(seen.unknown)[:_NAMED])}; {known}",
        "look at the dtypes that these are given, or declare what stays in fp32 with island()",
    )


def _by_format(seen: Observation) -> str:
    total = sum(seen.flops.values())
    return ", ".join(f"{name} {share(part / total)}" for name, part in seen.flops.items())


def is_fp8(name: str) -> bool:
    """Return whether a format of counted work is an 8-bit one."""
    return name.startswith(("fp8", "mxfp8", "float8_"))


class WorkByFormat:
    """A listener that adds up work by format and counts islands separately, including those outside the model."""

    def __init__(self, model: nn.Module, expected: str) -> None:
        self.expected = expected
        self._flops: Counter[str] = Counter()
        self._strays: Counter[str] = Counter()
        self._fp8: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._unknown_as_expected = 0
        self._in_islands = 0
        self._idle = {id(module): path for path, module in islands(model).items() if not _frozen(module)}
        self.backward_seen = False
        self._work = StepWork()

    def __call__(self, operation: Operation) -> None:
        self.backward_seen |= operation.backward
        work = self._work.of(operation)
        if operation.islands:
            self._in_islands += work.flops if work else 0
            for island in operation.islands:
                self._idle.pop(id(island), None)
        elif work and work.flops and not work.is_wide:
            self._count(operation, work.flops, computed_in(operation))
        elif work:
            self._guess(operation, "; torch has nothing narrower" if work.is_wide else "")

    def observation(self) -> Observation:
        """Return the observations so far."""
        return Observation(
            self.expected,
            dict(self._flops),
            self._in_islands,
            dict(self._strays.most_common()),
            tuple(sorted(self._idle.values())),
            dict(self._unknown.most_common()),
            self._unknown_as_expected,
            dict(self._fp8),
        )

    def _count(self, operation: Operation, work: int, found: str) -> None:
        # Not the model's choice: torch itself has no narrower kernel for these.
        if found == FP32.name and (operation.widened or has_no_narrow_kernel(operation)):
            return
        # autocast never casts to fp8, so the model has asked for it by name.
        if is_fp8(found):
            self._fp8[found] += work
            return
        self._flops[found] += work
        if found != self.expected:
            self._strays[f"{operation.module or '(the model itself)'} [{found}]"] += work

    def _guess(self, operation: Operation, note: str) -> None:
        work, found = guessed(operation)
        if operation.widened and found == FP32.name:
            return
        place = operation.module or "the model itself"
        self._unknown[f"{operation.function._overloadpacket} in {place} [{found}{note}]"] += work
        if found == self.expected:
            self._unknown_as_expected += work


def _frozen(module: nn.Module) -> bool:
    """Return whether all parameters are frozen: such a module may be idle, like an autoencoder with cached latents."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


_FIRST, _FACTOR = 10, 10


def may_look_again(model: nn.Module) -> bool:
    """Return whether the model may be observed: never if anything was compiled, because an observed step is eager."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
    return not compiled and not uses_compiled(model)


class LookSchedule:
    """The updates at which to observe again: the tenth, and then ten times as many each time.

    An observed step costs as much as a few steps, so that its share of a long run vanishes.
    """

    def __init__(self) -> None:
        self._next = _FIRST

    def due(self, applied: int) -> bool:
        """Return True once for each of them, however often a step is repeated."""
        if applied < self._next:
            return False
        while self._next <= applied:
            self._next *= _FACTOR
        return True


class Watch:
    """A step's scope that observes one step and then hands the original scope back.

    A dispatch mode on a compiled function's first call would disable its compilation permanently and silently. So the
    observed step runs eagerly, and compilation starts with the next one; autocast chooses formats by the same rules in
    traced and in eager code.
    """

    def __init__(
        self,
        inner: AbstractContextManager[object],
        model: nn.Module,
        precision: Precision,
        *,
        done: Callable[[AbstractContextManager[object], Observation], None],
        emit: Callable[[Sequence[Finding]], None],
        memory: MemoryListener | None = None,
    ) -> None:
        """Observe a step inside `inner`; `done` gets `inner` and the observation, `emit` gets findings.

        `memory` learns which memory from before the step is used.
        """
        self._inner, self._model, self._precision, self._done = inner, model, precision, done
        self._emit, self._memory = emit, memory
        self._own_functions = OwnFunctions(self._maker, self._spotted)
        self._recording: tuple[WorkByFormat, Recorder] | None = None
        self._active = ExitStack()

    def __enter__(self) -> None:
        if self._recording is None:
            # One recorder for the whole step: in backward it needs what it saw in forward.
            tally = WorkByFormat(self._model, self._precision.computes.name)
            self._recording = tally, Recorder(self._model, tally, memory=self._memory)
        with ExitStack() as entering:
            entering.enter_context(self._inner)
            entering.enter_context(eagerly())
            entering.enter_context(self._recording[1])
            if self._precision.casts:
                entering.enter_context(self._own_functions)
            # Only if all of them were entered: an error in between closes those that were.
            self._active = entering.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._active.close()

    def begin(self) -> None:
        """Discard the recording of an unfinished step."""
        self._recording = None

    def judge(self) -> None:
        """Conclude the observation, after the last backward; raise PrecisionNotObserved if another precision ran."""
        if self._recording is None or not self._recording[0].backward_seen:
            return
        (tally, _), self._recording = self._recording, None
        observation = tally.observation()
        converted = self._precision.changes_model
        if not observation.as_asked or (converted and not observation.fp8 and converted_layers(self._model)):
            self._refuse(observation)
        elif observation.in_doubt:
            self._emit([doubtful(self._precision.name, observation)])
        self._done(self._inner, observation)

    def _refuse(self, observation: Observation) -> None:
        raise not_observed(self._precision.name, observation)

    def _maker(self, node: Any) -> str:
        assert self._recording is not None, "backward is asked for while it is watched"
        return self._recording[1].maker(node)

    def _spotted(self, finding: Finding, module: str, line: str | None) -> None:
        """Report a finding at once, because the backward that follows may end the step."""
        self._emit([placed(finding, module, line)])


class LookAgain(Watch):
    """A repeated observation of a running run: findings are reported, and nothing is refused."""

    def _refuse(self, observation: Observation) -> None:
        self._emit([changed(self._precision.name, observation)])
