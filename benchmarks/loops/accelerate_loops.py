"""accelerate's loop with criteria and teachers outside of what was prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader

import halfstep
from benchmarks.loops.harness import (
    NAN,
    HalfstepError,
    Seen,
    differences,
    flat,
    frozen_copy,
    loop,
    mlp,
    pairs,
    refuses,
    require,
    require_same,
)

BATCHES = pairs(6)
Batch = tuple[Tensor, Tensor]


class Criterion(nn.Module):
    """A buffer, a plain tensor and a counter; in no optimizer and not prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.mean, self.calls = torch.zeros(4), 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.centre.lerp_(out.detach().float().mean(0), 0.1)
        self.mean = 0.9 * self.mean + 0.1 * self.centre
        self.calls += 1
        return F.mse_loss(out.float() - self.mean, y)


class Run:
    """One run of an accelerate script, by accelerate itself or with a Stepper."""

    def __init__(self, batches: Sequence[Batch], ours: bool, many: int = 1, **options: Any) -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # type: ignore[attr-defined]
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=many)
        self.clip = options.pop("clip_norm", None)
        model = mlp(norm=True)
        self.criterion, self.teacher, self.ours = Criterion(), frozen_copy(model), ours
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        rows = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8), schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        if ours:
            extra = {} if self.clip is None else {"clip_norm": self.clip}
            self.stepper = halfstep.from_accelerate(
                self.accelerator, self.model, self.optimizer, self.schedule, **extra, **options
            )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), model.parameters(), strict=True):
                t.lerp_(s, 0.1)
            aim = self.teacher(batch[0])
        out = model(batch[0])
        return self.criterion(out, batch[1]) + 0.1 * F.mse_loss(out, aim)

    def train(self) -> list[Any]:
        reports = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                if self.ours:
                    with self.stepper.forward(last=self.accelerator.sync_gradients):
                        loss = self.loss(self.model, batch)
                    self.stepper.backward(loss)
                    if self.accelerator.sync_gradients:
                        reports.append(self.stepper.apply())
                    continue
                self.accelerator.backward(self.loss(self.model, batch))
                if self.accelerator.sync_gradients and self.clip is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return reports

    def state(self) -> dict[str, Any]:
        plain = self.accelerator.unwrap_model(self.model)
        seen = Seen(lambda: {"mean": self.criterion.mean, "calls": self.criterion.calls})
        things = [plain, self.optimizer.optimizer, self.criterion, self.teacher, seen]
        return {name: value for i, thing in enumerate(things) for name, value in flat(thing, str(i))}


def spoil(batch: Batch) -> Batch:
    return batch[0] * NAN, batch[1]


def kept(bad: Sequence[int], many: int = 1, **options: Any) -> str:
    """Bad windows before these windows leave no trace next to accelerate's own run without them."""
    hand = Run(BATCHES, ours=False, many=many, **dict(options))
    hand.train()
    given: list[Batch] = []
    for i in range(0, 6, many):
        if i // many in bad:
            given += [*BATCHES[i : i + many - 1], spoil(BATCHES[i + many - 1])]
        given += BATCHES[i : i + many]
    ours = Run(given, ours=True, many=many, **dict(options))
    reports = ours.train()
    require(sum(not r.applied for r in reports) == len(bad), f"{[r.applied for r in reports]}")
    differ = differences(hand.state(), ours.state())
    require(not differ, f"compared with accelerate's run without the bad batches: {len(differ)} differ: {differ[:4]}")
    return f"{len(bad)} bad windows left no trace; bitwise as accelerate without them"


@loop
def accelerate_teacher_and_criterion_outside() -> str:
    return kept(bad=(0, 3))


@loop
def accelerate_bad_first_and_last_batch_with_clipping() -> str:
    return kept(bad=(0, 5), clip_norm=0.1)


@loop
def accelerate_accumulation_with_bad_windows() -> str:
    return kept(bad=(0, 2), many=2)


@loop
def accelerate_step_with_a_loss_function() -> str:
    """On one device `stepper.step(loss_fn, batch)` works as well."""
    hand = Run(BATCHES, ours=False)
    hand.train()
    run = Run(BATCHES, ours=True)
    for batch in run.loader:
        before = run.state()
        report = run.stepper.step(run.loss, (batch[0] * NAN, batch[1]))
        require(not report.applied, "a bad batch was applied")
        require_same(before, run.state(), "after a skip")
        require(run.stepper.step(run.loss, batch).applied, "not applied")
    require_same(hand.state(), run.state(), "compared with accelerate's own run")
    return "6 skips undone, 6 steps bitwise as accelerate"


@loop
def accelerate_save_state_next_to_a_skip() -> str:
    """`save_state` after a skip, `load_state` into the same objects, and on."""
    import tempfile

    run = Run(BATCHES, ours=True)
    batches = list(run.loader)
    for batch in batches[:3]:
        run.stepper.step(run.loss, batch)
    run.stepper.step(run.loss, (batches[0][0] * NAN, batches[0][1]))
    with tempfile.TemporaryDirectory() as folder:
        run.accelerator.save_state(folder)
        saved = run.state()
        teacher, criterion = run.teacher.state_dict(), run.criterion
        kept_teacher = {name: value.clone() for name, value in teacher.items()}
        kept_criterion = (criterion.centre.clone(), criterion.mean.clone(), criterion.calls)
        for batch in batches[3:]:
            run.stepper.step(run.loss, batch)
        run.accelerator.load_state(folder)
    run.teacher.load_state_dict(kept_teacher)
    criterion.centre.copy_(kept_criterion[0])
    criterion.mean, criterion.calls = kept_criterion[1], kept_criterion[2]
    require_same(saved, run.state(), "after load_state")
    before = run.state()
    require(not run.stepper.step(run.loss, (batches[0][0] * NAN, batches[0][1])).applied, "a bad batch was applied")
    require_same(before, run.state(), "after a skip that followed load_state")
    require(run.stepper.counts.applied == 3, f"{run.stepper.counts}")
    return "loaded, and a skip right after it comes back to what was loaded"


@loop
def accelerate_optimizer_step_left_in_is_refused() -> str:
    run = Run(BATCHES, ours=True)
    batch = next(iter(run.loader))
    with run.stepper.forward(last=True):
        loss = run.loss(run.model, batch)
    run.stepper.backward(loss)
    with refuses(HalfstepError):
        run.optimizer.step()
        run.stepper.apply()
    with contextlib.suppress(HalfstepError):
        run.stepper.discard()
    return "optimizer.step() next to the Stepper is refused"
