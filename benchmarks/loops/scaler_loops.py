"""Loops that keep their GradScaler, as docs/adapters/grad_scaler.md has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    NAN,
    HalfstepError,
    Seen,
    adamw,
    differences,
    flat,
    frozen_copy,
    limit,
    loop,
    mlp,
    pairs,
    refuses,
    require,
    require_same,
    sgd,
)

BATCHES = pairs(6)
PAGE = "adapters/grad_scaler.md"


class Run:
    """A loop as torch's own documentation has it, over `scaler`."""

    def __init__(self, precision: str = "fp32", optimizer: Callable[[nn.Module], Any] = adamw) -> None:
        torch.manual_seed(0)
        self.model, self.criterion = mlp(norm=True), Centre()
        self.teacher = frozen_copy(self.model)
        self.optimizer = optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler: Any = halfstep.GradScaler("cpu", precision=precision, init_scale=256.0)
        self.precision, self.clip = precision, None

    def torch_scaler(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=self.precision == "fp16")

    def loss(self, batch: Any) -> Tensor:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.bfloat16)
        with torch.autocast("cpu", dtype, enabled=self.precision != "fp32"):
            return self.criterion(self.model(batch[0]).float(), batch[1])

    def step(self, *micro: Any) -> None:
        self.optimizer.zero_grad()
        for batch in micro:
            self.scaler.scale(self.loss(batch) / len(micro)).backward()
        self.scaler.unscale_(self.optimizer)
        if self.clip:
            self.clip(self.model.parameters())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def state(self) -> dict[str, Any]:
        things = [self.model, self.criterion, self.teacher, self.optimizer, self.schedule]
        return {name: value for i, thing in enumerate(things) for name, value in flat(thing, str(i))}


class Centre(nn.Module):
    """A criterion with a buffer, a plain tensor that is rebound and a Python counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.mean, self.calls = torch.zeros(4), 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.centre.lerp_(out.detach().mean(0), 0.1)
        self.mean = 0.9 * self.mean + 0.1 * self.centre
        self.calls += 1
        return F.mse_loss(out - self.centre.clone(), y)


def spoil(batch: Any) -> Any:
    return batch[0] * NAN, batch[1]


def without_the_bad(
    precision: str = "fp32",
    bad: Sequence[int] = (0, 3),
    clip: Any = None,
    included: Callable[[Run], Sequence[Any]] = lambda run: (run.model, run.criterion, run.schedule),
    apart: Sequence[str] = (),
    optimizer: Callable[[nn.Module], Any] = adamw,
) -> list[str]:
    """Names of what differs from torch's own scaler on the same run without the bad batches."""
    ends = []
    for ours in (False, True):
        run = Run(precision, optimizer)
        run.clip = clip
        if ours:
            run.scaler.include(*included(run))
        else:
            run.torch_scaler()
        for i, batch in enumerate(BATCHES):
            for _ in range(list(bad).count(i) if ours else 0):
                run.step(spoil(batch))
                require(not run.scaler.report.applied, "a bad batch was applied")
            run.step(batch)
        ends.append(run.state())
    return [name for name in differences(*ends) if not any(word in name for word in apart)]


@loop
def scaler_with_an_included_criterion() -> str:
    differ = without_the_bad()
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "2 bad batches left no trace in model, criterion, AdamW and schedule"


@loop
def scaler_with_plain_attributes_of_an_included_criterion() -> str:
    """A rebound tensor and a Python counter: an included module is covered as a whole, under the adapters alike."""
    run = Run()
    run.scaler.include(run.model, run.criterion, run.schedule)
    seen = Seen(lambda: {"calls": run.criterion.calls, "mean": run.criterion.mean})
    for batch in BATCHES:
        before = dict(flat(seen))
        run.step(spoil(batch))
        require_same(before, dict(flat(seen)), "after a skip")
        run.step(batch)
    return "6 skips left the counter and the rebound tensor as they were"


@loop
def scaler_in_fp16_two_bad_in_a_row() -> str:
    differ = without_the_bad("fp16", bad=(0, 0, 3, 3))
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "4 bad batches in two rows left no trace"


@loop
def scaler_in_bf16_checks_what_torch_does_not() -> str:
    differ = without_the_bad("bf16", bad=(1, 5))
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "2 bad batches left no trace"


@loop
def scaler_clips_by_norm() -> str:
    differ = without_the_bad("fp16", clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.1))
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "bitwise as torch's scaler with clip_grad_norm_"


@loop
def scaler_clips_by_value() -> str:
    differ = without_the_bad("fp16", clip=lambda ps: nn.utils.clip_grad_value_(ps, 0.01))
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "bitwise as torch's scaler with clip_grad_value_"


@loop
def scaler_with_fused_sgd_and_momentum() -> str:
    """torch calls a fused optimizer even on a skip; ours does not."""
    differ = without_the_bad("fp16", optimizer=lambda m: sgd(m, momentum=0.9, fused=True))
    require(not differ, f"differ from the run without the bad batches: {differ[:4]}")
    return "2 bad batches left no trace, the first of them before there was momentum"


@loop
def scaler_over_windows_with_a_bad_micro_batch() -> str:
    ends = []
    for ours in (False, True):
        run = Run("fp16")
        if ours:
            run.scaler.include(run.model, run.criterion, run.schedule)
        else:
            run.torch_scaler()
        for i in range(0, 6, 2):
            if ours:
                run.step(BATCHES[i], spoil(BATCHES[i + 1]))
                run.step(spoil(BATCHES[i]), BATCHES[i + 1])
            run.step(BATCHES[i], BATCHES[i + 1])
        ends.append(run.state())
    require_same(ends[0], ends[1], "compared with torch's scaler without the bad windows")
    return "6 windows with one bad micro-batch left no trace"


@loop
def scaler_with_a_criterion_that_is_not_included() -> str:
    differ = without_the_bad(included=lambda run: (run.model, run.schedule))
    if not differ:
        return "a criterion that was not included was restored"
    require(any(name.startswith("1.centre") for name in differ), f"differ: {differ}")
    return limit("Modules that were not included", "the center of a criterion that was not included is NaN", PAGE)


@loop
def scaler_resumed_from_torchs_own_state() -> str:
    """torch's `state_dict` goes into ours and back; a skip right after that."""
    run = Run("fp16")
    run.torch_scaler()
    for batch in BATCHES[:3]:
        run.step(batch)
    saved = copy.deepcopy(run.scaler.state_dict())
    for batch in BATCHES[3:]:
        run.step(batch)
    wanted = run.state()
    run = Run("fp16")
    run.torch_scaler()
    for batch in BATCHES[:3]:
        run.step(batch)
    run.scaler = halfstep.GradScaler("cpu", precision="fp16")
    run.scaler.load_state_dict(saved)
    run.scaler.include(run.model, run.criterion, run.schedule)
    run.step(spoil(BATCHES[3]))
    for batch in BATCHES[3:]:
        run.step(batch)
    require_same(wanted, run.state(), "compared with torch's scaler without the bad batch")
    return "bitwise as torch's scaler, with a skip right after the change"


@loop
def scaler_update_left_out_is_refused() -> str:
    run = Run("fp16")
    run.scaler.include(run.model)
    run.optimizer.zero_grad()
    run.scaler.scale(run.loss(BATCHES[0])).backward()
    run.scaler.step(run.optimizer)
    run.scaler.scale(run.loss(BATCHES[1])).backward()
    with refuses(HalfstepError, "update"):
        run.scaler.step(run.optimizer)
    return "refused by name in the next step"


@loop
def scaler_clipping_before_unscale_is_refused() -> str:
    run = Run("fp16")
    run.scaler.scale(run.loss(BATCHES[0])).backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    before = dict(flat(run.model))
    with refuses(HalfstepError, "unscale_"):
        run.scaler.step(run.optimizer)
    require_same(before, dict(flat(run.model)), "after the refusal")
    return "refused, and nothing applied"


@loop
def scaler_next_to_evaluation_and_recalibration() -> str:
    """Statistics recalibrated under no_grad between windows are not rolled back by the next skip."""
    run = Run()
    run.scaler.include(run.model, run.criterion, run.schedule)
    for batch in BATCHES[:3]:
        run.step(batch)
    with torch.no_grad():
        for batch in BATCHES:
            run.model(batch[0])
    run.model.eval()
    run.model(BATCHES[0][0])
    run.model.train()
    before = run.state()
    run.step(spoil(BATCHES[3]))
    require_same(before, run.state(), "after a skip that followed a recalibration")
    return "the skip came back to the recalibrated statistics"
