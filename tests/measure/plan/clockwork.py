"""Arms with clockwork times and losses, on a clock that only they move: plans that take no time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.measure.plan.page import Plan
from halfstep.measure.plan.plan import run_plan_search
from halfstep.measure.plan.race import MemoryFit, Race, TimeBudget
from halfstep.measure.plan.search import CaseFacts, PlanSearch
from halfstep.measure.plan.trials import SettingTrials
from halfstep.measure.setting import StepSetting
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow
from halfstep.precision.hardware import Device

AMX = Device(kind="cpu", name="a CPU with AMX", place="cpu", isa=frozenset({"amx_bf16"}))
PLAIN_CPU = Device(kind="cpu", name="a CPU", place="cpu")
A100 = Device(kind="cuda", name="A100", capability=(8, 0), place="cpu")


def key(setting: StepSetting) -> str:
    """How a test names a cell: `bf16 last compiled 2x8`."""
    words = [setting.precision, *(["last"] * setting.channels_last), *(["compiled"] * setting.compile)]
    return " ".join([*words, *([f"{setting.microbatches}x{setting.batch}"] if setting.microbatches > 1 else [])])


@dataclass
class World:
    """What every setting does, and what has been done so far."""

    seconds: Mapping[str, float]
    """Of one update; settings that are not here take two seconds."""
    noise: float = 0.0
    compile_seconds: float = 20.0
    fails: Mapping[str, str] = field(default_factory=dict)
    fails_after: Mapping[str, int] = field(default_factory=dict)
    """Calls that an arm answers before it cannot go on."""
    losses: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    nudged: Callable[[int, int], float] | None = None
    """Losses of fp32 with other weights to begin with, by the number of the update and a seed."""
    interrupt_at: int | None = None
    """The number of the call that Ctrl-C comes in."""
    clock: float = 0.0
    calls: int = 0
    open_now: int = 0
    most_open: int = 0
    opened: list[str] = field(default_factory=list)

    def passes(self, seconds: float) -> None:
        self.clock += seconds
        self.calls += 1
        if self.calls == self.interrupt_at:
            raise KeyboardInterrupt


class Clockwork:
    """An arm that takes exactly as long as it is told, without taking it."""

    def __init__(self, world: World, setting: StepSetting) -> None:
        self.world, self.setting, self.name = world, setting, key(setting)
        self.steps = self.turns = 0
        self.seed, self.is_open = 0, False

    def open(self, limit: float | None = None) -> dict[str, Any]:
        self.is_open = True
        self.world.opened.append(self.name)
        self.world.open_now += 1
        self.world.most_open = max(self.world.most_open, self.world.open_now)
        self.world.passes(5.0)
        return {"conditions": {"device": "clockwork"}, "samples": 16}

    def seconds(self, steps: int = 1, limit: float | None = None) -> float:
        if self.name in self.world.fails:
            why = self.world.fails[self.name]
            raise CandidateFailed(why, out_of_memory="OutOfMemoryError" in why)
        if self.turns == self.world.fails_after.get(self.name):
            raise CandidateFailed(f"ValueError: call {self.turns + 1}")
        took = self.world.seconds.get(self.name, 2.0)
        whole = steps * took + (self.world.compile_seconds if self.setting.compile and not self.steps else 0.0)
        if limit is not None and whole > limit:
            self.world.passes(limit)
            raise CandidateTooSlow(f"no answer within {limit} s")
        self.world.passes(whole)
        self.steps += steps
        self.turns += 1
        shaken = 1 + self.world.noise * math.sin(7.0 * self.turns + len(self.name))
        return took * shaken if self.name != "fp32" else took

    def _loss(self, number: int) -> float:
        if self.seed and self.world.nudged is not None:
            return self.world.nudged(number, self.seed)
        return self.world.losses.get(self.name, falling)(number)

    def trail(self, steps: int) -> list[float]:
        return [self._loss(number) for number in range(min(self.steps, steps))]

    def losses(self, steps: int, limit: float | None = None) -> list[float]:
        begin, self.steps = self.steps, self.steps + steps
        self.world.passes(steps * self.world.seconds.get(self.name, 2.0))
        return [self._loss(number) for number in range(begin, self.steps)]

    def graphs(self) -> int:
        return 1 if self.setting.compile else 0

    def nudge(self, share: float, seed: int = 1) -> None:
        self.seed = seed

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.world.open_now -= 1


def falling(number: int) -> float:
    return 2.0 * 0.9**number


def planned(
    world: World,
    *,
    seconds: float = 1000.0,
    device: Device = AMX,
    batch: int = 16,
    microbatches: int = 1,
    has_images: bool = True,
    has_batch_norm: bool = False,
    room: MemoryFit | None = None,
    optimizer: str = "AdamW",
    grow_batch: bool = False,
    recompute: bool = False,
    channels_last: bool = False,
    fp8_layers: int = 0,
) -> Plan:
    """A plan of clockwork arms."""
    now = StepSetting("auto", channels_last, batch=batch, microbatches=microbatches, recompute=recompute)
    facts = CaseFacts("clockwork", now, has_images, has_batch_norm, optimizer, 0.1, fp8_layers)
    budget = TimeBudget(seconds, now=lambda: world.clock)
    runner = Race(lambda setting: Clockwork(world, setting), budget)
    search = PlanSearch(facts, device, SettingTrials(runner, budget, room or MemoryFit(None)))
    found = run_plan_search(search, "clockwork", grow_batch=grow_batch)
    assert world.open_now == 0, "an arm was left open"
    return found


def cell(plan: Plan, name: str) -> Any:
    """The cell that a test names."""
    return next(cell for cell in plan.ladder if key(cell.setting) == name)
