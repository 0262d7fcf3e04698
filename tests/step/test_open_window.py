"""The three-call form: a window that a loop left open is refused, and is not merged into the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import Stepper
from halfstep.errors import WrongUse
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model, plain_model
from tests.support.ranks import Ranks


def batch(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def mse(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def make(precision: str = "fp32", model: nn.Module | None = None, **options: Any) -> Stepper:
    model = model or buffered_model()
    return Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=precision, **options)


def micro(stepper: Stepper, x: Tensor, *, last: bool = True, **options: Any) -> None:
    with stepper.forward(last=last, **options):
        loss = mse(stepper.model, x)
    stepper.backward(loss)


def update(stepper: Stepper, *batches: Tensor) -> None:
    for place, x in enumerate(batches, 1):
        micro(stepper, x, last=place == len(batches))
    assert stepper.apply().applied


def optimizer_of(stepper: Stepper) -> torch.optim.Optimizer:
    return next(iter(stepper.optimizers.values()))


LEFT: dict[str, Callable[[Stepper], object]] = {
    "forgotten": lambda _stepper: None,
    "zero_grad": lambda stepper: optimizer_of(stepper).zero_grad(),
    "zeros": lambda stepper: stepper.model.zero_grad(set_to_none=False),
    "optimizer.step": lambda stepper: optimizer_of(stepper).step(),
}


@pytest.mark.parametrize("left", ["forgotten", "zero_grad", "zeros"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_window_without_apply_is_refused_by_the_next_forward(precision: str, left: str) -> None:
    stepper, without = make(precision), make(precision)
    for run in (stepper, without):
        update(run, batch(0))
    before, counts = digest_of_run(stepper), stepper.counts.state_dict()
    micro(stepper, batch(1))
    LEFT[left](stepper)
    with pytest.raises(WrongUse), stepper.forward():
        pytest.fail("the forward pass ran")
    assert stepper.in_window
    stepper.discard()
    assert digest_of_run(stepper) == before
    assert stepper.counts.state_dict() == counts
    # To the bit as without the dropped batch, BatchNorm's statistics included.
    for run in (stepper, without):
        update(run, batch(2))
    assert digest_of_run(stepper) == digest_of_run(without)


@pytest.mark.wording
def test_the_refusal_names_the_remedies() -> None:
    stepper = make()
    micro(stepper, batch(0))
    with pytest.raises(WrongUse, match=r"(?s)stepper\.apply\(\).*stepper\.discard\(\).*last=False"), stepper.forward():
        pass
    stepper.discard()
    for left, words in (("zero_grad", r"stepper\.discard\(\) instead"), ("optimizer.step", r"optimizer\.step\(\)")):
        micro(stepper, batch(0), last=False)
        LEFT[left](stepper)
        with pytest.raises(WrongUse, match=words), stepper.forward():
            pass


def test_a_window_without_apply_can_still_be_applied_after_the_refusal() -> None:
    stepper, without = make(), make()
    micro(stepper, batch(0))
    with pytest.raises(WrongUse), stepper.forward():
        pass
    assert stepper.apply().applied
    update(without, batch(0))
    assert digest_of_run(stepper) == digest_of_run(without)


@pytest.mark.parametrize("cleared", ["zero_grad", "zeros"])
@pytest.mark.parametrize("after", [1, 2])
def test_gradients_cleared_between_micro_batches_are_refused(cleared: str, after: int) -> None:
    stepper = make()
    update(stepper, batch(0))
    before = digest_of_run(stepper)
    for seed in range(after):
        micro(stepper, batch(seed), last=False)
    LEFT[cleared](stepper)
    with pytest.raises(WrongUse), stepper.forward():
        pytest.fail("the forward pass ran")
    # The rest of the window cannot be used: it is dropped at once, and discard() has nothing to do.
    assert not stepper.in_window
    stepper.discard()
    assert digest_of_run(stepper) == before
    update(stepper, batch(1), batch(2))


def test_an_update_by_the_optimizer_between_micro_batches_is_refused_and_stays() -> None:
    stepper = make()
    update(stepper, batch(0))
    buffers = copy.deepcopy(dict(stepper.model.named_buffers()))
    micro(stepper, batch(1), last=False)
    optimizer_of(stepper).step()
    weights = copy.deepcopy(dict(stepper.model.named_parameters()))
    with pytest.raises(WrongUse), stepper.forward():
        pytest.fail("the forward pass ran")
    stepper.discard()
    # What the optimizer has written is not the window's to restore; what forward wrote is.
    for name, value in stepper.model.named_parameters():
        assert torch.equal(value, weights[name])
    for name, kept in stepper.model.named_buffers():
        assert torch.equal(kept, buffers[name])
    assert not stepper.findings
    update(stepper, batch(1), batch(2))


def test_gradients_cleared_between_forward_and_backward_are_refused_from_the_second_micro_batch_on() -> None:
    """The order of an old loop: `zero_grad()` in front of `backward()`, in each of its micro-batches."""
    stepper, without = make(), make()
    before = digest_of_run(stepper)
    micro(stepper, batch(0), last=False)
    with stepper.forward():
        loss = mse(stepper.model, batch(0))
    optimizer_of(stepper).zero_grad()
    with pytest.raises(WrongUse):
        stepper.backward(loss)
    stepper.discard()
    assert digest_of_run(stepper) == before
    # In a window of one micro-batch, there is nothing to lose.
    with stepper.forward():
        loss = mse(stepper.model, batch(0))
    optimizer_of(stepper).zero_grad()
    stepper.backward(loss)
    assert stepper.apply().applied
    update(without, batch(0))
    assert digest_of_run(stepper) == digest_of_run(without)


# -- loops that are right --------------------------------------------------------------------------------------------


def test_each_loss_of_a_turn_has_its_own_window() -> None:
    """A loop that trains two networks in turns clears the gradients of the other one when it likes."""
    model = nn.ModuleDict({"g": plain_model(), "d": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in ("g", "d")}
    stepper = Stepper(model, optimizers, precision="fp32")
    for seed in range(3):
        for name, other in (("g", "d"), ("d", "g")):
            for last in (False, False, True):
                with stepper.forward(last=last, only=name):
                    loss = model["d"](model["g"](batch(seed))).square().mean()
                stepper.backward(loss)
                optimizers[other].zero_grad()
            assert stepper.apply().applied
    assert stepper.counts.applied == 6


def test_one_loss_of_several_optimizers_over_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = {str(place): torch.optim.SGD(model[place].parameters(), 0.1) for place in (0, 1)}
    stepper = Stepper(model, optimizers, precision="fp32")
    update(stepper, batch(0), batch(1), batch(2))
    micro(stepper, batch(0), last=False)
    optimizers["1"].zero_grad()  # one of them is enough
    with pytest.raises(WrongUse), stepper.forward():
        pytest.fail("the forward pass ran")


def test_loss_code_may_clear_gradients_that_the_window_has_not_made() -> None:
    """An inner backward pass whose gradients are dropped, and those of a second micro-batch put aside for it."""
    stepper = make()

    def inner(x: Tensor) -> None:
        kept = [p.grad for p in stepper.model.parameters()]
        for p in stepper.model.parameters():
            p.grad = None
        mse(stepper.model, x).backward()
        for p, gradient in zip(stepper.model.parameters(), kept, strict=True):
            p.grad = gradient

    for last in (False, True):
        with stepper.forward(last=last):
            inner(batch(5))
            loss = mse(stepper.model, batch(6))
        stepper.backward(loss)
    assert stepper.apply().applied


@pytest.mark.filterwarnings("ignore:note rollback.first_write")
def test_other_writes_between_micro_batches_are_not_taken_for_an_update() -> None:
    """A part of the weights is kept in bounds, another one is frozen, and the model is evaluated."""
    layers: Any = plain_model()
    stepper = make(model=layers)
    micro(stepper, batch(0), last=False)
    with torch.no_grad():
        layers[0].weight.clamp_(-0.1, 0.1)
        stepper.model(batch(1))
    layers[2].bias.requires_grad_(requires_grad=False)
    micro(stepper, batch(1))
    assert stepper.apply().applied


@pytest.mark.filterwarnings("ignore:note rollback.first_write")
def test_a_target_network_that_the_optimizer_owns_may_be_copied_between_micro_batches() -> None:
    online, target = plain_model(), plain_model(1)
    model = nn.ModuleDict({"online": online, "target": target})
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    for last in (False, True):
        with stepper.forward(last=last):
            with torch.no_grad():
                wanted = target(batch(0))
            loss = (online(batch(0)) - wanted).square().mean()
        stepper.backward(loss)
        if not last:
            target.load_state_dict(online.state_dict())
    assert stepper.apply().applied


def test_sparse_gradients_and_a_part_without_gradient() -> None:
    model = nn.ModuleDict({"used": nn.EmbeddingBag(10, 4, sparse=True), "unused": nn.Linear(4, 4)})
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    for last in (False, False, True):
        with stepper.forward(last=last):
            loss = model["used"](torch.tensor([[1, 2, 2]])).square().mean()
            if last:
                loss = loss + model["unused"](torch.ones(2, 4)).square().mean()
        stepper.backward(loss)
    assert stepper.apply().applied


def test_a_second_graph_through_the_gradients() -> None:
    """`create_graph` makes backward bind a new gradient in each micro-batch."""
    stepper = make(model=plain_model())
    for last in (False, False, True):
        x = batch(0).requires_grad_()
        with stepper.forward(last=last):
            (gradient,) = torch.autograd.grad(stepper.model(x).sum(), x, create_graph=True)
            loss = gradient.square().mean()
        stepper.backward(loss)
    assert stepper.apply().applied


# -- on several ranks ------------------------------------------------------------------------------------------------


def on_two(rank: int, kind: str, left: str) -> tuple[bool, bool, int]:
    """Whether the window was refused, whether the run then ends where one without it ends, and its updates."""
    from torch.distributed.fsdp import fully_shard

    def build() -> Stepper:
        model: Any = plain_model()
        model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
        return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")

    stepper, without = build(), build()
    for run in (stepper, without):
        update(run, batch(rank), batch(2 + rank), batch(4 + rank))
    if left in ("forgotten", "zero_grad"):
        micro(stepper, batch(rank), last=False)
        micro(stepper, batch(6 + rank))
    else:
        micro(stepper, batch(rank), last=False)
    LEFT[left.removesuffix(" in the middle")](stepper)
    refused = False
    try:
        with stepper.forward():
            mse(stepper.model, batch(rank))
    except WrongUse:
        refused = True
    stepper.discard()
    for run in (stepper, without):
        update(run, batch(8 + rank), batch(rank))
    parameters = zip(stepper.model.parameters(), without.model.parameters(), strict=True)
    same = all(torch.equal(local(a), local(b)) for a, b in parameters)
    return refused, same, stepper.counts.applied


def local(tensor: Tensor) -> Tensor:
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("left", ["forgotten", "zero_grad", "zero_grad in the middle"])
def test_ranks_refuse_a_window_together_and_go_on(on_ranks: Ranks, kind: str, left: str) -> None:
    # FSDP2 keeps the gradients of earlier micro-batches outside of the parameters, where zero_grad() finds none.
    refused = (kind, left) != ("fsdp2", "zero_grad in the middle")
    assert on_ranks(on_two, kind, left) == [(refused, True, 2)] * 2
