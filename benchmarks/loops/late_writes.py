"""Writes that begin in the middle of a run: after a warm-up, with a new stage, when something is switched on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    findings,
    frozen_copy,
    limit,
    loop,
    mlp,
    mse,
    named,
    pairs,
    poisoned,
    promise,
    require,
    sgd,
    skips,
    trains,
)

BATCHES = pairs(16)
LARGE = 400_000
"""Far more elements than a tensor has that is copied before every step."""


class Stage(nn.Module):
    """A model that counts its calls, and does `act` from the call `first` on."""

    def __init__(self, first: int, act: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.net, self.calls, self.first, self.act = mlp(norm=True), 0, first, act
        self.register_buffer("small", torch.zeros(4))
        self.register_buffer("large", torch.zeros(LARGE))
        self.value, self.flag = torch.zeros(4), None
        self.idle = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.net(x)
        if self.calls > self.first:
            with torch.no_grad():
                self.act(self, out.detach())
        return out + 0 * self.small


def stage_case(first: int, act: Callable[[Any, Tensor], None]) -> Callable[[], Case]:
    def build() -> Case:
        model = Stage(first, act)
        seen = Seen(lambda: {"calls": model.calls, "value": model.value, "flag": model.flag})
        return Case(model, adamw(model), mse, beside=[seen])

    return build


def write_buffer(m: Any, out: Tensor) -> None:
    m.small.lerp_(torch.ones(4), 0.1)


def write_value(m: Any, out: Tensor) -> None:
    m.value, m.flag = m.value + 1, (m.calls, "on", True)


def write_value_in_place(m: Any, out: Tensor) -> None:
    m.value.data.add_(1.0)


def write_large(m: Any, out: Tensor) -> None:
    m.large[m.calls] = 1.0


def write_idle_parameter(m: Any, out: Tensor) -> None:
    m.idle.weight.mul_(0.5)


def write_idle_parameter_through_data(m: Any, out: Tensor) -> None:
    m.idle.weight.data.mul_(0.5)


SMALL = {
    "buffer": (3, write_buffer),
    "attribute": (5, write_value),
    "attribute_through_data": (12, write_value_in_place),
}
for _name, (_first, _act) in SMALL.items():
    # The bad batch is the very step that would write first: it is restored all the same.
    _at = (0, _first, _first + 1, _first + 2)
    named(
        f"small_{_name}_from_step_{_first}_on",
        partial(promise, stage_case(_first, _act), BATCHES[: _first + 4], at=_at),
        "late_writes",
    )


def _reported(first: int, act: Callable[[Any, Tensor], None]) -> str:
    """The first write is part of an applied step: it is reported, and every later skip is undone."""
    torch.manual_seed(0)
    case = stage_case(first, act)()
    stepper = case.start()
    trains(case, BATCHES[:first])
    require("rollback.first_write" not in findings(stepper), "reported before it was written")
    wait = getattr(stepper, "steps_to_check", 1)
    trains(case, [BATCHES[i % 16] for i in range(first, first + wait)])
    require("rollback.first_write" in findings(stepper), f"not reported after {wait} steps: {findings(stepper)}")
    skips(case, poisoned(BATCHES[0]))
    trains(case, BATCHES[:1])
    skips(case, poisoned(BATCHES[0]))
    return f"reported within {wait} steps, and 2 skips after it bitwise undone"


named("large_buffer_from_step_3_on", partial(_reported, 3, write_large), "late_writes")
named("idle_parameter_from_step_5_on", partial(_reported, 5, write_idle_parameter), "late_writes")
named(
    "idle_parameter_from_step_12_on_through_data",
    partial(_reported, 12, write_idle_parameter_through_data),
    "late_writes",
)


@loop
def first_write_of_a_large_buffer_is_skipped() -> str:
    """The one case that is not restored: reported, and nothing else of the step stays."""
    torch.manual_seed(0)
    case = stage_case(3, write_large)()
    stepper = case.start()
    trains(case, BATCHES[:3])
    before = case.state()
    require(not stepper.step(mse, poisoned(BATCHES[3])).applied, "a bad batch was applied")
    after = case.state()
    moved = [k for k in before if isinstance(before[k], Tensor) and not torch.equal(before[k], after[k])]
    require(set(moved) <= {"0.large"} and case.model.calls == 3, f"moved: {moved}, calls {case.model.calls}")
    require("rollback.first_write" in findings(stepper), f"not reported: {findings(stepper)}")
    said = next(f for f in stepper.findings if f.id == "rollback.first_write")
    require("large" in str(said), f"not named: {said}")
    trains(case, BATCHES[3:5])
    skips(case, poisoned(BATCHES[3]))
    return limit("that write is not rolled back, and the finding says so", "reported by name; the next skip was undone")


class Outside:
    """Two tensors in a plain object: one that each step reads, one that no step has used yet."""

    def __init__(self) -> None:
        self.used, self.unused = torch.zeros(LARGE), torch.zeros(LARGE)


def outside_case(first: int, which: str) -> tuple[Case, Outside]:
    model, outside = mlp(norm=True), Outside()

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, m: nn.Module, b: Any) -> Tensor:
            self.calls += 1
            out = m(b[0])
            if self.calls > first:
                getattr(outside, which).add_(1.0)
            return F.mse_loss(out + outside.used[:4], b[1])

    counts = Counts()
    return Case(model, adamw(model), counts, beside=[Seen(lambda: {**vars(outside), "calls": counts.calls})]), outside


@loop
def outside_tensor_that_is_read_first_and_written_from_step_5_on() -> str:
    torch.manual_seed(0)
    case, _ = outside_case(5, "used")
    stepper = case.start()
    trains(case, BATCHES[:6])
    require("rollback.first_write" in findings(stepper), f"not reported: {findings(stepper)}")
    skips(case, poisoned(BATCHES[0]))
    trains(case, BATCHES[6:9])
    skips(case, poisoned(BATCHES[0]))
    return "reported at its first write, and 2 skips after it bitwise undone"


@loop
def outside_tensor_that_no_step_used_before_step_5() -> str:
    """Found by the observation at update 10, and restored from then on."""
    torch.manual_seed(0)
    case, outside = outside_case(5, "unused")
    case.start()
    trains(case, BATCHES[:7])
    value = outside.unused.clone()
    require(not case.stepper.step(case.loss_fn, poisoned(BATCHES[0])).applied, "a bad batch was applied")
    stayed = not torch.equal(value, outside.unused)
    trains(case, BATCHES[7:13])
    skips(case, poisoned(BATCHES[0]))
    if not stayed:
        return "restored although no observed step had used it"
    return limit("reported by the next observed step, restored from then on", "restored after the observation at 10")


@loop
def outside_tensor_first_written_after_update_10() -> str:
    """Step 12 reads and writes it for the first time; a module that is added makes the next step an observed one."""
    torch.manual_seed(0)
    case, _ = outside_case(12, "unused")
    case.start()
    trains(case, BATCHES[:14])
    case.model.add_module("identity", nn.Identity())
    trains(case, BATCHES[14:])
    skips(case, poisoned(BATCHES[0]))
    return "restored after the model was given another module"


@loop
def regulariser_switched_on_by_another_loss_function() -> str:
    """Stage two has another loss function with a module of its own, which its first step writes."""
    torch.manual_seed(0)
    model, teacher = mlp(norm=True), None
    case = Case(model, adamw(model), mse)
    case.start()
    trains(case, BATCHES[:5])
    teacher = frozen_copy(model)

    def second(m: nn.Module, b: Any) -> Tensor:
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), m.parameters(), strict=True):
                t.lerp_(s, 0.1)
        return mse(m, b) + F.mse_loss(m(b[0]), teacher(b[0]))

    case.loss_fn, case.beside = second, [teacher]
    skips(case, poisoned(BATCHES[5]))
    trains(case, BATCHES[5:7])
    skips(case, poisoned(BATCHES[5]))
    return "the first step with the new loss function was already undone"


@loop
def pruning_mask_that_moves_every_fourth_step() -> str:
    """Gradual magnitude pruning in forward: mask and weight are written in some steps and not in others."""

    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(16, 4), 0
            self.register_buffer("mask", torch.ones(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls % 4 == 1:
                limit = self.linear.weight.detach().abs().flatten().kthvalue(self.calls).values
                self.mask.copy_(self.linear.weight.abs() > limit)
                self.linear.weight.data.mul_(self.mask)
            return F.linear(x, self.linear.weight * self.mask, self.linear.bias)

    def build() -> Case:
        model = Pruned()
        return Case(model, sgd(model), mse, beside=[Seen(lambda: {"calls": model.calls})])

    return promise(build, BATCHES[:9], at=(0, 4, 4, 8))


@loop
def lookahead_of_slow_weights_every_fifth_step() -> str:
    """Slow weights in a list; every fifth call moves them and writes the model's own weights back from them."""

    def build() -> Case:
        model = mlp()
        slow = [p.detach().clone() for p in model.parameters()]

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, m: nn.Module, b: Any) -> Tensor:
                if self.calls % 5 == 0:
                    with torch.no_grad():
                        for s, p in zip(slow, m.parameters(), strict=True):
                            s.lerp_(p, 0.5)
                            p.copy_(s)
                self.calls += 1
                return mse(m, b)

        counts = Calls()
        return Case(model, sgd(model), counts, beside=[slow, Seen(lambda: {"calls": counts.calls})])

    return promise(build, BATCHES[:12], at=(0, 1, 5, 10))


@loop
def nothing_is_kept_alive() -> str:
    """Coverage holds its tensors weakly: a bank that the loop drops is freed."""
    import gc
    import weakref

    torch.manual_seed(0)
    model, held = mlp(), {"bank": torch.zeros(8, 4)}

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        if "bank" in held:
            held["bank"].lerp_(out.detach(), 0.1)
        return F.mse_loss(out, b[1])

    case = Case(model, adamw(model), loss)
    case.start()
    trains(case, BATCHES[:2])
    skips(case, poisoned(BATCHES[0]))
    dropped = weakref.ref(held.pop("bank"))
    gc.collect()
    require(dropped() is None, "the Stepper keeps a tensor alive that nobody else holds")
    trains(case, BATCHES[2:4])
    skips(case, poisoned(BATCHES[0]))
    return "freed at once; steps and skips go on"
