"""A run goes back to where it was good: to the bit, as often as it must, and without its copy training along."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper
from halfstep.guard.repair.snapshot import RollbackSnapshot
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def bad(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * float("nan")


def stepper_for(precision: str = "fp32", **options: Any) -> Stepper:
    model = buffered_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return Stepper(model, optimizer, precision=precision, schedule=schedule, ema=Ema(model), observe=False, **options)


def train(stepper: Stepper, steps: int) -> None:
    for _ in range(steps):
        stepper.step(square, torch.randn(6, 8))


def test_back_twice_is_the_same_run_to_the_bit() -> None:
    stepper = stepper_for()
    train(stepper, 5)
    rewind = RollbackSnapshot(stepper)
    rewind.take()
    good = digest_of_run(stepper)
    for _ in range(2):
        train(stepper, 3)
        assert digest_of_run(stepper) != good
        assert rewind.restore() == rewind.step == 5
        assert digest_of_run(stepper) == good


def test_a_later_copy_replaces_an_earlier_one() -> None:
    stepper = stepper_for()
    rewind = RollbackSnapshot(stepper)
    assert rewind.step is None
    rewind.take()
    train(stepper, 4)
    rewind.take()
    good = digest_of_run(stepper)
    train(stepper, 2)
    assert rewind.restore() == 4
    assert digest_of_run(stepper) == good


def test_before_the_first_step_there_is_no_optimizer_state_to_go_back_to() -> None:
    stepper, fresh = stepper_for(), stepper_for()
    rewind = RollbackSnapshot(stepper)
    rewind.take()
    train(stepper, 3)
    assert rewind.restore() == 0
    torch.manual_seed(7)
    train(stepper, 3)
    torch.manual_seed(7)
    train(fresh, 3)
    assert digest_of_run(stepper) == digest_of_run(fresh)


def test_attempts_and_skips_are_not_forgotten_and_nothing_is_drawn_again() -> None:
    stepper = stepper_for()
    train(stepper, 2)
    rewind = RollbackSnapshot(stepper)
    rewind.take()
    train(stepper, 2)
    stepper.step(bad, torch.randn(6, 8))
    random = torch.get_rng_state()
    rewind.restore()
    assert torch.equal(torch.get_rng_state(), random)
    counts = stepper.counts
    assert (counts.attempted, counts.applied, dict(counts.skipped)) == (5, 2, {"loss_not_finite": 1})
    assert counts.skipped_in_a_row == 0


def test_precision_and_loss_scale_stay_as_they_are_now() -> None:
    stepper = stepper_for("fp16")
    train(stepper, 2)
    rewind = RollbackSnapshot(stepper)
    rewind.take()
    weights = [p.detach().clone() for p in stepper.model.parameters()]
    stepper.change_precision("bf16")
    train(stepper, 2)
    rewind.restore()
    assert stepper.precision.name == "bf16"
    assert stepper.state_dict()["losses"]["loss"]["loss_scale"] == {}
    assert all(torch.equal(a, b) for a, b in zip(weights, stepper.model.parameters(), strict=True))
    train(stepper, 1)


def test_a_buffer_that_came_or_grew_since_is_as_it_was() -> None:
    stepper = stepper_for()
    rewind = RollbackSnapshot(stepper)
    rewind.take()
    writes = stepper.model[2]
    assert writes.last is None
    writes.last, writes.constant = torch.ones(3), torch.ones(9)
    rewind.restore()
    assert writes.last is None
    assert torch.equal(writes.constant, torch.arange(4.0))


def test_a_copy_in_the_middle_of_a_step_is_of_one_step() -> None:
    """What a guard keeps has the buffers from before the forward pass, as it has the weights from before the update."""

    class Keeping:
        name = "keeping"

        def passes(self, report: object) -> bool:
            if stepper.counts.applied == 3:
                rewind.take()
            return True

    stepper = stepper_for()
    rewind = RollbackSnapshot(stepper)
    stepper.guards.append(Keeping())
    train(stepper, 3)
    good = digest_of_run(stepper)
    train(stepper, 1)
    stepper.guards.clear()
    train(stepper, 2)
    assert rewind.restore() == 3
    assert digest_of_run(stepper) == good


def test_copies_are_made_often_in_the_beginning() -> None:
    stepper = stepper_for()
    rewind, saved = RollbackSnapshot(stepper), []
    for _ in range(60):
        rewind.take_if_due(20)
        saved.append(rewind.step)
        train(stepper, 1)
    assert sorted(set(saved)) == [0, 5, 15, 35, 55]
    often = RollbackSnapshot(stepper)
    for step in range(60, 64):
        often.take_if_due(1)
        assert often.step == step
        train(stepper, 1)


def unfreezing() -> tuple[Stepper, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], 1e-2)
    return Stepper(model, optimizer, precision="fp32", ema=Ema(model), observe=False), optimizer


def unfreeze(stepper: Stepper, optimizer: torch.optim.Optimizer) -> None:
    stepper.model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(stepper.model[0].parameters())})


def test_what_does_not_fit_any_more_is_dropped_and_nothing_is_torn() -> None:
    stepper, optimizer = unfreezing()
    rewind = RollbackSnapshot(stepper)
    train(stepper, 2)
    rewind.take()
    train(stepper, 2)
    unfreeze(stepper, optimizer)
    train(stepper, 1)
    before = digest_of_run(stepper)
    assert rewind.restore() is None
    assert rewind.step is None
    assert digest_of_run(stepper) == before


def test_a_module_that_is_gone_or_has_another_shape_is_noticed_before_anything_is_put_back() -> None:
    for change in (lambda m: m.pop(1), lambda m: m.__setitem__(2, nn.Linear(8, 5))):
        stepper, _ = unfreezing()
        rewind = RollbackSnapshot(stepper)
        rewind.take()
        train(stepper, 1)
        change(stepper.model)
        before = {name: value.clone() for name, value in stepper.model.state_dict().items()}
        assert rewind.restore() is None
        assert all(torch.equal(before[name], value) for name, value in stepper.model.state_dict().items())


def test_the_run_is_kept_anew_after_an_unfreezing() -> None:
    stepper, optimizer = unfreezing()
    rewind = RollbackSnapshot(stepper)
    rewind.take_if_due(100)
    train(stepper, 1)
    unfreeze(stepper, optimizer)
    train(stepper, 1)
    rewind.take_if_due(100)
    good = digest_of_run(stepper)
    train(stepper, 2)
    assert rewind.restore() == 2
    assert digest_of_run(stepper) == good
