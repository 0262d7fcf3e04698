"""Models and optimizers change in the middle of training; buffers come in every shape; nothing may slip through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Counted, Ema, Stepper, Window, island
from halfstep.errors import StateMismatch, WrongUse
from tests.support.digest import digest_of_run
from tests.support.models import plain_model


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def bad(model: nn.Module, x: Tensor) -> Tensor:
    return mse(model, x) * float("nan")


def make(model: nn.Module, precision: str = "fp32", **options: Any) -> Stepper:
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, **options)


# -- who takes part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_head_that_replaces_another_is_guarded_and_unscaled(precision: str) -> None:
    model = plain_model()
    stepper = make(model, precision)
    stepper.step(mse, torch.randn(6, 8))
    model[2] = nn.Linear(16, 4)
    stepper.optimizers["loss"].param_groups[0]["params"][-2:] = list(model[2].parameters())
    before = model[2].weight.detach().clone()
    assert stepper.step(mse, torch.randn(6, 8)).applied
    assert 0 < (model[2].weight - before).norm().item() < 1.0
    model[2].weight.register_hook(lambda g: g * float("nan"))
    assert not stepper.step(mse, torch.randn(6, 8)).applied
    assert torch.isfinite(model[2].weight).all()


def test_gradients_from_before_the_window_are_not_part_of_it() -> None:
    model = plain_model()
    stepper = make(model)
    x = torch.randn(6, 8)
    expected = make(plain_model()).step(mse, x).grad_norm
    (mse(model, x) * 1000).backward()
    assert stepper.step(mse, x).grad_norm == pytest.approx(expected, rel=1e-6)


def test_an_unfrozen_layer_leaves_no_old_gradient_for_its_optimizer() -> None:
    model = plain_model()
    model[2].requires_grad_(False)
    stepper = Stepper(model, torch.optim.SGD(model[0].parameters(), 0.0), precision="fp32")
    x = torch.randn(6, 8)
    stepper.step(mse, x)
    model[2].requires_grad_(True)
    for _ in range(5):
        stepper.step(mse, x)
    stepper.optimizers["loss"].add_param_group({"params": list(model[2].parameters())})
    first, second = stepper.step(mse, x), stepper.step(mse, x)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6)


@pytest.mark.wording
def test_weights_unfrozen_in_16_bits_are_refused_when_it_happens() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False).bfloat16()
    stepper = make(model, "bf16")
    assert stepper.step(mse, torch.randn(6, 8)).applied
    model[0].requires_grad_(True)
    for _ in range(2):
        with pytest.raises(WrongUse, match=r"stored in 16 bits: 0\.weight"):
            stepper.step(mse, torch.randn(6, 8))


@pytest.mark.wording
def test_a_model_cast_to_16_bits_in_mid_training_is_refused() -> None:
    model = plain_model()
    stepper = make(model, "bf16")
    stepper.step(mse, torch.randn(6, 8))
    model.bfloat16()
    for _ in range(2):
        with pytest.raises(WrongUse, match="stored in 16 bits"):
            stepper.step(mse, torch.randn(6, 8))


def test_a_module_that_comes_later_is_rolled_back_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4))
    stepper = make(model)
    stepper.step(mse, torch.randn(6, 8))
    model[1] = nn.BatchNorm1d(8, affine=False)
    assert not stepper.step(bad, torch.randn(6, 8) * float("nan")).applied
    assert torch.equal(model[1].running_mean, torch.zeros(8))
    assert model[1].num_batches_tracked.item() == 0


def test_an_island_that_comes_later_settles_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 4))
    stepper = make(model, "bf16")
    stepper.step(mse, torch.randn(6, 8))
    model[1] = island(nn.LayerNorm(8, elementwise_affine=False))
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    stepper.step(mse, torch.randn(6, 8))
    assert seen == [torch.bfloat16]


def test_a_frozen_parameter_in_one_of_several_optimizers() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    model["a"].bias.requires_grad_(False)
    stepper = Stepper(model, {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in ("a", "b")}, precision="fp32")
    assert stepper.step(lambda m, x: {n: m[n](x).square().mean() for n in ("a", "b")}, torch.randn(3, 8)).applied


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(optimizer: Any) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    stepper = Stepper(model, optimizer(model.parameters(), 0.1), precision="fp32", clip_norm=0.01)
    before = model.weight.detach().clone()
    index = torch.tensor([1, 1, 3])
    report = stepper.step(lambda m, i: m(i).square().sum(), index)
    dense = torch.autograd.grad(nn.functional.embedding(index, before.requires_grad_()).square().sum(), before)[0]
    assert report.applied
    assert report.grad_norm == pytest.approx(dense.norm().item(), rel=1e-6)
    assert (model.weight != before).any(1).nonzero().flatten().tolist() == [1, 3]
    if optimizer is torch.optim.SGD:
        assert (model.weight - before).norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert not stepper.step(lambda m, i: m(i).square().sum() * float("inf"), index).applied


# -- buffers of every kind -----------------------------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self, buffer: Tensor, write: Any) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(8, 4), write
        self.register_buffer("kept", buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return self.linear(x)


def resize(m: Any) -> None:
    m.kept.resize_(7).fill_(1.0)  # new elements are unset memory: NaN at times


def set_sparse(m: Any) -> None:
    m.kept = (m.kept * 2).coalesce()


BUFFERS = {
    "behind the version counter's back": (torch.zeros(3, dtype=torch.int64), lambda m: m.kept.data.add_(1)),
    "a codebook, behind its back": (torch.zeros(2048, 64), lambda m: m.kept.data.add_(1)),
    "large": (torch.zeros(2**22), lambda m: m.kept.add_(1)),
    "resized": (torch.zeros(3), resize),
    "expanded with NaN": (torch.full((1,), float("nan")).expand(4), lambda m: None),
    "not contiguous": (torch.zeros(4, 6).t(), lambda m: m.kept.add_(1)),
    "sparse": (torch.eye(3).to_sparse(), set_sparse),
    "boolean": (torch.zeros(3, dtype=torch.bool), lambda m: m.kept.logical_not_()),
    "complex": (torch.zeros(3, dtype=torch.complex64), lambda m: m.kept.add_(1j)),
    "empty": (torch.zeros(0), lambda m: m.kept.resize_(2).zero_()),
}


def dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_every_kind_of_buffer_is_as_it_was(kind: str) -> None:
    buffer, write = BUFFERS[kind]
    model = Holds(buffer.clone() if not kind.startswith("expanded") else buffer, write)
    stepper = make(model)
    for _ in range(3):
        assert stepper.step(mse, torch.randn(6, 8)).applied
    before = dense(model.kept).clone()
    for _ in range(2):
        assert stepper.step(bad, torch.randn(6, 8)).reason == "loss_not_finite"
        assert model.kept.shape == before.shape
        assert torch.equal(dense(model.kept).nan_to_num(7.0), before.nan_to_num(7.0))
    with pytest.raises(KeyError, match="mine"):
        stepper.step(lambda m, x: (m(x), {}["mine"]), torch.randn(6, 8))
    assert stepper.step(mse, torch.randn(6, 8)).applied


@pytest.mark.wording
def test_a_buffer_made_under_inference_mode() -> None:
    model = Holds(torch.zeros(3), lambda m: None)
    stepper = make(model)
    with torch.inference_mode():
        model.kept = torch.ones(3) * 2
        with pytest.raises(WrongUse, match="inference_mode"):
            stepper.step(mse, torch.randn(6, 8))
    assert stepper.step(mse, torch.randn(6, 8)).applied
    assert not stepper.step(bad, torch.randn(6, 8)).applied
    assert model.kept.tolist() == [2.0, 2.0, 2.0]
    with torch.no_grad(), pytest.raises(WrongUse, match="no_grad"):
        stepper.step(mse, torch.randn(6, 8))


# -- averages ------------------------------------------------------------------------------------------------------


def test_an_average_of_the_generator_alone() -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))})
    same = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    for pair in (model, same):
        optimizers = {n: torch.optim.SGD(pair[n].parameters(), 0.1) for n in ("g", "d")}
        stepper = Stepper(pair, optimizers, precision="fp32", ema=Ema(pair["g"], 0.5))
        loss = lambda m, x: m["d"](m["g"](x)).square().mean()  # noqa: E731
        assert stepper.step(loss, torch.randn(3, 4), only="g").applied
        before = {k: v.clone() for k, v in stepper.ema.averages().items()}
        assert not torch.equal(before["weight"], pair["g"].weight)
        for _ in range(2):
            assert stepper.step(loss, torch.randn(3, 4), only="d").applied
        assert all(torch.equal(v, before[k]) for k, v in stepper.ema.averages().items())
        twin = copy.deepcopy(stepper)
        for each in (stepper, twin):
            assert each.step(loss, torch.randn(3, 4), only="g").applied
            assert not torch.equal(each.ema.averages()["weight"], before["weight"])


def test_the_average_follows_a_new_head_and_an_unfrozen_layer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = Stepper(model, optimizer, precision="fp32", ema=Ema(model, 0.9))
    for _ in range(3):
        stepper.step(mse, torch.randn(6, 8))
    assert stepper.ema.state_dict()["buffers"]["1.num_batches_tracked"].item() == 3
    assert torch.equal(stepper.ema.state_dict()["buffers"]["1.running_mean"], model[1].running_mean)
    old = stepper.ema.averages()["1.weight"].clone()
    model[0].requires_grad_(True)
    model[2] = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"][-2:] = list(model[2].parameters())
    stepper.step(mse, torch.randn(6, 8))
    averages = stepper.ema.averages()
    assert set(averages) == set(dict(model.named_parameters()))
    assert averages["2.weight"].shape == (2, 8)
    assert torch.allclose(averages["1.weight"], 0.9 * old + 0.1 * model[1].weight, atol=1e-6)
    assert not torch.equal(averages["2.weight"], model[2].weight)


@pytest.mark.wording
def test_buffers_of_another_model_are_refused() -> None:
    ema = Ema(nn.BatchNorm1d(3))
    state = ema.state_dict()
    with pytest.raises(StateMismatch, match="buffers of another model: zz"):
        ema.load_state_dict({**state, "buffers": {"zz": torch.ones(1)}})


def test_averages_of_wide_and_complex_weights() -> None:
    for dtype in (torch.float64, torch.complex64):
        model = nn.Linear(4, 4, dtype=dtype)
        stepper = Stepper(
            model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", ema=Ema(model), observe=False
        )
        x = torch.randn(3, 4, dtype=dtype)
        assert all(stepper.step(lambda m, x: m(x).abs().mean(), x).applied for _ in range(2))
        assert stepper.ema.averages()["weight"].dtype is dtype


@pytest.mark.wording
def test_an_average_of_another_model_is_refused() -> None:
    with pytest.raises(WrongUse, match="Ema of another model"):
        make(plain_model(), ema=Ema(plain_model()))


# -- words and numbers ---------------------------------------------------------------------------------------------


def test_a_count_that_is_not_finite_does_not_stay() -> None:
    stepper = make(plain_model())
    for count in (float("inf"), float("nan"), 0):
        assert not stepper.step(lambda m, x, n=count: Counted(m(x).square().sum(), n), torch.randn(6, 8)).applied
    assert stepper.state_dict()["losses"]["loss"]["base_count"] is None
    assert stepper.step(lambda m, x: Counted(m(x).square().sum(), 6), torch.randn(6, 8)).applied


@pytest.mark.wording
@pytest.mark.parametrize("first", [0, 1])
def test_two_kinds_of_loss_in_one_window_are_refused_in_either_order(first: int) -> None:
    turn = iter([first, 1 - first])

    def mixed(model: nn.Module, x: Tensor) -> Any:
        total = model(x).square().sum()
        return Counted(total, 6) if next(turn) else total

    with pytest.raises(WrongUse, match="the same for every micro-batch"):
        make(plain_model()).step(mixed, Window([torch.randn(6, 8)] * 2))


@pytest.mark.wording
@pytest.mark.parametrize("limit", [-1.0, 0, float("nan"), "1.0"])
def test_limits_that_cannot_be_meant(limit: Any) -> None:
    for name in ("clip_norm", "clip_value"):
        with pytest.raises(WrongUse, match="a positive number"):
            make(plain_model(), **{name: limit})


@pytest.mark.wording
def test_a_schedule_of_another_optimizer_is_refused() -> None:
    model = plain_model()
    other = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WrongUse, match="StepLR of another optimizer"):
        make(model, schedule=torch.optim.lr_scheduler.StepLR(other, 1))


@pytest.mark.wording
def test_an_optimizer_that_requires_a_closure_is_refused() -> None:
    class Sharpness(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    model = plain_model()
    with pytest.raises(WrongUse, match="Sharpness, which evaluates the loss several times"):
        Stepper(model, Sharpness(model.parameters(), 0.1), precision="fp32")


@pytest.mark.wording
def test_weights_that_hold_no_numbers_are_refused() -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(WrongUse, match="weight, bias on the meta device"):
        make(model)


@pytest.mark.wording
def test_a_state_of_another_width_is_refused_before_anything_changes() -> None:
    def adam(width: int) -> Stepper:
        torch.manual_seed(width)
        model = nn.Linear(8, width)
        return Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision="fp32")

    wide, narrow = adam(16), adam(8)
    for stepper in (wide, narrow):
        stepper.step(mse, torch.randn(3, 8))
    before = digest_of_run(wide)
    with pytest.raises(StateMismatch, match=r"saved with shape \(8, 8\)"):
        wide.load_state_dict(narrow.state_dict())
    spoiled = copy.deepcopy(wide.state_dict())
    spoiled["counts"].pop("applied")
    spoiled["optimizers"]["loss"]["optimizer"]["param_groups"][0]["lr"] = 9.0
    with pytest.raises(StateMismatch, match="counts saved without applied"):
        wide.load_state_dict(spoiled)
    assert digest_of_run(wide) == before
    assert wide.optimizers["loss"].param_groups[0]["lr"] == 1e-2


# -- the context form, out of turn ---------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_dropped_micro_batch_is_refused_or_discarded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    stepper = make(model)
    before = digest_of_run(stepper)
    with stepper.forward():
        mse(model, torch.randn(6, 8) * float("nan"))
    with pytest.raises(WrongUse, match="before backward"), stepper.forward():
        pass
    with pytest.raises(WrongUse, match="discard"):
        stepper.apply()
    stepper.discard()
    assert digest_of_run(stepper) == before
    assert stepper.counts.attempted == 0
    stepper.discard()
    with stepper.forward():
        loss = mse(model, torch.randn(6, 8))
    stepper.backward(loss)
    assert stepper.apply().applied


@pytest.mark.wording
def test_a_forward_that_was_refused_is_not_in_turn() -> None:
    stepper = make(plain_model())
    with torch.no_grad(), pytest.raises(WrongUse, match="no_grad"), stepper.forward():
        pass
    with stepper.forward():
        loss = mse(stepper.model, torch.randn(6, 8))
    stepper.backward(loss)
    assert stepper.apply().applied


@pytest.mark.wording
def test_apply_needs_a_last_micro_batch() -> None:
    stepper = make(plain_model())
    with stepper.forward(last=False):
        loss = mse(stepper.model, torch.randn(6, 8))
    stepper.backward(loss)
    with pytest.raises(WrongUse, match=r"after forward\(last=False\)"):
        stepper.apply()
    with stepper.forward(last=True):
        loss = mse(stepper.model, torch.randn(6, 8))
    stepper.backward(loss)
    assert stepper.apply().applied


def test_one_graph_at_a_time_in_a_window() -> None:
    """Of several losses too: what the last micro-batch kept for its backward is gone before the next forward."""
    import gc
    import weakref

    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    stepper = Stepper(model, {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in ("a", "b")}, precision="fp32")
    stepper.step(lambda m, x: {n: m[n](x).square().mean() for n in ("a", "b")}, torch.randn(3, 8))
    hidden: list[Any] = []
    alive: list[int] = []

    def losses(m: Any, x: Tensor) -> dict[str, Tensor]:
        gc.collect()
        alive.append(sum(ref() is not None for ref in hidden))
        shared = m["a"](x).exp()
        hidden.append(weakref.ref(shared))
        return {"a": shared.square().mean(), "b": m["b"](shared).square().mean()}

    stepper.step(losses, Window([torch.randn(3, 8) for _ in range(3)]))
    assert alive == [0, 0, 0]


# -- lazy modules ---------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_lazy_modules_are_refused_until_a_batch_has_shaped_them() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(1))
    with pytest.raises(
        WrongUse, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias, 1\.running_mean and 1 more"
    ) as refused:
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    assert "torch.no_grad()" in refused.value.do
    with torch.no_grad():
        model(torch.randn(4, 8))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    assert stepper.step(mse, torch.randn(4, 8)).applied
    model[2] = nn.LazyLinear(1)
    with pytest.raises(WrongUse, match=r"2\.weight, 2\.bias of lazy modules"):
        stepper.step(mse, torch.randn(4, 8))


@pytest.mark.wording
def test_a_lazy_buffer_alone_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(WrongUse, match=r"1\.running_mean, 1\.running_var"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
