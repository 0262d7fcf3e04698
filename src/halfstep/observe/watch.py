"""Which precision really ran: watched on the first step, which is not applied if it is the wrong one, then gone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep.errors import PrecisionNotObserved
from halfstep.finding import Finding
from halfstep.observe.flops import computed_in, flops
from halfstep.observe.lint.functions import OwnFunctions
from halfstep.observe.lint.listener import placed
from halfstep.observe.recorder import OUTSIDE, Operation, Recorder
from halfstep.precision.island import islands
from halfstep.precision.precision import Precision

SHARE_REQUIRED = 0.9
"""Of the work outside islands; the rest is what autocast leaves alone on purpose."""


@dataclass(frozen=True)
class Observation:
    """The work of one step by the format it was done in."""

    expected: str
    flops: Mapping[str, int]
    """Matrix products and convolutions outside islands, forward and backward."""
    island_flops: int
    strays: Mapping[str, int]
    """Work done in another format than expected, by module, most first."""
    idle_islands: tuple[str, ...] = ()
    """Islands in which nothing ran: their weights may be used without calling them, which protects nothing."""

    @property
    def share(self) -> float | None:
        """Of the work that was to be in the expected format, the part that was; None where there was none to see."""
        total = sum(self.flops.values())
        return self.flops.get(self.expected, 0) / total if total else None

    @property
    def as_asked(self) -> bool:
        return self.share is None or self.share >= SHARE_REQUIRED

    def __str__(self) -> str:
        if self.share is None:
            return f"{self.expected}: no matrix product or convolution was seen"
        islands = f", {self.island_flops:.3g} FLOPs in islands" if self.island_flops else ""
        return f"{self.expected}: {self.share:.1%} of {sum(self.flops.values()):.3g} FLOPs{islands}"


class Tally:
    """A listener that adds up work by format, and sets islands aside."""

    def __init__(self, model: nn.Module, expected: str) -> None:
        self.expected = expected
        self._islands = tuple(islands(model))
        self._flops: Counter[str] = Counter()
        self._strays: Counter[str] = Counter()
        self._in_islands = 0
        self._idle = {path for path in self._islands if not _frozen(model.get_submodule(path))}
        self.backward_seen = False

    def __call__(self, operation: Operation) -> None:
        work = flops(operation)
        self.backward_seen |= operation.backward
        island = self._island_of(operation.module)
        if island is not None:
            self._idle.discard(island)
            self._in_islands += work
        elif work:
            found = computed_in(operation)
            if operation.widened and found == "fp32":
                return
            self._flops[found] += work
            if found != self.expected:
                self._strays[f"{operation.module or '(the model itself)'} [{found}]"] += work

    def observation(self) -> Observation:
        strays, idle = dict(self._strays.most_common()), tuple(sorted(self._idle))
        return Observation(self.expected, dict(self._flops), self._in_islands, strays, idle)

    def _island_of(self, module: str) -> str | None:
        for path in self._islands:
            if module == path or module.startswith(f"{path}.") or (not path and module != OUTSIDE):
                return path
        return None


def _frozen(module: nn.Module) -> bool:
    """Such a module may well rest in a step, as an autoencoder does whose latents were computed before."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


class Watch:
    """Stands in for a step's scope until one step has been observed, then hands the scope back.

    A dispatch mode on a compiled function's first call would switch its compilation off for good, without a word. So
    the step that is watched runs eagerly, and compiling begins with the next one; autocast chooses formats by the
    same rules when code is traced as when it is run.
    """

    def __init__(
        self,
        inner: AbstractContextManager[object],
        model: nn.Module,
        precision: Precision,
        *,
        done: Callable[[AbstractContextManager[object], Observation], None],
        tell: Callable[[Sequence[Finding]], None],
    ) -> None:
        self._inner, self._model, self._precision, self._done = inner, model, precision, done
        self._tell = tell
        self._own_functions = OwnFunctions(self._maker, self._spotted)
        self._recording: tuple[Tally, Recorder] | None = None
        self._active = ExitStack()

    def __enter__(self) -> None:
        if self._recording is None:
            # One recorder for a whole step: in backward it must know what it saw in forward.
            tally = Tally(self._model, self._precision.computes.name)
            self._recording = tally, Recorder(self._model, tally)
        with ExitStack() as entering:
            entering.enter_context(self._inner)
            # Nothing can be compiled before Dynamo is loaded, and loading it takes a second.
            if "torch._dynamo" in sys.modules:
                entering.enter_context(torch.compiler.set_stance("force_eager"))
            entering.enter_context(self._recording[1])
            if self._precision.casts:
                entering.enter_context(self._own_functions)
            self._active = entering.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._active.close()
        assert self._recording is not None, "left before it was entered"
        tally, _ = self._recording
        failed = error[0] is not None
        if not failed and not tally.backward_seen:
            return
        self._recording = None
        if failed:
            return
        observation = tally.observation()
        if not observation.as_asked:
            raise _not_observed(self._precision, observation)
        self._done(self._inner, observation)

    def _maker(self, node: Any) -> str:
        assert self._recording is not None, "backward is asked for while it is watched"
        return self._recording[1].maker(node)

    def _spotted(self, finding: Finding, module: str, line: str | None) -> None:
        """Told at once, because the backward that is about to run may end the step."""
        self._tell([placed(finding, module, line)])


def _not_observed(precision: Precision, observation: Observation) -> PrecisionNotObserved:
    work = ", ".join(f"{name} {part / sum(observation.flops.values()):.1%}" for name, part in observation.flops.items())
    return PrecisionNotObserved(
        f"{precision.name} was asked for, but matrix products and convolutions ran in {work}: "
        + ", ".join(list(observation.strays)[:5]),
        allowed=f"{SHARE_REQUIRED:.0%} of the work outside islands in {observation.expected}",
        do="take out what casts or switches autocast off there, declare it with island(), or ask for another precision",
    )
