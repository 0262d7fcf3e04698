"""Check which precision really runs: the first step is observed, and not applied if it is the wrong one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from halfstep.finding import Finding
from halfstep.formats import FP32
from halfstep.observe.flops import computed_in, flops, guessed, has_no_narrow_kernel, is_unknown
from halfstep.observe.lint.functions import OwnFunctions
from halfstep.observe.lint.listener import placed
from halfstep.observe.observation import SHARE_REQUIRED as SHARE_REQUIRED
from halfstep.observe.observation import Observation, changed, doubtful, not_observed
from halfstep.observe.recorder import BeforeWrite, Operation, Recorder, uses_compiled
from halfstep.precision.island import islands
from halfstep.precision.precision import Precision

# -- tally ------------------------------------------------------------------------------------------------------------
# Add up the work of a step by format.


_FP8 = "fp8"


class WorkByFormat:
    """A listener that adds up work by format, and separates what islands do, including islands beside the model."""

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

    def __call__(self, operation: Operation) -> None:
        self.backward_seen |= operation.backward
        work = flops(operation)
        if operation.islands:
            self._in_islands += work
            for island in operation.islands:
                self._idle.pop(id(island), None)
        elif work:
            self._count(operation, work, computed_in(operation))
        elif is_unknown(operation):
            self._guess(operation)

    def observation(self) -> Observation:
        """Return what was observed so far."""
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
        if found.startswith((_FP8, "float8_")):
            self._fp8[found] += work
            return
        self._flops[found] += work
        if found != self.expected:
            self._strays[f"{operation.module or '(the model itself)'} [{found}]"] += work

    def _guess(self, operation: Operation) -> None:
        work, found = guessed(operation)
        if operation.widened and found == FP32.name:
            return
        place = operation.module or "the model itself"
        self._unknown[f"{operation.function._overloadpacket} in {place} [{found}]"] += work
        if found == self.expected:
            self._unknown_as_expected += work


def _frozen(module: nn.Module) -> bool:
    """Return whether all parameters are frozen: such a module may be idle, like an autoencoder with cached latents."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


# -- looks ------------------------------------------------------------------------------------------------------------
# Decide when to observe again: after changes, and occasionally where it costs almost nothing.


_FIRST, _FACTOR = 1000, 10


def may_look_again(model: nn.Module) -> bool:
    """Return whether the model may be observed: never if anything was compiled, because an observed step is eager."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
    return not compiled and not uses_compiled(model)


class LookSchedule:
    """The updates at which to observe again: the thousandth, and then ten times as many each time.

    An observed step costs as much as a few steps, so that over any run the cost stays below a thousandth.
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


# -- watch ------------------------------------------------------------------------------------------------------------


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
        tell: Callable[[Sequence[Finding]], None],
        before_write: BeforeWrite | None = None,
    ) -> None:
        """Observe a step inside `inner`; `done` gets `inner` and the observation, `tell` gets findings.

        `before_write` is called with the tensors that an operation is about to write into.
        """
        self._inner, self._model, self._precision, self._done = inner, model, precision, done
        self._tell, self._before_write = tell, before_write
        self._own_functions = OwnFunctions(self._maker, self._spotted)
        self._recording: tuple[WorkByFormat, Recorder] | None = None
        self._active = ExitStack()

    def __enter__(self) -> None:
        if self._recording is None:
            # One recorder for the whole step: in backward it needs what it saw in forward.
            tally = WorkByFormat(self._model, self._precision.computes.name)
            self._recording = tally, Recorder(self._model, tally, before_write=self._before_write)
        with ExitStack() as entering:
            entering.enter_context(self._inner)
            # Nothing can be compiled before Dynamo is imported, and importing it takes a second.
            if "torch._dynamo" in sys.modules:
                entering.enter_context(torch.compiler.set_stance("force_eager"))
            entering.enter_context(self._recording[1])
            if self._precision.casts:
                entering.enter_context(self._own_functions)
            # Only if all of them were entered: an error in between closes those that were.
            self._active = entering.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._active.close()
        assert self._recording is not None, "left before it was entered"
        tally, _ = self._recording
        failed = error[0] is not None
        # In the context form forward and backward enter this scope separately.
        if not failed and not tally.backward_seen:
            return
        self._recording = None
        if failed:
            return
        observation = tally.observation()
        if not observation.as_asked:
            self._refuse(observation)
        elif observation.in_doubt:
            self._tell([doubtful(self._precision.name, observation)])
        self._done(self._inner, observation)

    def _refuse(self, observation: Observation) -> None:
        raise not_observed(self._precision.name, observation)

    def _maker(self, node: Any) -> str:
        assert self._recording is not None, "backward is asked for while it is watched"
        return self._recording[1].maker(node)

    def _spotted(self, finding: Finding, module: str, line: str | None) -> None:
        """Report a finding at once, because the backward that follows may end the step."""
        self._tell([placed(finding, module, line)])


class LookAgain(Watch):
    """A repeated observation of a running run: findings are reported, and nothing is refused."""

    def _refuse(self, observation: Observation) -> None:
        self._tell([changed(self._precision.name, observation)])
