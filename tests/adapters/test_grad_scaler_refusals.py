"""What the three-call form notices and names, what it must not mistake for a fault, and what it cannot protect."""

from __future__ import annotations

import gc
import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import WrongUse
from tests.support.digest import digest_of
from tests.support.models import plain_model

NAN, INF = float("nan"), float("inf")


class Bench:
    """A model, an optimizer and a scaler, to write a loop around."""

    def __init__(self, kind: Any = torch.optim.AdamW, scaler: Any = halfstep.GradScaler, **options: Any) -> None:
        self.model: Any = plain_model()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.scaler = scaler("cpu", **{"init_scale": 1024.0, **options})

    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            loss: Tensor = self.model(torch.randn(6, 8)).float().square().mean()
        return loss

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()

    def window(self) -> halfstep.StepReport:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.report

    def digest(self) -> str:
        return digest_of(self.model.state_dict(), self.optimizer.state_dict())


@pytest.fixture(params=["first", "later"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """In the first window of a loop, where no optimizer is known yet, and in a later one."""
    made = Bench()
    if request.param == "later":
        made.window()
    return made


def refused(bench: Bench, call: Any, words: str) -> WrongUse:
    before = bench.digest()
    with pytest.raises(WrongUse, match=words) as caught:
        call()
    assert caught.value.allowed
    assert caught.value.do
    assert bench.digest() == before
    return caught.value


# -- noticed ----------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize("clip", [lambda p: clip_grad_norm_(p, 1.0), lambda p: clip_grad_value_(p, 0.1)])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_clipping_before_unscaling(bench: Bench, call: str, clip: Any) -> None:
    bench.backward()
    clip(bench.model.parameters())
    error = refused(
        bench, lambda: getattr(bench.scaler, call)(bench.optimizer), "4 of 4 gradients of AdamW were written"
    )
    assert "unscale_(optimizer) before clip_grad_norm_" in error.do


@pytest.mark.wording
def test_a_backward_that_was_not_scaled(bench: Bench) -> None:
    bench.backward()
    bench.loss().backward()
    refused(bench, lambda: bench.scaler.step(bench.optimizer), "a backward that was not scaled")


@pytest.mark.wording
def test_a_step_of_the_optimizer_in_a_window() -> None:
    bench = Bench()
    bench.window()
    bench.backward()
    refused(bench, bench.optimizer.step, r"AdamW.step\(\) was called directly")
    bench.scaler.unscale_(bench.optimizer)
    refused(bench, bench.optimizer.step, "called directly")
    bench.scaler.step(bench.optimizer)
    refused(bench, bench.optimizer.step, "called directly")
    bench.scaler.update()
    refused(bench, bench.optimizer.step, "called directly")  # the same gradients a second time


@pytest.mark.wording
def test_limit_a_step_of_the_optimizer_in_the_first_window() -> None:
    known, unknown = Bench(), Bench()
    known.scaler.include(known.optimizer)
    known.backward()
    refused(known, known.optimizer.step, "called directly")
    unknown.backward()
    unknown.optimizer.step()  # nobody has named this optimizer yet
    with pytest.raises(WrongUse, match=r"instead of scaler.step\(optimizer\)"):
        unknown.scaler.update()


@pytest.mark.wording
def test_gradients_of_a_skipped_step_are_not_applied_beside_it() -> None:
    bench = Bench(precision="bf16")
    bench.window()
    bench.optimizer.zero_grad()
    bench.scaler.scale(bench.loss() * NAN).backward()
    bench.scaler.unscale_(bench.optimizer)
    clip_grad_norm_(bench.model.parameters(), 1.0)
    bench.scaler.step(bench.optimizer)
    bench.scaler.update()
    refused(bench, bench.optimizer.step, "called directly")


@pytest.mark.wording
def test_an_update_that_is_missing(bench: Bench) -> None:
    bench.backward()
    bench.scaler.step(bench.optimizer)
    bench.backward()
    for call in (bench.scaler.unscale_, bench.scaler.step):
        refused(bench, lambda call=call: call(bench.optimizer), r"after its step\(\), without update\(\)")


@pytest.mark.wording
def test_an_update_too_many(bench: Bench) -> None:
    bench.backward()
    refused(bench, bench.scaler.update, r"update\(\) without step\(\)")  # after every micro-batch, for example
    bench.scaler.step(bench.optimizer)
    bench.scaler.update()
    refused(bench, bench.scaler.update, r"update\(\) without step\(\)")


@pytest.mark.wording
def test_a_step_without_scale(bench: Bench) -> None:
    bench.loss().backward()
    for call in (bench.scaler.unscale_, bench.scaler.step):
        refused(bench, lambda call=call: call(bench.optimizer), r"without scale\(\) since the last update")


@pytest.mark.wording
def test_unscaling_in_every_microbatch(bench: Bench) -> None:
    bench.backward()
    bench.scaler.unscale_(bench.optimizer)
    refused(bench, lambda: bench.scaler.unscale_(bench.optimizer), "already unscaled in this window")
    refused(bench, lambda: bench.scaler.scale(bench.loss()).backward(), "a backward pass into gradients that unscale_")


@pytest.mark.wording
def test_unscaling_and_updating_in_every_microbatch(bench: Bench) -> None:
    """The remedy that people find for the message above: the scale changes inside a window, and gradients mix."""
    bench.backward()
    bench.scaler.unscale_(bench.optimizer)
    bench.scaler.update()
    refused(bench, lambda: bench.scaler.scale(bench.loss()).backward(), "a backward pass into gradients that unscale_")


@pytest.mark.wording
def test_an_optimizer_without_gradients(bench: Bench) -> None:
    bench.backward()
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    refused(bench, lambda: bench.scaler.step(other), "no parameter of SGD has a gradient")


@pytest.mark.wording
def test_a_closure() -> None:
    bench = Bench()
    bench.backward()
    for given in ((lambda: 0.0,), {"closure": lambda: 0.0}):
        keyword = isinstance(given, dict)
        call = (
            (lambda g=given: bench.scaler.step(bench.optimizer, **g))
            if keyword
            else (lambda g=given: bench.scaler.step(bench.optimizer, *g))
        )
        refused(bench, call, "a closure for AdamW")
    bench.scaler.step(bench.optimizer, None)  # as accelerate calls it
    bench.scaler.update()
    assert bench.scaler.report.applied


@pytest.mark.wording
@pytest.mark.parametrize(
    ("pain", "words"),
    [
        ("p04_clipping_before_unscaling", "written between backward and unscale_"),
        ("p24_optimizer_over_the_wrong_parameters", "no parameter of AdamW has a gradient"),
        ("p36_optimizer_stepped_beside_the_scaler", "called directly"),
        ("d20_fused_momentum_from_unset_memory", None),
    ],
)
def test_plain_loops_of_the_zoo_with_the_scaler_replaced(
    pain: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = importlib.import_module(f"zoo.{pain}.plain")
    monkeypatch.setattr(torch.amp, "GradScaler", halfstep.GradScaler)
    if words is None:
        assert plain.run().good
        return
    with pytest.raises(WrongUse, match=words):
        plain.run()


# -- not mistaken for a fault -----------------------------------------------------------------------------------------


def test_gradients_that_are_summed_by_hand_are_accepted() -> None:
    bench = Bench()
    bench.window()
    bench.backward()
    for parameter in bench.model.parameters():
        parameter.grad.mul_(2.0).div_(2.0)  # as a mean over ranks
    bench.scaler.accept_gradients(bench.optimizer)
    bench.scaler.step(bench.optimizer)
    bench.scaler.update()
    assert bench.scaler.report.applied


@pytest.mark.parametrize("how", ["set_to_none", "zeros", "never"])
@pytest.mark.parametrize("clip", [False, True])
def test_every_way_to_clear_gradients(how: str, clip: bool) -> None:
    bench = Bench(torch.optim.SGD)
    for _ in range(4):
        if how != "never":
            bench.optimizer.zero_grad(set_to_none=how == "set_to_none")
        bench.scaler.scale(bench.loss()).backward()
        if clip:
            bench.scaler.unscale_(bench.optimizer)
            clip_grad_norm_(bench.model.parameters(), 0.1)
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        assert bench.scaler.report.applied


def test_a_window_left_out_and_cleared_with_zeros() -> None:
    bench = Bench()
    bench.backward()
    bench.scaler.unscale_(bench.optimizer)
    bench.scaler.update()
    bench.optimizer.zero_grad(set_to_none=False)
    bench.scaler.scale(bench.loss()).backward()
    bench.scaler.step(bench.optimizer)
    bench.scaler.update()
    assert bench.scaler.report.applied


def test_iterations_that_the_loop_drops() -> None:
    """`continue` after forward, after backward, and after an error in backward."""
    bench = Bench()
    bench.window()
    bench.scaler.scale(bench.loss())
    bench.backward()
    loss = bench.loss()
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.scaler.scale(loss).backward()
    assert bench.window().applied


@pytest.mark.wording
def test_parts_of_the_model_without_a_gradient_or_thawed_later() -> None:
    bench = Bench()
    bench.model[0].requires_grad_(False)
    assert bench.window().applied
    bench.model[0].requires_grad_(True)
    assert bench.window().applied
    head = nn.Linear(8, 4)
    bench.optimizer.add_param_group({"params": list(head.parameters())})
    bench.optimizer.zero_grad()
    bench.scaler.scale(bench.loss() + head(torch.randn(2, 8)).square().mean()).backward()
    clip_grad_norm_(bench.model.parameters(), 0.1)
    with pytest.raises(WrongUse, match="were written"):
        bench.scaler.step(bench.optimizer)


def test_a_gradient_penalty() -> None:
    """torch's recipe: the inner gradients are scaled by hand, and write no gradient."""
    bench = Bench()
    bench.window()
    for _ in range(3):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        inner = torch.autograd.grad(bench.scaler.scale(loss), list(bench.model.parameters()), create_graph=True)
        inverse = 1.0 / bench.scaler.get_scale()
        loss = loss + sum((g * inverse).square().sum() for g in inner)
        bench.scaler.scale(loss).backward()
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        assert bench.scaler.report.applied
        assert bench.scaler.report.loss == pytest.approx(loss.item())


def test_gradients_that_are_computed_and_put_there() -> None:
    bench = Bench()
    for _ in range(3):
        gradients = torch.autograd.grad(bench.scaler.scale(bench.loss()), list(bench.model.parameters()))
        for parameter, gradient in zip(bench.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        assert bench.scaler.report.applied


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    bench = Bench()
    for _ in range(3):
        bench.optimizer.zero_grad()
        x = torch.randn(6, 8, requires_grad=True)
        bench.scaler.scale(checkpoint(bench.model, x, use_reentrant=reentrant).square().mean()).backward()
        bench.scaler.unscale_(bench.optimizer)
        clip_grad_norm_(bench.model.parameters(), 1.0)
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        assert bench.scaler.report.applied


def test_a_gan_in_turns_with_one_scaler() -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
    of_g = torch.optim.Adam(generator.parameters(), 1e-2)
    of_d = torch.optim.Adam(discriminator.parameters(), 1e-2)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    scaler.include(generator, discriminator)
    for turn in range(4):
        of_d.zero_grad()
        fake = generator(torch.randn(6, 4))
        loss_d = discriminator(fake.detach()).square().mean() * (INF if turn == 2 else 1.0)
        scaler.scale(loss_d).backward()
        scaler.step(of_d)
        assert scaler.report.applied == (turn != 2)
        of_g.zero_grad()
        scaler.scale((discriminator(fake) - 1).square().mean()).backward()  # also into the discriminator
        scaler.unscale_(of_g)
        clip_grad_norm_(generator.parameters(), 1.0)
        scaler.step(of_g)
        scaler.update()
        assert scaler.report.applied  # the other half's loss is not this one's
    assert (scaler.counts.applied, dict(scaler.counts.skipped)) == (7, {"loss_not_finite": 1})


def test_two_scalers_for_two_losses_of_one_model() -> None:
    bench, other = Bench(), halfstep.GradScaler("cpu")
    head = nn.Linear(4, 1)
    of_head = torch.optim.SGD(head.parameters(), 1e-2)
    for _ in range(3):
        assert bench.window().applied
        of_head.zero_grad()
        other.scale(head(bench.model(torch.randn(6, 8))).square().mean()).backward()  # into the model's gradients, too
        other.step(of_head)
        other.update()
        assert other.report is not None
        assert other.report.applied


def test_a_loss_of_another_kind_is_trained_without_the_scaler() -> None:
    bench = Bench()
    bench.window()
    before = bench.digest()
    bench.optimizer.zero_grad()
    bench.loss().backward()
    bench.optimizer.step()
    assert bench.digest() != before
    assert bench.window().applied


def test_in_bf16_the_scaled_loss_may_be_left_out() -> None:
    bench = Bench(precision="bf16")
    for factor, applied in ((1.0, True), (NAN, False), (1.0, True)):
        bench.optimizer.zero_grad()
        before = bench.digest()
        (bench.loss() * factor).backward()
        clip_grad_norm_(bench.model.parameters(), 1.0)  # nothing is scaled, so nothing is out of order
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        assert bench.scaler.report.applied == applied
        assert (bench.digest() == before) == (not applied)


def test_sparse_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    for factor, applied in ((1.0, True), (NAN, False)):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        scaler.scale(table(torch.tensor([1, 3, 3])).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.report is not None
        assert scaler.report.applied == applied
        assert torch.equal(before, table.weight) == (not applied)


def test_nothing_keeps_a_scaler_alive() -> None:
    bench = Bench()
    bench.scaler.include(bench.model)
    bench.window()
    seen = weakref.ref(bench.scaler)
    bench.scaler = None
    gc.collect()
    assert seen() is None
    bench.loss().backward()
    bench.optimizer.step()  # and its hooks are still


@pytest.mark.parametrize("factor", [1.0, INF])
def test_an_update_after_each_of_two_optimizers_as_accelerate_does(factor: float) -> None:
    """Unscaled together, so decided on together; the second is neither refused nor unscaled a second time."""
    bench = Bench()
    halves = [torch.optim.SGD(part.parameters(), 1.0) for part in (bench.model[0], bench.model[2])]
    for turn in range(3):
        before = [p.detach().clone() for p in bench.model.parameters()]
        bench.model.zero_grad()
        bench.scaler.scale(bench.loss() * (factor if turn == 1 else 1.0)).backward()
        for optimizer in halves:
            bench.scaler.unscale_(optimizer)
        clip_grad_norm_(bench.model.parameters(), 0.1)
        for optimizer in halves:
            bench.scaler.step(optimizer)
            bench.scaler.update()
        moved = [(p - b).norm().item() for p, b in zip(bench.model.parameters(), before, strict=True)]
        skipped = turn == 1 and factor == INF
        assert bench.scaler.report.applied == (not skipped)
        assert torch.tensor(moved).norm().item() == pytest.approx(0.0 if skipped else 0.1, rel=1e-4)
        assert bench.scaler.counts.attempted == turn + 1
    assert bench.scaler._get_growth_tracker() == bench.scaler.counts.applied  # once for each window


def test_a_step_that_never_came_is_forgotten() -> None:
    bench = Bench()
    halves = [torch.optim.SGD(part.parameters(), 1.0) for part in (bench.model[0], bench.model[2])]
    for _ in range(3):
        bench.model.zero_grad()
        bench.scaler.scale(bench.loss()).backward()
        for optimizer in halves:
            bench.scaler.unscale_(optimizer)
        bench.scaler.step(halves[0])
        bench.scaler.update()
        assert bench.scaler.report.applied


# -- a NaN that comes from clipping -----------------------------------------------------------------------------------


def test_a_clipping_norm_that_another_parameter_made_nan() -> None:
    """`clip_grad_norm_` over more than the optimizer has: its NaN reaches gradients that were checked already."""
    bench = Bench()
    bench.window()
    bench.backward()
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.full((2,), NAN)
    bench.scaler.unscale_(bench.optimizer)
    clip_grad_norm_([*bench.model.parameters(), foreign], 1.0)
    before = bench.digest()
    bench.scaler.step(bench.optimizer)
    bench.scaler.update()
    assert bench.scaler.report.reason == "gradient_overflow"
    assert bench.digest() == before


# -- what it cannot protect: as docs/adapters/grad_scaler.md says ----------------------------------------------------


def test_limit_a_first_optimizer_has_stepped_when_a_second_one_is_skipped() -> None:
    bench = Bench()
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (bench.model[0], bench.model[2])]
    bench.scaler.scale(bench.loss()).backward()
    bench.scaler.step(halves[0])
    bench.model[2].weight.grad.fill_(INF)
    bench.scaler.accept_gradients(halves[1])
    bench.scaler.step(halves[1])
    bench.scaler.update()
    assert (bench.scaler.counts.applied, dict(bench.scaler.counts.skipped)) == (1, {"gradient_overflow": 1})


def test_limit_not_so_where_both_were_unscaled_before() -> None:
    bench = Bench()
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (bench.model[0], bench.model[2])]
    bench.scaler.scale(bench.loss()).backward()
    bench.model[2].weight.grad.fill_(INF)
    bench.scaler.include(*halves)
    bench.scaler.accept_gradients(halves[1])
    before = digest_of(bench.model.state_dict())
    for optimizer in halves:
        bench.scaler.unscale_(optimizer)
    for optimizer in halves:
        bench.scaler.step(optimizer)
    bench.scaler.update()
    assert (bench.scaler.counts.attempted, bench.scaler.counts.applied) == (1, 0)
    assert digest_of(bench.model.state_dict()) == before


def test_limit_counters_of_the_loop_and_modules_that_were_not_included() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler, steps = halfstep.GradScaler("cpu", precision="fp32"), 0
    statistics = model[1].num_batches_tracked.clone()
    scaler.scale(model(torch.randn(6, 8)).square().mean() * NAN).backward()
    scaler.step(optimizer)
    scaler.update()
    steps += 1
    assert (steps, scaler.counts.applied) == (1, 0)
    assert not torch.equal(model[1].num_batches_tracked, statistics)


@pytest.mark.wording
def test_parameters_that_forward_writes_are_reported_and_then_restored() -> None:
    """A momentum encoder that moves in forward: its first write has no copy from before it."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.key.weight.lerp_(self.query.weight, 0.5)
            return (self.query(x) - self.key(x)).square().mean()

    model = Momentum()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.1)
    scaler = halfstep.GradScaler("cpu", precision="fp32")
    scaler.include(model)

    def skip() -> None:
        scaler.scale(model(torch.randn(2, 4)) * NAN).backward()
        scaler.step(optimizer)
        scaler.update()

    query = model.query.weight.clone()
    with pytest.warns(UserWarning, match=r"rollback.first_write: a step wrote .*key.weight .*could not be restored"):
        skip()
    key = model.key.weight.clone()
    skip()
    assert torch.equal(model.query.weight, query)
    assert torch.equal(model.key.weight, key)


def test_limit_an_optimizer_that_fails_in_the_middle_of_its_step() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise MemoryError

    bench = Bench(Fails)
    before = bench.digest()
    with pytest.raises(MemoryError):
        bench.window()
    assert bench.digest() != before


def test_limit_a_schedule_that_is_told_its_position() -> None:
    class Told:
        position = 0

        def step_update(self, num_updates: int) -> None:
            self.position = num_updates

    bench, told = Bench(precision="fp32"), Told()
    bench.scaler.include(told)
    positions = []
    for number, factor in enumerate((1.0, NAN, 1.0), start=1):
        bench.optimizer.zero_grad()
        bench.scaler.scale(bench.loss() * factor).backward()
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()
        told.step_update(number)
        positions.append(told.position)
    assert positions == [1, 1, 3]
    assert bench.scaler.counts.applied == 2


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_loop_of_the_page_runs_as_it_stands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adapters" / "grad_scaler.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    good = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(3)]
    bad = (torch.full((6, 8), NAN), good[0][1])
    names: dict[str, Any] = {
        "torch": torch,
        "halfstep": halfstep,
        "device": "cpu",
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        "ema": halfstep.Ema(model),
        "criterion": lambda out, y: nn.functional.cross_entropy(out.float(), y),
        "loader": [good[0], bad, *good[1:]],
    }
    exec(code, names)
    assert names["scaler"].counts.skipped == {"loss_not_finite": 1}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
