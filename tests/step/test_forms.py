"""Both ways to write a step, errors in the middle of one, and what is refused before the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window
from halfstep.errors import HalfstepError, TornUpdate, WrongUse
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model, plain_model


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module | None = None, precision: str = "fp32", **options: Any) -> Stepper:
    model = model or buffered_model()
    return Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=precision, ema=Ema(model), **options)


def with_form(stepper: Stepper, batches: list[Tensor]) -> Any:
    for i, x in enumerate(batches):
        with stepper.forward(last=i == len(batches) - 1):
            loss = mse(stepper.model, x)
        stepper.backward(loss)
    return stepper.apply()


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_forms_are_the_same_step(precision: str, microbatches: int) -> None:
    batches = [torch.randn(6, 8) for _ in range(microbatches)]
    function, context = make(precision=precision, clip_norm=0.1), make(precision=precision, clip_norm=0.1)
    for _ in range(4):
        a = function.step(mse, Window(batches))
        b = with_form(context, batches)
        assert a == b
    assert digest_of_run(function) == digest_of_run(context)
    assert function.observed is not None
    assert context.observed is not None
    assert function.observed.share == context.observed.share == 1.0


def test_the_context_form_skips_as_well() -> None:
    stepper = make(precision="bf16")
    before = digest_of_run(stepper)
    report = with_form(stepper, [torch.randn(6, 8), torch.full((6, 8), float("nan"))])
    assert report.reason == "loss_not_finite"
    assert digest_of_run(stepper) == before


@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_in_the_middle_of_a_window_leaves_no_trace(where: str, error: type[BaseException]) -> None:
    stepper = make()
    stepper.step(mse, torch.randn(6, 8))
    before, counts = digest_of_run(stepper), stepper.counts.state_dict()

    def fail(*_: Any) -> Any:
        raise error("in the middle")

    def loss(model: nn.Module, x: Tensor | None) -> Tensor:
        out = mse(model, torch.randn(6, 8))
        if x is None:
            if where == "loss":
                fail()
            out.register_hook(fail)
        return out

    with pytest.raises(error, match="in the middle"):
        stepper.step(loss, Window([torch.randn(6, 8), None]))
    assert digest_of_run(stepper) == before
    assert stepper.counts.state_dict() == counts
    assert all(p.grad is None for p in stepper.model.parameters())
    assert stepper.step(mse, torch.randn(6, 8)).applied


def test_an_error_in_the_context_form_leaves_no_trace() -> None:
    stepper = make()
    before = digest_of_run(stepper)
    with pytest.raises(ZeroDivisionError), stepper.forward():  # noqa: PT012
        stepper.model(torch.randn(6, 8))
        _ = 1 / 0
    assert digest_of_run(stepper) == before
    assert stepper.step(mse, torch.randn(6, 8)).applied


@pytest.mark.wording
def test_an_optimizer_that_fails_half_way_stops_the_stepper() -> None:
    stepper = make()
    optimizer = stepper.optimizers["loss"]

    def fail(*_: Any) -> None:
        raise RuntimeError("half-way")

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        stepper.step(mse, torch.randn(6, 8))
    handle.remove()
    for _ in range(2):
        with pytest.raises(TornUpdate, match="neither old nor new"):
            stepper.step(mse, torch.randn(6, 8))
        with pytest.raises(TornUpdate), stepper.forward():
            pass


def test_guards_refuse_by_name_and_nothing_moves() -> None:
    class NoLargeLoss:
        name = "no_large_loss"

        def passes(self, report: Any) -> bool:
            assert report.applied
            return report.loss < 100

    stepper = make(guards=[NoLargeLoss()])
    assert stepper.step(mse, torch.randn(6, 8)).applied
    before = digest_of_run(stepper)
    report = stepper.step(lambda m, x: mse(m, x) * 1e6, torch.randn(6, 8))
    assert (report.applied, report.finite, report.reason) == (False, True, "guard:no_large_loss")
    assert digest_of_run(stepper) == before
    assert stepper.counts.skipped == {"guard:no_large_loss": 1}


def test_a_guard_that_fails_leaves_no_trace() -> None:
    class Fails:
        name = "fails"

        def passes(self, report: Any) -> bool:
            raise ZeroDivisionError

    stepper = make(guards=[Fails()])
    before = digest_of_run(stepper)
    with pytest.raises(ZeroDivisionError):
        stepper.step(mse, torch.randn(6, 8))
    assert digest_of_run(stepper) == before
    assert all(p.grad is None for p in stepper.model.parameters())
    stepper.guards.clear()
    assert stepper.step(mse, torch.randn(6, 8)).attempt == 1


def test_reports_are_plain_numbers() -> None:
    report = make(precision="fp16").step(mse, torch.randn(6, 8))
    assert [type(v) for v in report[:8]] == [int, int, bool, type(None), bool, float, float, float]
    assert str(report).startswith("attempt 1: step 1 applied, loss ")


def test_what_the_step_was_made_from_can_be_run_again() -> None:
    stepper = make(plain_model())
    noisy = lambda m, x: F.dropout(m(x), 0.5).square().mean()  # noqa: E731
    batch = torch.randn(6, 8)
    weights = {k: v.clone() for k, v in stepper.model.state_dict().items()}
    report = stepper.step(noisy, batch)
    attempt = stepper.attempt
    assert attempt is not None
    stepper.model.load_state_dict(weights)
    torch.set_rng_state(attempt.generators[0])
    assert attempt.loss_fn is noisy
    assert attempt.loss_fn(stepper.model, attempt.microbatches[0]).item() == pytest.approx(report.loss, rel=1e-6)


def host_reads(stepper: Stepper, batch: Any, loss: Any = mse) -> int:
    """Tensors turned into Python numbers during one step, counted below every Python wrapper."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.reads += func._overloadpacket is torch.ops.aten._local_scalar_dense
            return func(*args, **(kwargs or {}))

    original, lists = Tensor.tolist, []
    Tensor.tolist = lambda self: lists.append(1) or original(self)  # type: ignore[method-assign]
    try:
        with Count() as count:
            stepper.step(loss, batch)
    finally:
        Tensor.tolist = original  # type: ignore[method-assign]
    # tolist() of n numbers reads the storage at once; what dispatch still sees is read one by one.
    return len(lists) + count.reads


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_host_read_a_step(precision: str) -> None:
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepper = Stepper(model, optimizer, precision=precision, clip_norm=0.1, ema=Ema(model))
    for _ in range(3):
        stepper.step(mse, torch.randn(6, 8))
    assert host_reads(stepper, torch.randn(6, 8)) == 1
    assert host_reads(stepper, Window([torch.randn(6, 8)] * 4)) == 1
    assert host_reads(stepper, torch.randn(6, 8), lambda m, x: mse(m, x) * float("nan")) == 1
    assert host_reads(stepper, torch.randn(6, 8), lambda m, x: mse(m, x) * mse(m, x).item()) == 2


# -- refused in words ----------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, x: m(x), "tensor of shape"),
        (lambda m, x: m(x).sum().detach(), "does not require grad"),
        (lambda m, x: 1.0, "a float as the loss"),
        (lambda m, x: (m(x).sum(), 1, 2), "a tuple of 3"),
        (lambda m, x: {"other": m(x).sum()}, "no loss for"),
        (lambda m, x: torch.ones(8, requires_grad=True).sum(), "has a gradient"),
    ],
)
def test_losses_that_cannot_be_meant(loss: Any, words: str) -> None:
    stepper = make()
    before = digest_of_run(stepper)
    with pytest.raises(WrongUse, match=words):
        stepper.step(loss, torch.randn(6, 8))
    assert digest_of_run(stepper) == before
    assert stepper.step(mse, torch.randn(6, 8)).applied


@pytest.mark.wording
def test_order_of_the_context_form() -> None:
    stepper = make()
    with pytest.raises(WrongUse, match="before forward"):
        stepper.backward(torch.ones(()))
    with pytest.raises(WrongUse, match=r"apply\(\) before"):
        stepper.apply()
    with stepper.forward():
        loss = mse(stepper.model, torch.randn(6, 8))
    with pytest.raises(WrongUse, match="open window"):
        stepper.step(mse, torch.randn(6, 8))
    stepper.backward(loss)
    assert stepper.apply().applied
    with pytest.raises(WrongUse, match="without micro-batches"):
        stepper.step(mse, Window())


@pytest.mark.wording
def test_a_step_inside_autocast_is_refused() -> None:
    stepper = make(precision="bf16")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(WrongUse, match="weights that it cast first"):
        stepper.step(mse, torch.randn(6, 8))


def test_inside_an_autocast_that_is_off_weights_are_cast_anew_each_step() -> None:
    def losses(outer: bool) -> list[float]:
        stepper = make(plain_model(), precision="bf16")
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
        with torch.autocast("cpu", enabled=False) if outer else torch.enable_grad():
            return [stepper.step(mse, x).loss for _ in range(5)]

    assert losses(outer=True) == losses(outer=False)
    assert len(set(losses(outer=True))) == 5


@pytest.mark.wording
def test_trainable_weights_in_16_bits_are_refused_by_name() -> None:
    model = plain_model().half()
    with pytest.raises(WrongUse, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")


def test_frozen_weights_may_be_stored_in_16_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False).bfloat16()
    stepper = Stepper(model, torch.optim.SGD(model[1].parameters(), 0.1), precision="bf16")
    before = model[1].weight.detach().clone()
    assert stepper.step(mse, torch.randn(6, 8)).applied
    assert not torch.equal(model[1].weight, before)


def test_adapters_on_a_frozen_half_base_train() -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).bfloat16()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    stepper = Stepper(model, torch.optim.AdamW(trained, 1e-2), precision="bf16")
    assert all(stepper.step(mse, torch.randn(6, 8)).applied for _ in range(3))
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.wording
def test_optimizers_that_train_nothing_or_need_a_closure_are_refused() -> None:
    model, other = plain_model(), plain_model()
    with pytest.raises(WrongUse, match="none of them of this model"):
        Stepper(model, torch.optim.SGD(other.parameters(), 0.1), precision="fp32")
    frozen = plain_model().requires_grad_(False)
    with pytest.raises(WrongUse, match="all of them frozen"):
        Stepper(frozen, torch.optim.SGD(frozen.parameters(), 0.1), precision="fp32")
    with pytest.raises(WrongUse, match="LBFGS"):
        Stepper(model, torch.optim.LBFGS(model.parameters()), precision="fp32")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(WrongUse, match="after the evaluation"):
        Stepper(model, optimizer, precision="fp32", schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


@pytest.mark.wording
def test_every_refusal_says_what_to_do() -> None:
    model = plain_model()
    with pytest.raises(HalfstepError) as caught:
        Stepper(model, torch.optim.SGD(plain_model().parameters(), 0.1), precision="fp32")
    assert caught.value.given
    assert caught.value.allowed
    assert caught.value.do


@pytest.mark.wording
def test_an_optimizer_that_holds_an_old_head_is_found() -> None:
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[2] = nn.Linear(16, 3)
    with pytest.warns(UserWarning, match=r"2 parameters of another model and leaves out 2\.weight, 2\.bias"):
        stepper = Stepper(model, optimizer, precision="fp32")
    assert [finding.id for finding in stepper.findings] == ["optimizer.stale"]


def test_parameters_added_to_the_optimizer_later_are_guarded_too() -> None:
    model = plain_model()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    stepper = Stepper(model, optimizer, precision="fp32")
    stepper.step(mse, torch.randn(6, 8))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    stepper.step(mse, torch.randn(6, 8))
    assert not torch.equal(model[2].weight, before)
    assert model[2].weight.grad is None


def test_gradients_of_parameters_that_no_optimizer_owns_do_not_pile_up() -> None:
    model = plain_model()
    stepper = Stepper(model, torch.optim.SGD(model[0].parameters(), 0.1), precision="fp32")
    stepper.step(mse, torch.randn(6, 8))
    assert all(p.grad is None for p in model.parameters())
