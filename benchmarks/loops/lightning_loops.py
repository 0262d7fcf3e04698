"""Lightning's Trainer with teachers, queues and criteria that are no part of the LightningModule's parameters."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.loops.harness import (
    NAN,
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
from halfstep import HalfstepError
from halfstep.adapters.lightning import HalfstepPrecision

BATCHES = [(x, y) for x, y in pairs(6)]


class Host(pl.LightningModule):
    """The module of these loops; `outside()` is what its step writes next to weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)

    def outside(self) -> list[Any]:
        return []

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class Batches:
    """Batches that are given as they are, once."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter([[t.clone() for t in batch] for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def fitted(make: Callable[[], Host], batches: Sequence[Any], ours: bool = True, **options: Any) -> tuple[Host, Any]:
    """A run over these batches, and all numbers at its end."""
    torch.manual_seed(0)
    module = make()
    step = HalfstepPrecision("fp32", guard="off") if ours else None
    callbacks = [*options.pop("callbacks", []), *([step.callback] if step else [])]
    given = {"max_epochs": 1, **options}
    with quiet():
        trainer = pl.Trainer(
            plugins=[step] if step else None,
            callbacks=callbacks,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **given,
        )
        trainer.fit(module, Batches(batches))
    return module, trainer


def numbers(module: Host, trainer: Any) -> dict[str, Any]:
    things = [module, trainer.optimizers, *module.outside()]
    return {name: value for i, thing in enumerate(things) for name, value in flat(thing, str(i))}


def spoil(batch: Any) -> Any:
    return [batch[0] * NAN, batch[1]]


def kept(make: Callable[[], Host], bad: Sequence[int] = (0, 3), many: int = 1, **options: Any) -> str:
    """A run with bad windows put in before these steps ends bitwise as Lightning's own run without them."""
    windows = [BATCHES[i : i + many] for i in range(0, len(BATCHES), many)]
    with_bad = []
    for i, window in enumerate(windows):
        if i in bad:
            with_bad += [*window[:-1], spoil(window[-1])]
        with_bad += window
    options = {"accumulate_grad_batches": many, **options}
    hand = numbers(*fitted(make, BATCHES, ours=False, **options))
    ours = numbers(*fitted(make, with_bad, **options))
    differ = differences(hand, ours)
    require(not differ, f"compared with Lightning's run without the bad batches: {len(differ)} differ: {differ[:4]}")
    return f"{len(bad)} bad windows left no trace; bitwise as Lightning without them"


class HiddenTeacher(Host):
    """A mean teacher in a list, so that Lightning does not save it; moved in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self._teacher = [frozen_copy(self.net)]

    def outside(self) -> list[Any]:
        return self._teacher

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            for t, s in zip(self._teacher[0].parameters(), self.net.parameters(), strict=True):
                t.lerp_(s, 0.1)
            aim = self._teacher[0](batch[0])
        return F.mse_loss(self.net(batch[0]), batch[1]) + 0.1 * F.mse_loss(self.net(batch[0]), aim)


@loop
def lightning_teacher_in_a_list() -> str:
    return kept(HiddenTeacher)


@loop
def lightning_teacher_in_a_list_over_windows() -> str:
    return kept(HiddenTeacher, bad=(0, 2), many=2)


class Queue(Host):
    """A queue and its pointer as plain attributes of the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.at, self.phase = torch.zeros(16, 4), 0, "warm"

    def outside(self) -> list[Any]:
        return [Seen(lambda: {"queue": self.queue, "at": self.at, "phase": self.phase})]

    def training_step(self, batch: Any, index: int) -> Tensor:
        out = self.net(batch[0])
        self.queue[self.at] = out.detach().mean(0)
        self.at += 1
        self.phase = "warm" if self.at < 3 else "steady"
        return F.mse_loss(out - self.queue.mean(0), batch[1])


@loop
def lightning_queue_of_the_module() -> str:
    return kept(Queue)


@loop
def lightning_criterion_held_by_a_closure() -> str:
    """The criterion with a center is a local of the function that built the module."""

    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(4))
            self.calls = 0

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            self.centre.lerp_(out.detach().mean(0), 0.1)
            self.calls += 1
            return F.mse_loss(out - self.centre.clone(), y)

    def make() -> Host:
        criterion = Centre()

        class WithCriterion(Host):
            def outside(self) -> list[Any]:
                return [criterion, Seen(lambda: {"calls": criterion.calls})]

            def training_step(self, batch: Any, index: int) -> Tensor:
                return criterion(self.net(batch[0]), batch[1])

        return WithCriterion()

    return kept(make)


@loop
def lightning_clips_by_norm_next_to_a_teacher() -> str:
    return kept(HiddenTeacher, gradient_clip_val=0.1)


@loop
def lightning_clips_by_value() -> str:
    return kept(Queue, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@loop
def lightning_schedule_by_step_and_two_bad_in_a_row() -> str:
    class Scheduled(HiddenTeacher):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    hand = numbers(*fitted(Scheduled, BATCHES, ours=False))
    bad = [spoil(BATCHES[0])] * 2
    module, trainer = fitted(Scheduled, [*bad, *BATCHES[:3], *bad, *BATCHES[3:]])
    require_same(hand, numbers(module, trainer), "compared with Lightning's run without the bad batches")
    require(trainer.global_step == 6, f"global_step is {trainer.global_step}")
    return "4 bad batches in two rows left no trace, schedule included"


@loop
def lightning_metric_updated_in_training_step() -> str:
    """A metric in `training_step` counts the batches of applied steps, as its page says."""

    class Metered(Host):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.seen.update(float(len(batch[0])))
            return super().training_step(batch, index)

    module, _ = fitted(Metered, [*BATCHES[:2], spoil(BATCHES[0]), *BATCHES[2:]])
    seen = float(module.seen.compute())
    require(seen == 48.0, f"{seen} samples counted")
    return "6 applied batches of 8 counted"


@loop
def lightning_error_in_the_middle_of_a_window() -> str:
    """An error in the second micro-batch: nothing of the window stays in teacher, BatchNorm or weights."""

    class Failing(HiddenTeacher):
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if index == 3:
                raise RuntimeError("a corrupt file")
            return loss

    def short() -> Host:
        return HiddenTeacher()

    made: list[Host] = []

    def make() -> Host:
        made.append(Failing())
        return made[0]

    try:
        fitted(make, BATCHES, accumulate_grad_batches=2)
    except RuntimeError as error:
        require("corrupt" in str(error), str(error))
    else:
        require(False, "the error was swallowed")
    hand, _ = fitted(short, BATCHES[:2], ours=False, accumulate_grad_batches=2)
    wanted = {**dict(flat(hand)), **dict(flat(hand.outside()))}
    require_same(wanted, {**dict(flat(made[0])), **dict(flat(made[0].outside()))}, "after the error")
    return "weights, BatchNorm and teacher as after the first window"


@loop
def lightning_manual_optimization_is_refused() -> str:
    class Manual(Host):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with refuses(HalfstepError, "manual"):
        fitted(Manual, BATCHES)
    return "refused by name before the first step"


@loop
def lightning_over_a_data_loader_in_two_epochs() -> str:
    """A real DataLoader, a teacher, two epochs, and a bad batch in each of them."""

    def run(ours: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        module = HiddenTeacher()
        rows = [(x, y) for batch in BATCHES for x, y in zip(*batch, strict=True)]
        bad = [(x * NAN, y) for x, y in rows[:8]]
        data = [*rows[:16], *bad, *rows[16:]] if ours else rows
        step = HalfstepPrecision("fp32", guard="off")
        with quiet():
            trainer = pl.Trainer(
                plugins=[step] if ours else None,
                callbacks=[step.callback] if ours else None,
                max_epochs=2,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, DataLoader(data, batch_size=8))
        return numbers(module, trainer)

    require_same(run(False), run(True), "compared with Lightning's run without the bad batches")
    return "12 steps bitwise as Lightning without the 2 bad batches"
