"""A skipped step leaves every tensor that it could write bitwise as it was, wherever the tensor is registered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep import Stepper
from halfstep.errors import WrongUse
from halfstep.step.memory import SMALL
from tests.support.digest import digest_of

BAD = torch.full((8, 16), float("nan"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sgd(model: nn.Module, **options: Any) -> Stepper:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Stepper(model, torch.optim.SGD(trained, 0.1, momentum=0.9), **{"precision": "fp32", **options})


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def everything(*modules: nn.Module) -> str:
    return digest_of(*({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules))


# -- parameters that forward writes --------------------------------------------------------------------------------


class MomentumEncoder(nn.Module):
    """The target network of MoCo and BYOL; `how` writes it as people do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.online = how, nn.Linear(16, 8)
        self.target = nn.Linear(16, 8).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.online.parameters(), self.target.parameters(), strict=True):
            if self.how == "lerp_":
                other.lerp_(own, 0.1)
            elif self.how == ".data =":
                other.data = other.data * 0.9 + own.data * 0.1
            elif self.how == ".data.mul_":
                other.data.mul_(0.9).add_(own.data, alpha=0.1)
        if self.how == "foreach":
            torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), 0.1)
        if self.how == "load_state_dict":
            own_state = self.online.state_dict()
            self.target.load_state_dict({k: 0.9 * v + 0.1 * own_state[k] for k, v in self.target.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return self.online(x) - self.target(x.flip(0))


HOWS = ("lerp_", ".data =", ".data.mul_", "foreach", "load_state_dict")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("good_steps", [0, 1, 3])
def test_a_momentum_encoder_is_put_back(how: str, good_steps: int) -> None:
    model = MomentumEncoder(how)
    stepper = sgd(model)
    for _ in range(good_steps):
        assert stepper.step(square, torch.randn(8, 16)).applied
    before = everything(model)
    assert stepper.step(square, BAD).reason == "loss_not_finite"
    assert everything(model) == before
    target = model.target.weight.clone()
    assert stepper.step(square, torch.randn(8, 16)).applied
    assert not torch.equal(model.target.weight, target)


@pytest.mark.parametrize("how", HOWS)
def test_a_momentum_encoder_trains_as_in_a_plain_loop(how: str) -> None:
    ours, plain = MomentumEncoder(how), MomentumEncoder(how)
    plain.load_state_dict(ours.state_dict())
    stepper = sgd(ours)
    optimizer = torch.optim.SGD(plain.online.parameters(), 0.1, momentum=0.9)
    for x in torch.randn(5, 8, 16):
        stepper.step(square, x)
        square(plain, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert everything(ours) == everything(plain)


@pytest.mark.parametrize("how", ["renorm", "data", "in_place"])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_trained_weights_that_forward_constrains_are_put_back(how: str, good_steps: int) -> None:
    class Constrained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(32, 16, max_norm=0.5 if how == "renorm" else None), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                if how == "data":
                    self.head.weight.data = nn.functional.normalize(self.head.weight.data)
                elif how == "in_place":
                    self.head.weight.copy_(nn.functional.normalize(self.head.weight))
            return self.head(self.table(torch.arange(8)) + x)

    model = Constrained()
    stepper = sgd(model)
    for _ in range(good_steps):
        assert stepper.step(square, torch.randn(8, 16)).applied
    with torch.no_grad():
        model.table.weight.mul_(3.0)
        model.head.weight.mul_(3.0)
    before = everything(model)
    assert not stepper.step(square, BAD).applied
    assert everything(model) == before


@pytest.mark.wording
def test_a_first_write_long_after_observation_is_told_and_then_taken_back() -> None:
    model = MomentumEncoder("never")
    stepper = sgd(model)
    for _ in range(3):
        stepper.step(square, torch.randn(8, 16))
    model.how = "lerp_"
    assert stepper.step(square, torch.randn(8, 16)).applied
    told = [f for f in stepper.findings if f.id == "rollback.first_write"]
    assert len(told) == 1
    assert "target.weight" in told[0].evidence
    before = everything(model)
    assert not stepper.step(square, BAD).applied
    assert everything(model) == before


@pytest.mark.wording
def test_a_first_write_in_a_skipped_step_is_told_as_lost() -> None:
    model = MomentumEncoder("never")
    stepper = sgd(model)
    stepper.step(square, torch.randn(8, 16))
    model.how = "lerp_"
    assert not stepper.step(square, BAD).applied
    told = [f for f in stepper.findings if f.id == "rollback.first_write"]
    assert [f.severity for f in told] == ["warning"]
    assert "could not be restored" in told[0].evidence


def test_an_error_in_the_middle_takes_parameters_back_too() -> None:
    model = MomentumEncoder("lerp_")
    stepper = sgd(model)
    stepper.step(square, torch.randn(8, 16))
    before = everything(model)

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise ValueError("unreadable sample")

    with pytest.raises(ValueError, match="unreadable"):
        stepper.step(fails, torch.randn(8, 16))
    assert everything(model) == before


# -- modules beside the model --------------------------------------------------------------------------------------


class Centre(nn.Module):
    """The center of DINO's loss: a buffer that is replaced in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, out: Tensor) -> Tensor:
        loss = (out.float() - self.centre).square().mean()
        self.centre = self.centre * 0.9 + 0.1 * out.detach().float().mean(0)
        self.calls += 1
        return loss


class Trainer:
    def __init__(self, model: nn.Module, criterion: nn.Module) -> None:
        self.nets = {"criterion": criterion}
        self.model, self.own = model, criterion

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.own(model(x))

    def through_a_dict(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.nets["criterion"](model(x))


CRITERION = Centre()


def through_a_global(model: nn.Module, x: Tensor) -> Tensor:
    return CRITERION(model(x))


@pytest.mark.parametrize("held", ["closure", "method", "dict of a method", "default", "list", "global", "partial"])
def test_modules_that_the_loss_function_holds_are_put_back(held: str) -> None:
    import functools

    model, criterion = nn.Linear(16, 4), Centre()
    several = [criterion]
    trainer = Trainer(model, criterion)
    if held == "global":
        criterion = CRITERION
    functions = {
        "closure": lambda m, x: criterion(m(x)),
        "method": trainer.loss,
        "dict of a method": trainer.through_a_dict,
        "default": lambda m, x, c=criterion: c(m(x)),
        "list": lambda m, x: several[0](m(x)),
        "global": through_a_global,
        "partial": functools.partial(lambda c, m, x: c(m(x)), criterion),
    }
    stepper = sgd(model)
    for _ in range(2):
        assert stepper.step(functions[held], torch.randn(8, 16)).applied
    before, calls = everything(model, criterion), criterion.calls.item()
    assert not stepper.step(functions[held], BAD).applied
    assert everything(model, criterion) == before
    assert stepper.step(functions[held], torch.randn(8, 16)).applied
    assert criterion.calls.item() == calls + 1


def test_a_new_lambda_in_every_step_holds_the_same_modules() -> None:
    model, criterion = nn.Linear(16, 4), Centre()
    stepper = sgd(model)
    for weight in (1.0, 0.9, 0.8):
        assert stepper.step(lambda m, x, w=weight: criterion(m(x)) * w, torch.randn(8, 16)).applied
    before = everything(model, criterion)
    assert not stepper.step(lambda m, x: criterion(m(x)) * 0.5, BAD).applied
    assert everything(model, criterion) == before


def test_the_other_network_of_a_gan_is_put_back() -> None:
    generator = nn.Linear(16, 16)
    critic = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    stepper = sgd(generator)
    assert stepper.step(lambda g, x: -critic(g(x)).mean(), torch.randn(8, 16)).applied
    before = everything(generator, critic)
    assert not stepper.step(lambda g, x: -critic(g(x)).mean(), BAD).applied
    assert everything(generator, critic) == before


# -- what the user includes ----------------------------------------------------------------------------------------


class Queue:
    """A memory bank that is no module."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def test_objects_with_a_state_are_put_back_once_they_are_included() -> None:
    model, queue = nn.Linear(16, 4), Queue()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        queue.rows.append(float(out.detach().mean()))
        return out.square().mean()

    stepper = sgd(model)
    stepper.include(queue)
    stepper.step(loss, torch.randn(8, 16))
    assert len(queue.rows) == 1
    assert not stepper.step(loss, BAD).applied
    assert len(queue.rows) == 1
    assert stepper.step(loss, torch.randn(8, 16)).applied
    assert len(queue.rows) == 2


def test_modules_that_cannot_be_found_may_be_included() -> None:
    model, criterion = nn.Linear(16, 4), Centre()
    hidden = {"deep": {"deeper": {"still": {"there": criterion}}}}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return hidden["deep"]["deeper"]["still"]["there"](model(x))

    stepper = sgd(model)
    stepper.include(criterion)
    stepper.step(loss, torch.randn(8, 16))
    before = everything(criterion)
    assert not stepper.step(loss, BAD).applied
    assert everything(criterion) == before


@pytest.mark.wording
def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(WrongUse, match="include\\(list\\)"):
        sgd(nn.Linear(16, 4)).include([1])


# -- large buffers -------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A large buffer that is written as `how` says, from call `begin` on."""

    def __init__(self, how: str = "never", begin: int = 0, shape: tuple[int, ...] = (300, 300)) -> None:
        super().__init__()
        assert torch.Size(shape).numel() > SMALL
        self.how, self.begin, self.calls = how, begin, 0
        self.layer = nn.Linear(16, 4)
        self.register_buffer("table", torch.randn(shape))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= self.begin:
            if self.how == "in place":
                self.table.add_(1.0)
            elif self.how == ".data":
                self.table.data.add_(1.0)
            elif self.how == "one row":
                self.table[7] = 3.0
            elif self.how == "rebound":
                self.table = self.table + 1.0
        self.calls += 1
        with torch.enable_grad():
            return self.layer(x)


@pytest.mark.parametrize("how", ["in place", ".data", "one row", "rebound"])
@pytest.mark.parametrize("begin", [0, 1, 4])
def test_a_large_buffer_is_put_back_where_its_first_write_is_skipped(how: str, begin: int) -> None:
    model = Table(how, begin)
    stepper = sgd(model)
    for _ in range(begin):
        assert stepper.step(square, torch.randn(8, 16)).applied
    before = everything(model)
    assert not stepper.step(square, BAD).applied
    assert everything(model) == before


@pytest.mark.parametrize("how", ["in place", ".data", "one row", "rebound"])
def test_a_large_buffer_that_is_written_in_every_step_is_put_back(how: str) -> None:
    model = Table(how)
    stepper = sgd(model)
    for _ in range(4):
        assert stepper.step(square, torch.randn(8, 16)).applied
        before = everything(model)
        assert not stepper.step(square, BAD).applied
        assert everything(model) == before


def test_silent_writes_that_begin_late_are_restored() -> None:
    model = Table(".data", begin=4)
    stepper = sgd(model)
    for _ in range(6):
        assert stepper.step(square, torch.randn(8, 16)).applied
    before = everything(model)
    assert not stepper.step(square, BAD).applied
    assert everything(model) == before


class CopiedBytes(TorchDispatchMode):
    """Counts what is copied or cloned."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "copy_" in name or "clone" in name:
            targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.total += sum(t.numel() * t.element_size() for t in targets)
        return func(*args, **(kwargs or {}))


def test_constant_masks_are_not_copied_in_every_step() -> None:
    model = nn.Sequential(nn.Linear(16, 4))
    for n in range(8):
        model.register_buffer(f"mask_{n}", torch.tril(torch.ones(512, 512, dtype=torch.bool if n % 2 else None)))
    stepper = sgd(model)
    for _ in range(3):
        stepper.step(square, torch.randn(8, 16))
    with CopiedBytes() as counted:
        stepper.step(square, torch.randn(8, 16))
    assert counted.total < 64 * 1024, "a standing copy is enough"


def test_a_frozen_base_is_not_doubled() -> None:
    base = nn.Linear(512, 512).requires_grad_(False)
    model = nn.Sequential(nn.Linear(16, 512), base, nn.Linear(512, 4))
    with CopiedBytes() as counted:
        stepper = sgd(model)
        for _ in range(2):
            assert stepper.step(square, torch.randn(8, 16)).applied
    assert counted.total < base.weight.numel() * 4


# -- to the bit ----------------------------------------------------------------------------------------------------


def test_a_negative_zero_is_put_back_as_one() -> None:
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)
            self.register_buffer("sign", torch.full((3,), -0.0))

        def forward(self, x: Tensor) -> Tensor:
            self.sign.data.abs_()
            return self.layer(x)

    model = Signed()
    assert not sgd(model).step(square, BAD).applied
    assert bool(model.sign.signbit().all())


def test_a_resized_buffer_has_its_old_shape_again() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.resize_(self.seen.numel() + 1)
            self.seen.fill_(1.0)
            return self.layer(x)

    model = Growing()
    stepper = sgd(model)
    for grown in (3, 4):
        assert stepper.step(square, torch.randn(8, 16)).applied
        assert model.seen.numel() == grown
        assert not stepper.step(square, BAD).applied
        assert model.seen.tolist() == [1.0] * grown


# -- buffers that are not finite -----------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_would_leave_inf_in_batch_norm_is_skipped(precision: str) -> None:
    model = normed()
    stepper = sgd(model, precision=precision)
    stepper.step(square, torch.randn(8, 16))
    before = everything(model)
    huge = torch.randn(8, 16)
    huge[0] = 1e25
    report = stepper.step(square, huge)
    assert (report.applied, report.reason, report.finite) == (False, "buffer_not_finite", True)
    assert stepper.bad_buffer == "1.running_var"
    assert everything(model) == before
    assert stepper.step(square, torch.randn(8, 16)).applied


def test_buffers_that_begin_with_inf_are_nobodys_fault() -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)
            self.register_buffer("smallest", torch.tensor(float("inf")))
            self.register_buffer("best", torch.tensor(-float("inf")))

        def forward(self, x: Tensor) -> Tensor:
            self.smallest = torch.minimum(self.smallest, x.detach().min())
            return self.layer(x)

    model = Observer()
    stepper = sgd(model)
    for _ in range(3):
        assert stepper.step(square, torch.randn(8, 16)).applied
    assert torch.isfinite(model.smallest)


def test_a_buffer_that_came_so_from_elsewhere_does_not_stop_the_run() -> None:
    model = normed()
    stepper = sgd(model)
    stepper.step(square, torch.randn(8, 16))
    model[1].running_var.fill_(float("inf"))
    assert [stepper.step(square, torch.randn(8, 16)).applied for _ in range(3)] == [True] * 3
    assert halfstep.Stepper is Stepper


def test_a_teacher_that_is_replaced_by_another_is_found() -> None:
    model, nets = nn.Linear(16, 4), {"teacher": nn.Linear(16, 4).requires_grad_(False)}

    def distil(model: nn.Module, x: Tensor) -> Tensor:
        teacher = nets["teacher"]
        with torch.no_grad():
            teacher.weight.lerp_(model.weight, 0.1)
        return (model(x) - teacher(x)).square().mean()

    stepper = sgd(model)
    stepper.step(distil, torch.randn(8, 16))
    nets["teacher"] = nn.Linear(16, 4).requires_grad_(False)
    for _ in range(2):
        assert stepper.step(distil, torch.randn(8, 16)).applied
    before = everything(model, nets["teacher"])
    assert not stepper.step(distil, BAD).applied
    assert everything(model, nets["teacher"]) == before


def test_a_buffer_that_is_registered_as_none_is_none_again() -> None:
    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)
            self.register_buffer("scale", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = x.detach().std(0)
            return self.layer(x / self.scale)

    model = ActNorm()
    stepper = sgd(model)
    assert not stepper.step(square, BAD).applied
    assert model.scale is None
    assert stepper.step(square, torch.randn(8, 16)).applied
    assert model.scale is not None
