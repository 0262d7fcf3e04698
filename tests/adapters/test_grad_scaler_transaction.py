"""The transaction in torch's own loop: a skip changes no tensor, and what follows it is as if it had not been."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import halfstep
from halfstep.errors import WrongUse
from tests.support.combinations import pairwise
from tests.support.digest import digest_of
from tests.support.models import Writes, buffered_model

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
NAN, INF = float("nan"), float("inf")


def one(kind: Any, **options: Any) -> Optimizers:
    return lambda model: [kind(model.parameters(), **options)]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, fused=True)]


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": one(torch.optim.SGD, lr=1e-2),
    "sgd_momentum": one(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_momentum_fused": one(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "adamw": one(torch.optim.AdamW, lr=1e-2),
    "adamw_foreach": one(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": one(torch.optim.AdamW, lr=1e-2, fused=True),
    "adagrad_fused": one(torch.optim.Adagrad, lr=1e-2, fused=True),
    "rmsprop": one(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "muon_and_adamw": muon_and_adamw,
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Loop:
    """The loop of torch's recipe. Schedule and averages are moved in every iteration, whatever became of it."""

    def __init__(self, make: Optimizers, precision: str, *, accumulate: int = 1, clip: float | None = None) -> None:
        self.model: Any = buffered_model()
        self.optimizers = make(self.model)
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in self.optimizers]
        self.ema, self.average = halfstep.Ema(self.model, 0.9), AveragedModel(self.model[0])
        self.scaler = halfstep.GradScaler("cpu", init_scale=1024.0, growth_interval=4, precision=precision)
        self.scaler.include(self.model, *self.schedules, self.ema, self.average)
        self.precision, self.accumulate, self.clip = precision, accumulate, clip

    def loss(self, x: Tensor, poison: str) -> Tensor:
        narrow = self.precision in DTYPES
        with torch.autocast("cpu", dtype=DTYPES.get(self.precision, torch.bfloat16), enabled=narrow):
            out = self.model(x).float()
        if poison == "gradient":
            out.register_hook(lambda gradient: gradient * INF)
        if poison == "buffer":
            self.model[1].running_mean.data.fill_(INF)
        loss = out.square().mean() / self.accumulate
        return loss * NAN if poison == "loss" else loss

    def window(self, batches: Sequence[Tensor], poison: str = "") -> halfstep.StepReport:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for place, x in enumerate(batches):
            last = place == len(batches) - 1
            self.scaler.scale(self.loss(x, poison if last else "")).backward()
        if self.clip is not None or len(self.optimizers) > 1:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for schedule in self.schedules:
            schedule.step()
        self.ema.update()
        self.average.update_parameters(self.model[0])
        assert self.scaler.report is not None
        return self.scaler.report

    def digest(self) -> str:
        return digest_of(
            dict(self.model.named_parameters()),
            dict(self.model.named_buffers()),
            [optimizer.state_dict() for optimizer in self.optimizers],
            [schedule.state_dict() for schedule in self.schedules],
            self.ema.state_dict(),
            self.average.state_dict(),
        )


def batches(many: int, seed: int = 1) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 8, generator=made) for _ in range(many)]


def expected(poison: str, precision: str) -> str:
    overflow = "gradient_overflow" if precision == "fp16" else "gradient_not_finite"
    return {"loss": "loss_not_finite", "gradient": overflow, "buffer": "buffer_not_finite"}[poison]


@pytest.mark.parametrize(
    *pairwise(kind=OPTIMIZERS, precision=["fp16", "bf16", "fp32"], poison=["loss", "gradient", "buffer"])
)
def test_a_skip_changes_nothing(kind: str, precision: str, poison: str) -> None:
    # With and without accumulation and clipping, in turns.
    turn = list(OPTIMIZERS).index(kind) + ["loss", "gradient", "buffer"].index(poison)
    accumulate, clip = 1 + turn % 2, 0.1 if turn % 4 < 2 else None
    loop = Loop(OPTIMIZERS[kind], precision, accumulate=accumulate, clip=clip)
    for first in (True, False):  # before there is any state, and after
        before = loop.digest()
        report = loop.window(batches(accumulate), poison)
        assert (report.applied, report.reason) == (False, expected(poison, precision))
        assert loop.digest() == before
        # Nor does any state appear; Adagrad alone has one from the beginning.
        assert not first or kind == "adagrad_fused" or not any(optimizer.state for optimizer in loop.optimizers)
        good = loop.window(batches(accumulate, seed=2))
        assert good.applied, good
        assert loop.digest() != before
    assert loop.scaler.counts.skipped == {expected(poison, precision): 2}
    assert (loop.scaler.counts.applied, loop.scaler.counts.attempted) == (2, 4)
    # The scale falls for an overflow only.
    assert loop.scaler.get_scale() == {
        ("fp16", "gradient"): 256.0,
        ("fp16", "loss"): 1024.0,
        ("fp16", "buffer"): 2048.0,
    }.get((precision, poison), 1.0)


@pytest.mark.parametrize(
    *pairwise(
        kind=["sgd_momentum_fused", "adamw", "muon_and_adamw"],
        precision=["fp16", "bf16", "fp32"],
        accumulate=[1, 2, 3],
    )
)
def test_training_goes_on_as_if_the_bad_batch_had_not_been(kind: str, precision: str, accumulate: int) -> None:
    with_bad, without = (Loop(OPTIMIZERS[kind], precision, accumulate=accumulate, clip=0.5) for _ in range(2))
    for step in range(5):
        if step in (0, 3):
            assert not with_bad.window(batches(accumulate, seed=99), "loss").applied
        a, b = with_bad.window(batches(accumulate, seed=step)), without.window(batches(accumulate, seed=step))
        assert (a.step, a.loss, a.grad_norm, a.loss_scale) == (b.step, b.loss, b.grad_norm, b.loss_scale)
    assert with_bad.digest() == without.digest()


def test_the_bad_value_may_be_in_the_first_of_several_microbatches() -> None:
    loop = Loop(OPTIMIZERS["adamw"], "bf16", accumulate=3, clip=1.0)
    before = loop.digest()
    first, *others = batches(3)
    assert loop.window([first * NAN, *others]).reason == "loss_not_finite"
    assert loop.digest() == before


def test_a_schedule_of_one_of_two_optimizers_follows_that_one() -> None:
    model: Any = buffered_model()
    halves = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[4].parameters(), 0.1)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in halves]
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(model, *schedules)
    scaler.scale(model(batches(1)[0]).square().mean()).backward()
    model[0].weight.grad.fill_(NAN)
    for optimizer in halves:
        scaler.step(optimizer)
    scaler.update()
    for schedule in schedules:
        schedule.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in halves] == [0.1, 0.05]
    assert model[2].calls.item() == 0  # rolled back with the first decision
    assert scaler.counts.skipped == {"gradient_not_finite": 1}


def test_a_later_skip_does_not_take_back_what_an_applied_optimizer_has_used() -> None:
    model: Any = buffered_model()
    halves = [torch.optim.SGD(model[4].parameters(), 0.1), torch.optim.SGD(model[0].parameters(), 0.1)]
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(model)
    scaler.scale(model(batches(1)[0]).square().mean()).backward()
    model[0].weight.grad.fill_(NAN)
    for optimizer in halves:
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.counts.applied, scaler.counts.attempted) == (1, 2)
    assert model[2].calls.item() == 1


def test_a_run_that_goes_back_to_an_earlier_checkpoint_adjusts_its_scale() -> None:
    loop = Loop(OPTIMIZERS["adamw"], "fp16")
    saved = copy.deepcopy(loop.scaler.state_dict())
    for _ in range(3):
        loop.window(batches(1))
    loop.scaler.load_state_dict(saved)
    loop.window(batches(1), "gradient")
    assert (loop.scaler.get_scale(), loop.scaler.counts.attempted) == (512.0, 1)


def test_a_schedule_of_epochs_is_held_only_where_no_step_of_the_epoch_was_applied() -> None:
    loop = Loop(OPTIMIZERS["adamw"], "fp32")
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1, 0.5)
    loop.schedules = []
    loop.scaler.include(schedule)
    for poisons, moves in ((["", "loss"], True), (["loss", "loss"], False), (["loss", ""], True)):
        before = schedule.get_last_lr()
        for poison in poisons:
            loop.window(batches(1), poison)
        schedule.step()
        assert (schedule.get_last_lr() != before) == moves


def test_held_objects_copy_and_save_as_what_they_are(tmp_path: Any) -> None:
    loop = Loop(OPTIMIZERS["adamw"], "fp32")
    schedule, average = loop.schedules[0], loop.average
    assert type(schedule).__name__ == "StepLR"
    assert isinstance(average, AveragedModel)
    torch.save({"schedule": schedule.state_dict(), "average": average}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    assert type(saved["average"]) is type(copy.deepcopy(average)) is AveragedModel
    assert saved["schedule"] == schedule.state_dict()
    loop.window(batches(1), "loss")
    before = digest_of(saved["average"].state_dict())
    saved["average"].update_parameters(loop.model[0])  # a copy belongs to nobody
    assert digest_of(saved["average"].state_dict()) != before


class Ring:
    """An object with a state, as samplers and losses with a memory have one."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def add(self, value: float) -> None:
        self.kept.append(value)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = list(state["kept"])


class Odd:
    def __init__(self) -> None:
        self.moved = 0

    def advance(self) -> None:
        self.moved += 1


@pytest.mark.wording
def test_other_objects_are_rolled_back_by_their_state_or_held_by_a_named_method() -> None:
    loop = Loop(OPTIMIZERS["adamw"], "bf16")
    ring, odd = Ring(), Odd()
    loop.scaler.include(ring)
    loop.scaler.include(odd, hold="advance")
    for poison, kept, moved in (("", 1, 1), ("loss", 1, 1), ("", 2, 2)):
        x = batches(1)[0]
        loop.optimizers[0].zero_grad()
        loss = loop.loss(x, poison)
        ring.add(1.0)
        loop.scaler.scale(loss).backward()
        loop.scaler.step(loop.optimizers[0])
        loop.scaler.update()
        odd.advance()
        assert (len(ring.kept), odd.moved) == (kept, moved)
    with pytest.raises(WrongUse, match="neither hold nor roll back"):
        loop.scaler.include(3)
    with pytest.raises(WrongUse, match="a method of Odd"):
        loop.scaler.include(odd, hold="jump")


def test_what_is_written_between_windows_is_not_rolled_back() -> None:
    """Loaded weights, recalibrated statistics and evaluation belong to no window."""
    loop = Loop(OPTIMIZERS["adamw"], "fp32")
    loop.window(batches(1))
    norm = loop.model[1]
    with torch.no_grad():
        for x in batches(3, seed=5):
            loop.model(x * 7)  # statistics recalibrated, in training mode
    norm.running_var.mul_(3.0)  # type: ignore[union-attr, operator]
    before = loop.digest()
    assert not loop.window(batches(1), "loss").applied
    assert loop.digest() == before


def test_layers_that_were_replaced_are_rolled_back_as_well() -> None:
    loop = Loop(OPTIMIZERS["sgd"], "fp32")
    loop.window(batches(1))
    loop.model[2] = nn.Sequential(Writes(16), nn.BatchNorm1d(16))
    loop.ema, loop.average = halfstep.Ema(loop.model), AveragedModel(loop.model[0])
    loop.scaler.include(loop.ema, loop.average)
    before = loop.digest()
    assert not loop.window(batches(1), "loss").applied
    assert loop.digest() == before


def test_a_compiled_model_is_rolled_back(recwarn: Any) -> None:
    model: Any = buffered_model()
    called = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = halfstep.GradScaler("cpu", precision="fp32")
    scaler.include(model)  # the inner one: its hooks are traced and see nothing
    for factor in (1.0, 1.0, NAN):
        optimizer.zero_grad()
        before = digest_of(model.state_dict())
        scaler.scale(called(batches(1)[0]).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.report is not None
    assert not scaler.report.applied
    assert digest_of(model.state_dict()) == before


def test_a_window_that_the_loop_leaves_out_is_a_skip() -> None:
    loop = Loop(OPTIMIZERS["adamw"], "fp16")
    loop.window(batches(1))
    before, [optimizer] = loop.digest(), loop.optimizers
    optimizer.zero_grad()
    loop.scaler.scale(loop.loss(batches(1)[0], "")).backward()
    loop.scaler.unscale_(optimizer)
    loop.scaler.update()  # as loops do that look at the norm themselves
    loop.schedules[0].step()
    loop.ema.update()
    assert loop.scaler.report is not None
    assert loop.scaler.report.reason == "guard:loop"
    assert loop.digest() == before
    assert loop.window(batches(1)).applied


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["adamw", "sgd_momentum_fused"])
def test_a_resumed_run_continues_to_the_bit(kind: str, precision: str, tmp_path: Any) -> None:
    whole, first, second = (Loop(OPTIMIZERS[kind], precision, accumulate=2, clip=0.5) for _ in range(3))
    plan = [(seed, {2: "gradient", 5: "loss", 7: "gradient"}.get(seed, "")) for seed in range(10)]
    for seed, poison in plan:
        whole.window(batches(2, seed), poison)
    for seed, poison in plan[:6]:
        first.window(batches(2, seed), poison)
    second.model[2].last = torch.zeros(16)  # a buffer that forward registers
    torch.save(state_of(first), tmp_path / "checkpoint.pt")
    load(second, torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    reports = [second.window(batches(2, seed), poison) for seed, poison in plan[6:]]
    assert second.digest() == whole.digest()
    assert second.scaler.state_dict() == whole.scaler.state_dict()
    assert reports[-1] == whole.scaler.report


def parts(loop: Loop) -> Iterable[Any]:
    return (loop.model, *loop.optimizers, *loop.schedules, loop.ema, loop.average, loop.scaler)


def state_of(loop: Loop) -> list[Any]:
    return [part.state_dict() for part in parts(loop)]


def load(loop: Loop, states: list[Any]) -> None:
    for part, state in zip(parts(loop), states, strict=True):
        part.load_state_dict(state)
