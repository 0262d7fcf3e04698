"""A case under examination: its step in the precision asked for and in strict fp32, and the stages of a profile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.errors import PrecisionRefused
from halfstep.measure.arm import Arm
from halfstep.measure.batches import placed as placed_batch
from halfstep.measure.batches import resized, size_of
from halfstep.measure.case import Case
from halfstep.measure.conditions import conditions
from halfstep.measure.profiling.facts import Race
from halfstep.measure.profiling.feeding import fed
from halfstep.measure.profiling.kernels import kernels_of
from halfstep.measure.profiling.layers import Looked, look, misaligned
from halfstep.measure.profiling.padding import measured
from halfstep.measure.profiling.warming import first_steps
from halfstep.measure.setting import Setting
from halfstep.measure.stopwatch import Stopwatch
from halfstep.measure.timing import race, warm
from halfstep.precision.abilities import ability
from halfstep.precision.flags import read_flags
from halfstep.precision.hardware import describe
from halfstep.precision.ladder import choose_precision
from halfstep.precision.names import AUTO, read_precision
from halfstep.precision.registry import precision_named
from halfstep.step.report import GRADIENT_OVERFLOW, LOSS_NOT_FINITE, StepReport
from halfstep.train.placing import placed
from halfstep.train.recomputing import checkpoint_activations

_STRICT = ("ieee", "none", "")
_PADDED_GROUPS = 4
_LONG_STEP = 1.0
_MOST_PAIRS, _PATIENCE = 60, 4
_LONGEST_FALL = 40
"""Steps in which a loss scale may halve before its overflows are taken for something else."""
_SWITCHES = {"cpu": ("mkldnn.matmul",), "cuda": ("cuda.matmul", "cudnn.conv")}


class Plain:
    """A step in fp32 as the person's own loop would take it: torch's switches stand as their code has set them.

    All else is as in the other arms: layout, compilation, batch.
    """

    def __init__(self, case: Case, device: torch.device, setting: Setting) -> None:
        self._model = placed(copy.deepcopy(case.model), device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self._model)
        if setting.compile:
            self._model.compile()
        self._optimizer = case.optimizer(self._model)
        batch = placed_batch(case.batch, device, setting.channels_last)
        self._batch = resized(batch, setting.batch or size_of(batch))
        self._loss_fn = case.loss_fn
        self._microbatches = setting.microbatches
        self._stopwatch = Stopwatch(device)

    def step(self) -> None:
        for _ in range(self._microbatches):
            loss = self._loss_fn(self._model, self._batch)
            (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()  # a mean, or (sum, count)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self, steps: int = 1) -> float:
        return self._stopwatch.seconds(self.step, steps)


class Examined:
    """Built once, then asked stage by stage; each stage answers with facts, as plain data."""

    def __init__(self, case: Case, asked: str | None = None, device: str | torch.device | None = None) -> None:
        self.case = case
        self.place = describe(device)
        self.device = torch.device(self.place.place)
        self.fp32_means = fp32_means(self.device)
        self.precision = precision_named(_resolved(case, asked, self.place.place))
        self._asked: Arm | None = None
        self._strict: Arm | None = None
        self._looked: Looked | None = None
        self.passed_over = False
        try:
            self._asked = self._arm(self.precision.name)
        except PrecisionRefused:
            self.passed_over = True

    def describe(self) -> dict[str, Any]:
        """What is known before anything is timed."""
        can = ability(self.place, self.precision.computes.name)
        formats = [name for name in ("bf16", "fp16") if ability(self.place, name).native]
        others = [name for name in formats if name != self.precision.name]
        return {
            "asked": self.precision.name,
            "format": self.precision.computes.name,
            "kind": self.place.kind,
            "native": can.native,
            "why": can.reason,
            "instead": (formats if can.native else others or ["fp32"])[0] if formats or not can.native else "fp32",
            "fp32_means": self.fp32_means,
            "passed_over": self.passed_over,
            "compiles": self.case.setting.compile,
            "samples": size_of(self.case.batch),
            "idle": "",
            "conditions": conditions(self.device),
        }

    def warming(self, seconds: float) -> dict[str, Any]:
        reports: list[StepReport] = []
        found = first_steps(lambda: reports.append(self.asked.step()), Stopwatch(self.device), seconds)
        while reports[-1].reason == GRADIENT_OVERFLOW and len(reports) < _LONGEST_FALL:
            reports.append(self.asked.step())  # the loss scale has to find its place first
        compiles = self.case.setting.compile or any(found.compiled)
        return {"warming": asdict(found), "compiles": compiles, "idle": _idle(reports[-1])}

    def race(self, seconds: float) -> dict[str, Any]:
        """Pairs enough for a claim, though they take longer than they may, but not many times as long."""
        arms: dict[str, Any] = {"fp32": self.strict, "asked": self.asked}
        if self.fp32_means not in _STRICT:
            arms["own fp32"] = Plain(self.case, self.device, self.case.setting)
        turn = sum(warm(arm, seconds=seconds / 4) for arm in arms.values())
        pairs = min(_MOST_PAIRS, max(FEWEST_FOR_INTERVAL, int(seconds / 2 / max(turn, 1e-9))))
        raced = race(arms, baseline="fp32", pairs=pairs, seconds=_PATIENCE * seconds)
        if "asked" not in raced.speeds:
            raise KeyboardInterrupt
        own = raced.speeds["own fp32"].seconds if "own fp32" in raced.speeds else None
        won = raced.speeds["asked"]
        found = Race(raced.speeds["fp32"].seconds, won.seconds, won.speedup, won.low, won.high, won.pairs, own)
        return {"race": asdict(found), "interrupted": raced.interrupted}

    def kernels(self, seconds: float) -> dict[str, Any]:
        """Of both steps; a long one is looked at once."""
        found = {}
        for name, arm in (("kernels", self.asked), ("fp32_kernels", self.strict)):
            steps = 1 if arm.seconds() > min(_LONG_STEP, seconds / 8) else 5
            found[name] = asdict(kernels_of(arm.step, self.device, steps))
        return found

    def work(self, _seconds: float) -> dict[str, Any]:
        return {"work": asdict(self.looked.work)}

    def padding(self, seconds: float) -> dict[str, Any]:
        # A layer alone is timed in the precision asked for: one that ran in fp32 cannot be compared with that.
        narrow = self.precision.computes.name not in ("fp32", "tf32")
        groups = misaligned(self.looked, without=self.looked.wide if narrow else ())[:_PADDED_GROUPS]
        each = seconds / max(1, len(groups))
        found = [measured(layers, share, self.precision, self.device, each) for layers, share in groups]
        return {"misaligned": [asdict(one) for one in found]}

    def feeding(self, seconds: float) -> dict[str, Any]:
        if self.case.data is None:
            return {}
        return {"feeding": asdict(fed(self.asked, self.case.data(), seconds))}

    @property
    def asked(self) -> Arm:
        assert self._asked is not None, "nothing is measured in a precision that was refused"
        return self._asked

    @property
    def strict(self) -> Arm:
        if self._strict is None:
            self._strict = self._asked if self.precision.name == "fp32" else self._arm("fp32")
        assert self._strict is not None
        return self._strict

    @property
    def looked(self) -> Looked:
        if self._looked is None:
            self._looked = look(self.asked.model, self.asked.step)
        return self._looked

    def _arm(self, precision: str) -> Arm:
        # Not observed: work in another format than asked is what is to be found here, not a reason to stop.
        return Arm(self.case, replace(self.case.setting, precision=precision), self.device, observe=False)


class Stage(NamedTuple):
    """A part of the examination, and the part of the time that it may take."""

    measure: Callable[[Examined, float], dict[str, Any]]
    share: float


STAGES: dict[str, Stage] = {
    "warming": Stage(Examined.warming, 0.15),
    "feeding": Stage(Examined.feeding, 0.15),
    "race": Stage(Examined.race, 0.3),
    "kernels": Stage(Examined.kernels, 0.1),
    "work": Stage(Examined.work, 0.05),
    "padding": Stage(Examined.padding, 0.25),
}


def _idle(report: StepReport) -> str:
    """Why a step did not train; empty where it did."""
    if report.applied:
        return ""
    what = (
        "the loss is not finite" if report.reason == LOSS_NOT_FINITE else f"updates are not applied ({report.reason})"
    )
    return f"{what}: times of steps that are skipped say nothing"


def fp32_means(device: torch.device) -> str:
    """How fp32 numbers are multiplied just now: `ieee`, or the faster format that torch's switches allow for it."""
    now = read_flags()
    found = [now[name] for name in _SWITCHES.get(device.type, ())]
    if device.type == "cpu":
        found.append(torch.backends.mkldnn.conv.fp32_precision)  # type: ignore[attr-defined]
    return next((word for word in found if word not in _STRICT), "ieee")


def _resolved(case: Case, asked: str | None, place: str) -> str:
    """The precision's name. Code that asks for none gets the one that suits the device: why profile fp32?"""
    wanted = asked or (AUTO if case.setting == Setting() else case.setting.precision)
    named = read_precision(wanted)
    return choose_precision(AUTO, device=place).precision.name if named.name == AUTO else named.name
