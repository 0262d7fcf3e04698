"""Weights in bf16: the bits of fp32 masters, or an unbiased rounding; the same on every rank and after a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window, island
from halfstep.errors import StartCheckFailed, StateMismatch, UnknownName, WrongUse
from halfstep.guard.monitors.monitors import Meters
from halfstep.guard.repair.snapshot import RollbackSnapshot
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment.rerun import widen_trained_weights
from halfstep.step.storage import weight_format
from halfstep.step.storage.weight_format import (
    SPLIT,
    STOCHASTIC,
    merge_halves,
    round_stochastically_,
    split_into_halves_,
)
from tests.support.digest import digest_of_run
from tests.support.ranks import Ranks

BF16 = resolve_precision_name("bf16")
TIE = 0x8000


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def in_two(wide: Tensor) -> tuple[Tensor, Tensor]:
    high, low = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide, dtype=torch.int16)
    split_into_halves_(wide, high, low)
    return high, low


# -- bits -----------------------------------------------------------------------------------------------------------


def test_a_split_number_is_the_number_to_the_bit() -> None:
    any_bits = torch.randint(-(2**31), 2**31, (300_000,), dtype=torch.int64)
    ties = torch.arange(-4000, 4000, dtype=torch.int64) * 65536 + TIE
    ends = torch.tensor([0, -(2**31), 1, 0x8000, 0x7F800000, -0x800000, 0x7F7FFFFF], dtype=torch.int64)
    wide = from_bits(torch.cat([any_bits, ties, ends]))
    wide = wide[~wide.isnan()]
    assert torch.equal(merge_halves(*in_two(wide)).view(torch.int32), wide.view(torch.int32))


def test_a_nan_is_never_stored_as_a_number() -> None:
    """The NaN of a GPU is 0x7FFFFFFF: a carry out of its low half would make it a zero."""
    uppers = torch.cat([torch.arange(0x7F80, 0x8000), torch.arange(0xFF80, 0x10000)])
    bits = (uppers[:, None] * 65536 + torch.tensor([1, 0x7FFF, 0x8000, 0xFFFF])).flatten()
    wide = from_bits(torch.where(bits >= 2**31, bits - 2**32, bits))
    assert wide.isnan().all()
    high, low = in_two(wide)
    assert high.isnan().all()
    assert merge_halves(high, low).isnan().all()
    round_stochastically_(wide, high.zero_(), torch.Generator().manual_seed(0))
    assert high.isnan().all()


def test_a_weight_that_is_set_to_zero_is_zero() -> None:
    """As by pruning, a mask or nn.init, in the middle of a run: the low bits of before are still there."""
    for zero in (0.0, -0.0):
        high, low = in_two(torch.randn(1000))
        joined = merge_halves(high.fill_(zero), low)
        assert (joined.abs() <= 2**-133).all()


def test_the_upper_half_is_rounded_to_nearest_and_ties_away_from_zero() -> None:
    wide = torch.randn(100_000) * torch.logspace(-30, 30, 100_000)
    assert torch.equal(in_two(wide)[0], wide.bfloat16())
    ties = from_bits(torch.arange(1, 4000, dtype=torch.int64) * 65536 + TIE)
    above = from_bits((ties.view(torch.int32).long() & -65536) + 65536)
    assert torch.equal(in_two(ties)[0].float(), above)
    assert torch.equal(in_two(-ties)[0].float(), -above)
    # One in two ties is another one under autocast, which rounds to even.
    assert (in_two(ties)[0] != ties.bfloat16()).sum() > 1000


def test_any_dense_layout_is_split() -> None:
    wide = torch.randn(6, 5, 3, 3).to(memory_format=torch.channels_last)
    high, low = in_two(wide)
    assert torch.equal(merge_halves(high, low), wide)
    assert high.stride() == low.stride() == wide.stride()


def test_stochastic_rounding_is_a_neighbour_and_right_on_average() -> None:
    value = torch.full((200_000,), 1.0 + 2**-7 * 0.3)
    high = torch.empty_like(value, dtype=torch.bfloat16)
    round_stochastically_(value.clone(), high, torch.Generator().manual_seed(1))
    assert set(high.float().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(high.float().mean().item() - value[0].item()) < 2**-7 * 0.01
    exact = torch.tensor([0.0, -0.0, 1.5, float("inf"), float("-inf"), -3.0])
    out = torch.empty_like(exact, dtype=torch.bfloat16)
    round_stochastically_(exact.clone(), out, None)
    assert torch.equal(out.float(), exact)


# -- as fp32 masters ------------------------------------------------------------------------------------------------


def net(bias: bool = True, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU(), nn.Linear(64, 8, bias=bias))
    with torch.no_grad():
        for p in model.parameters():  # every fifth number lies between two bf16 numbers
            bits = p.view(torch.int32).flatten()
            bits[::5] = (bits[::5] & -65536) | TIE
    return model


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return (model(given[0]).float() - given[1]).square().mean()


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-4, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, 1e-4, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-4, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-4),
    "muon": lambda p: torch.optim.Muon(p, 1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
}
OTHERS = "Adafactor Adadelta Adam Adamax ASGD NAdam RAdam Rprop".split()  # noqa: SIM905


class Masters:
    """fp32 weights by hand: 16-bit copies, rounded by the same rule, compute; the optimizer has the fp32 ones."""

    def __init__(self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = copy.deepcopy(model)
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.optimizer = make(self.masters)
        self._copy()

    def _copy(self) -> None:
        for p, master in zip(self.model.parameters(), self.masters, strict=True):
            p.grad = None
            p.data = in_two(master.detach())[0]

    def step(self, *given: tuple[Tensor, Tensor]) -> None:
        sums = [torch.zeros_like(master) for master in self.masters]
        for one in given:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(self.model, one)
            gradients = torch.autograd.grad(loss / len(given), list(self.model.parameters()))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient
        for master, total in zip(self.masters, sums, strict=True):
            master.grad = total
        self.optimizer.step()
        self._copy()


def narrow(model: nn.Module, optimizer: torch.optim.Optimizer, form: str = SPLIT, **options: Any) -> Stepper:
    return Stepper(model, optimizer, precision=BF16, weight_format=form, **options)


def wide(stepper: Stepper) -> list[Tensor]:
    assert stepper.weights is not None
    return [stepper.weights.wide(p) for p in stepper.model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("updates", [40, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MAKE)
def test_split_weights_are_fp32_masters_to_the_bit(name: str, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "LARGEST_PIECE", 1000)
    model = net(bias=name != "muon")
    masters = Masters(model, MAKE[name])
    stepper = narrow(model, MAKE[name](model.parameters()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for number in range(updates):
        masters.step(batch(number))
        report = stepper.step(loss_of, batch(number))
        assert report.applied
        assert report.gradient_format == "bf16"
    assert equal(wide(stepper), [p.detach() for p in masters.masters])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), masters.model.parameters(), strict=True))
    state = stepper.optimizers["loss"].state.values()
    assert all(v.dtype is torch.float32 for kept in state for v in kept.values() if isinstance(v, Tensor))


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_of_torch_update_split_weights_as_masters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "LARGEST_PIECE", 1000)

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, 1e-3)  # type: ignore[no-any-return]

    model = net()
    masters, stepper = Masters(model, make), narrow(model, make(model.parameters()))
    for number in range(20):
        masters.step(batch(number))
        stepper.step(loss_of, batch(number))
    assert equal(wide(stepper), [p.detach() for p in masters.masters])


def test_gradients_of_several_micro_batches_are_added_up_in_fp32() -> None:
    model = net()
    masters, stepper = Masters(model, MAKE["adamw"]), narrow(model, MAKE["adamw"](model.parameters()))
    for number in range(10):
        masters.step(batch(number), batch(100 + number), batch(200 + number), batch(300 + number))
        window = Window([batch(number), batch(100 + number), batch(200 + number), batch(300 + number)])
        assert stepper.step(loss_of, window).gradient_format == "fp32"
    assert equal(wide(stepper), [p.detach() for p in masters.masters])
    assert stepper.step(loss_of, batch(0)).gradient_format == "bf16"


def test_sums_in_bf16_are_asked_for() -> None:
    model = net()
    stepper = narrow(model, MAKE["adamw"](model.parameters()), gradient_sums="bf16")
    assert stepper.step(loss_of, Window([batch(0), batch(1)])).gradient_format == "bf16"


def test_clipping_is_that_of_fp32_gradients() -> None:
    model = net()
    masters, stepper = Masters(model, MAKE["sgd"]), narrow(model, MAKE["sgd"](model.parameters()), clip_norm=0.05)
    step, norms = masters.optimizer.step, []

    def clipped() -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(masters.masters, 0.05).item())
        step()

    masters.optimizer.step = clipped  # type: ignore[method-assign,assignment]
    for number in range(20):
        masters.step(batch(number))
        report = stepper.step(loss_of, batch(number))
        assert report.grad_norm == pytest.approx(norms[-1], rel=1e-6)
    for mine, theirs in zip(wide(stepper), masters.masters, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-8)


def test_an_average_is_that_of_the_fp32_weights() -> None:
    model, twin = net(), net()
    ema = Ema(model, 0.9)
    stepper = narrow(model, MAKE["adamw"](model.parameters()), ema=ema)
    masters = Masters(twin, MAKE["adamw"])
    expected = [p.detach().clone() for p in masters.masters]
    for number in range(20):
        stepper.step(loss_of, batch(number))
        masters.step(batch(number))
        for average, master in zip(expected, masters.masters, strict=True):
            average.lerp_(master.detach(), 0.1)
    assert equal(list(ema.averages().values()), expected)
    before = digest_of_run(stepper)
    with stepper.evaluating(ema=True) as model:
        assert torch.equal(model[0].weight, expected[0].bfloat16())
    assert digest_of_run(stepper) == before


# -- the update -----------------------------------------------------------------------------------------------------


def test_only_a_piece_is_in_fp32_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "LARGEST_PIECE", 600)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    seen, own = [], type(optimizer).step

    def step(self: Any, closure: Any = None) -> Any:
        seen.append([p.numel() for group in self.param_groups for p in group["params"]])
        return own(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    step.__module__ = "torch.optim.adamw"
    stepper = narrow(model, optimizer)
    stepper.step(loss_of, batch(0))
    assert sorted(size for piece in seen for size in piece) == [8, 64, 512, 2048]
    assert all(len(piece) == 1 or sum(piece) <= 600 for piece in seen)
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    assert set(optimizer.state) == set(model.parameters())


class Prodigy(torch.optim.SGD):
    """Counts its steps in its groups, as optimizers that learn their rate do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.wording
def test_an_optimizer_with_its_own_step_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "LARGEST_PIECE", 100)
    model = net()
    with pytest.warns(UserWarning, match="in fp32 at once"):
        stepper = narrow(model, Prodigy(model.parameters(), 0.1))
    for number in range(3):
        stepper.step(loss_of, batch(number))
    assert stepper.optimizers["loss"].param_groups[0]["k"] == 3


@pytest.mark.parametrize("check", [False, True])
def test_hooks_of_parameters_survive_the_start_check_and_an_update(check: bool) -> None:
    model, calls = net(), []
    model[0].weight.register_hook(lambda g: calls.append(g.dtype) or g)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))
    stepper = narrow(model, MAKE["adamw"](model.parameters()), check=check)
    for number in range(3):
        stepper.step(loss_of, batch(number))
    assert calls == [torch.float32] * 2 * check + [torch.bfloat16] * 2 * (3 + check)


def test_small_updates_are_not_lost() -> None:
    """At lr 1e-5 plain bf16 weights stand still; both formats move as fp32 does."""
    moved = {}
    for form in (SPLIT, STOCHASTIC, None):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        nn.init.normal_(model.weight, mean=0.2, std=0.02)
        start = model.weight.detach().clone()
        stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-5), precision=BF16, weight_format=form)
        for number in range(40):
            stepper.step(lambda m, x: m(x).float().square().mean(), batch(number)[0].repeat(1, 2))
        now = stepper.weights.wide(model.weight) if stepper.weights else model.weight.detach()
        moved[form] = (now - start).mean().item()
    assert moved[SPLIT] == pytest.approx(moved[None], rel=0.02)
    assert moved[STOCHASTIC] == pytest.approx(moved[None], rel=0.2)


def test_noise_comes_from_seed_update_and_parameter() -> None:
    def run(seed: int, draws: int) -> list[Tensor]:
        model = net()
        stepper = narrow(model, MAKE["adamw"](model.parameters()), STOCHASTIC, rounding_seed=seed)
        for number in range(5):
            torch.rand(draws)
            state = torch.random.get_rng_state()
            stepper.step(loss_of, batch(number))
            assert torch.equal(torch.random.get_rng_state(), state)
        return [p.detach().clone() for p in model.parameters()]

    first = run(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, run(0, 3), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, run(1, 0), strict=True))


# -- what stays in fp32 ---------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(8, 16), nn.LayerNorm(16)
        self.conv, self.statistics = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids)) * self.scale
        x = self.statistics(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.lstm(x)[0]).float()


def test_norms_recurrent_layers_and_islands_stay_wide() -> None:
    torch.manual_seed(0)
    model = Mixed()
    island(model, "head")
    stepper = narrow(model, MAKE["adamw"](model.parameters()), clip_norm=1.0)
    for _ in range(3):
        assert stepper.step(lambda m, x: m(x).square().mean(), torch.randint(0, 8, (4, 6))).applied
    stored = {name for name, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert stored == {"table.weight", "conv.weight", "conv.bias", "scale"}


def test_another_precision_widens_the_weights_and_the_first_one_narrows_them_again() -> None:
    model = net()
    stepper = narrow(model, MAKE["adamw"](model.parameters()))
    stepper.step(loss_of, batch(0))
    before = wide(stepper)
    stepper.change_precision("fp32")
    assert equal(before, [p.detach() for p in model.parameters()])
    assert stepper.step(loss_of, batch(1)).applied
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    stepper.change_precision("bf16")
    assert equal(before, wide(stepper))
    assert stepper.step(loss_of, batch(2)).applied


@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_the_start_check_compares_with_fp32_weights(form: str) -> None:
    model, twin = net(), net()
    checked = narrow(model, MAKE["adamw"](model.parameters()), form, check=True)
    plain = narrow(twin, MAKE["adamw"](twin.parameters()), form)
    for number in range(3):
        assert checked.step(loss_of, batch(number)) == plain.step(loss_of, batch(number))
    assert checked.start_check is not None
    assert not checked.start_check.not_checked
    assert not checked.start_check.deviations
    assert digest_of_run(checked) == digest_of_run(plain)


def test_weights_in_fp32_for_a_rerun_have_gradients_in_fp32() -> None:
    model = net()
    stepper = narrow(model, MAKE["adamw"](model.parameters()))
    for given in (Window([batch(0), batch(1)]), batch(2)):  # fp32 and then bf16, set by name
        stepper.step(loss_of, given)
    stored = [(p.data_ptr(), p.dtype, p.grad_dtype) for p in model.parameters()]
    with widen_trained_weights(model, resolve_precision_name("fp32")):
        loss_of(model, batch(0)).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert [(p.data_ptr(), p.dtype, p.grad_dtype) for p in model.parameters()] == stored
    assert all(p.grad is None for p in model.parameters())


def test_the_start_check_finds_a_parameter_without_a_gradient() -> None:
    model = net()
    stepper = narrow(model, MAKE["adamw"](model.parameters()), check=True)

    def cut_off(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        cut = torch.is_autocast_enabled("cpu")
        hidden = model[1](model[0](given[0]))
        return (model[2](hidden.detach() if cut else hidden).float() - given[1]).square().mean()

    with pytest.raises(StartCheckFailed):
        stepper.step(cut_off, batch(0))


@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_meters_do_not_count_updates_as_lost(form: str) -> None:
    """At lr 1e-5 most of the bf16 numbers stay; the low bits, or one update in many, move."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 2))
    stepper = narrow(model, optimizer, form, ema=Ema(model, 0.999), schedule=schedule, observe=False)
    meters, found = Meters(stepper, every=1), []
    for number in range(16):
        meters.before()
        found += meters.after(stepper.step(loss_of, batch(number)))
    assert found == []
    assert meters.readings.get("lost_update_share", 0.0) < 0.05


def test_an_unfrozen_layer_is_stored_as_the_others() -> None:
    model = net()
    model[0].requires_grad_(False)
    stepper = narrow(model, MAKE["adamw"](model.parameters()))
    stepper.step(loss_of, batch(0))
    assert model[0].weight.dtype is torch.float32
    model[0].requires_grad_(True)
    stepper.step(loss_of, batch(1))
    assert model[0].weight.dtype is torch.bfloat16


def test_another_layout_in_the_middle_of_a_run_changes_nothing() -> None:
    def run(when: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 8))
        stepper = narrow(model, MAKE["adamw"](model.parameters()))
        for number in range(6):
            if number == when:
                model.to(memory_format=torch.channels_last)
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(number))
            stepper.step(lambda m, x: m(x).float().square().mean(), x)
        return wide(stepper)

    for straight, changed in zip(run(-1), run(3), strict=True):
        torch.testing.assert_close(straight, changed, rtol=1e-3, atol=1e-5)


# -- state ----------------------------------------------------------------------------------------------------------


def make(form: str, seed: int) -> Stepper:
    model = net(seed=seed)
    return narrow(model, MAKE["adamw"](model.parameters()), form, ema=Ema(model, 0.9))


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_stop_save_load_go_on(form: str, model_first: bool) -> None:
    straight, first, second = make(form, 0), make(form, 0), make(form, 1)
    for number in range(12):
        straight.step(loss_of, batch(number))
    for number in range(5):
        first.step(loss_of, batch(number))
    weights, state = copy.deepcopy(first.model.state_dict()), copy.deepcopy(first.state_dict())
    if model_first:
        second.model.load_state_dict(weights)
    second.load_state_dict(state)
    if not model_first:
        second.model.load_state_dict(weights)
    for number in range(5, 12):
        second.step(loss_of, batch(number))
    assert digest_of_run(second) == digest_of_run(straight)
    assert equal(wide(second), wide(straight))


@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_a_rollback_restores_every_bit_more_than_once(form: str) -> None:
    stepper = make(form, 0)
    snapshot, after = RollbackSnapshot(stepper), set()
    stepper.step(loss_of, batch(0))
    snapshot.take()
    before = digest_of_run(stepper)
    for _ in range(2):
        stepper.step(loss_of, batch(1))
        after.add(digest_of_run(stepper))
        assert snapshot.restore() == 1
        assert digest_of_run(stepper) == before
    assert len(after) == 1


def test_a_compiled_model_continues_an_uncompiled_one() -> None:
    first = make(SPLIT, 0)
    first.step(loss_of, batch(0))
    inner = net(seed=1)
    model = torch.compile(inner, backend="eager")
    second = narrow(model, MAKE["adamw"](model.parameters()), ema=Ema(model, 0.9))
    inner.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for stepper in (first, second):
        stepper.step(loss_of, batch(1))
    assert equal(wide(first), wide(second))


class Odd(nn.Module):
    """Tied weights, and parameters of no element, of one, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight
        self.none, self.one, self.number = map(nn.Parameter, (torch.empty(0), torch.ones(1, 1), torch.ones(())))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) * self.one * self.number + self.none.sum())


@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_tied_and_tiny_parameters_in_groups_with_a_nan_between(form: str) -> None:
    def stepper(seed: int) -> Stepper:
        torch.manual_seed(seed)
        model = Odd()
        tiny = {"params": [model.none, model.one, model.number], "lr": 1e-2, "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": [model.table.weight]}, tiny], 1e-3)
        return narrow(model, optimizer, form, ema=Ema(model, 0.9), clip_norm=1.0, check=True)

    def loss(model: nn.Module, ids: Tensor, factor: float = 1.0) -> Tensor:
        return nn.functional.cross_entropy(model(ids).float(), ids.roll(1)) * factor

    first, second, ids = stepper(0), stepper(1), torch.arange(32)
    assert all(first.step(loss, ids + number).applied for number in range(3))
    before = digest_of_run(first)
    assert not first.step(lambda m, b: loss(m, b, float("nan")), ids).applied
    assert digest_of_run(first) == before
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(one.step(loss, ids + 3).applied for one in (first, second))
    assert digest_of_run(first) == digest_of_run(second) != before
    assert first.model.head.weight is first.model.table.weight


@pytest.mark.wording
def test_a_state_of_another_format_is_refused() -> None:
    split, stochastic = make(SPLIT, 0), make(STOCHASTIC, 0)
    model = net()
    plain = Stepper(model, MAKE["adamw"](model.parameters()), precision=BF16, ema=Ema(model, 0.9))
    for own, other in ((split, stochastic), (stochastic, split), (split, plain), (plain, split)):
        before = digest_of_run(own)
        with pytest.raises(StateMismatch) as refused:
            own.load_state_dict(other.state_dict())
        assert ("fp32" if other is plain else other.weights.format) in refused.value.do
        assert digest_of_run(own) == before


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_bf16_weights_are_taken_by_name_only() -> None:
    model = net().bfloat16()
    with pytest.raises(WrongUse) as refused:
        Stepper(model, torch.optim.AdamW(model.parameters()), precision=BF16)
    assert "weight_format='bf16-split'" in refused.value.allowed
    assert "'bf16-stochastic'" in refused.value.allowed
    adagrad = torch.optim.Adagrad(model.parameters(), 1e-3)
    stepper = narrow(model, adagrad)
    assert stepper.step(loss_of, batch(0)).applied
    assert {state["sum"].dtype for state in adagrad.state.values()} == {torch.float32}


class Refuses:
    name, same_on_all_ranks = "refuses", True

    def passes(self, report: Any) -> bool:
        return False


def test_a_step_that_a_guard_refuses_names_its_gradients_format() -> None:
    model = net()
    report = narrow(model, MAKE["sgd"](model.parameters()), guards=[Refuses()]).step(loss_of, batch(0))
    assert (report.applied, report.gradient_format) == (False, "bf16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_precision_that_does_not_compute_in_bf16_is_refused(precision: str) -> None:
    model = net()
    with pytest.raises(WrongUse):
        Stepper(
            model, MAKE["sgd"](model.parameters()), precision=resolve_precision_name(precision), weight_format=SPLIT
        )


def test_unknown_names_are_refused() -> None:
    model = net()
    for wrong in ({"weight_format": "bf16"}, {"weight_format": SPLIT, "gradient_sums": "fp16"}):
        with pytest.raises(UnknownName):
            Stepper(model, MAKE["sgd"](model.parameters()), precision=BF16, **wrong)
    with pytest.raises(WrongUse):
        narrow(net().half(), torch.optim.SGD(net().parameters(), 0.1))


def test_a_wrapper_round_an_optimizer_is_refused() -> None:
    class Wrapper(torch.optim.SGD):
        inner: Any = None

    model = net()
    wrapper = Wrapper(model.parameters(), 0.1)
    wrapper.inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WrongUse):
        narrow(model, wrapper)


@pytest.mark.parametrize(
    ("package", "name"), [("torchao.optim", "CPUOffloadOptimizer"), ("bitsandbytes.optim.adamw", "PagedAdamW8bit")]
)
@pytest.mark.wording
def test_optimizers_that_offload_by_themselves_are_refused(package: str, name: str) -> None:
    model = net()
    kind = type(name, (torch.optim.SGD,), {"__module__": package})
    with pytest.raises(WrongUse, match=name):
        Stepper(model, kind(model.parameters(), 0.1), precision="fp32")


# -- ranks ----------------------------------------------------------------------------------------------------------


def on_rank(rank: int, form: str, steps: int) -> list[list[float]]:
    torch.manual_seed(rank)  # other weights, other dropout
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 8))
    stepper = narrow(model, torch.optim.AdamW(model.parameters(), 1e-3), form, clip_norm=1.0)
    for number in range(steps):
        torch.rand(rank)
        report = stepper.step(loss_of, batch(2 * number + rank))
        assert report.gradient_format == "fp32"
    assert not stepper.step(lambda m, b: loss_of(m, b) * float("nan"), batch(0)).applied
    return [one.view(torch.int32).flatten().tolist() for one in wide(stepper)]


@pytest.mark.ranks
@pytest.mark.parametrize("form", [SPLIT, STOCHASTIC])
def test_replicas_stay_equal_to_the_bit(on_ranks: Ranks, form: str) -> None:
    first, second = on_ranks(on_rank, form, 50)
    assert first == second


def until_all_are_done(rank: int, form: str) -> list[list[int]]:
    model = net(seed=rank)
    stepper = narrow(model, torch.optim.AdamW(model.parameters(), 1e-3), form, clip_norm=1.0)
    for number in range(2 + rank):
        assert stepper.step(loss_of, Window([batch(number), batch(7 + number)])).applied
    while stepper.step(None) is not None:
        pass
    assert stepper.counts.applied == 3
    return [one.view(torch.int32).flatten().tolist() for one in wide(stepper)]


@pytest.mark.ranks
def test_ranks_with_unequal_numbers_of_batches_end_together(on_ranks: Ranks) -> None:
    first, second = on_ranks(until_all_are_done, SPLIT)
    assert first == second
