"""What GradScaler.include takes for an average, for a model and for a teacher, by what each of them holds and does."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from halfstep.errors import WrongUse

timm_utils = pytest.importorskip("timm.utils")
training_utils = pytest.importorskip("diffusers.training_utils")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


class Shaped(nn.Module):
    """The shape of ema_pytorch's EMA: the model as a child or in a list, a detached copy, `update()`, no `decay`."""

    def __init__(self, model: nn.Module, beta: float = 0.9, *, include_online_model: bool = True) -> None:
        super().__init__()
        self.beta, self.include_online_model = beta, include_online_model
        self.online_model: Any = model if include_online_model else [model]
        self.ema_model = copy.deepcopy(model)
        for p in self.ema_model.parameters():
            p.detach_()
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self) -> None:
        self.step.add_(1)
        model = self.online_model if self.include_online_model else self.online_model[0]
        for a, p in zip(self.ema_model.parameters(), model.parameters(), strict=True):
            a.data.lerp_(p.data, 1 - self.beta)


class Homemade(nn.Module):
    """An average as people write it: a copy that still requires gradients, and `update(model)`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for a, p in zip(self.module.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)


class Teacher(Net):
    """A momentum teacher that moves itself, and is no wrapper."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.load_state_dict(student.state_dict())
        self.requires_grad_(False)

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        for a, p in zip(self.parameters(), student.parameters(), strict=True):
            a.lerp_(p, 0.1)


class WithWeakReference(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.shadow = weakref.ref(model), copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def step(self) -> None:
        for a, p in zip(self.shadow.parameters(), self.model().parameters(), strict=True):  # type: ignore[union-attr]
            a.lerp_(p, 0.1)


class InBuffers(nn.Module):
    """An average that keeps its copy in buffers, as CompVis' LitEma does; here with `update`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(0.1))
        for name, p in model.named_parameters():
            self.register_buffer(name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            getattr(self, name.replace(".", "_")).lerp_(p, self.rate)


def real_ema_pytorch(model: nn.Module, **settings: Any) -> Any:
    package = pytest.importorskip("ema_pytorch")
    return package.EMA(model, beta=0.9, update_after_step=0, update_every=1, **settings)


def half_frozen(model: nn.Module) -> nn.Module:
    model.first.requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def with_model(average: Any, model: nn.Module) -> None:
    average.update(model)


def alone(average: Any, _: nn.Module) -> None:
    average.update()


AVERAGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module], object]]] = {
    "ema_pytorch": (real_ema_pytorch, alone),
    "ema_pytorch of a model with a frozen part": (lambda model: real_ema_pytorch(half_frozen(model)), alone),
    "shape of ema_pytorch, model with a frozen part": (lambda model: Shaped(half_frozen(model)), alone),
    "ema_pytorch, model apart": (lambda model: real_ema_pytorch(model, include_online_model=False), alone),
    "shape of ema_pytorch": (Shaped, alone),
    "shape of ema_pytorch, model apart": (lambda model: Shaped(model, include_online_model=False), alone),
    "timm V2": (lambda model: timm_utils.ModelEmaV2(model, decay=0.9), with_model),
    "timm V3": (lambda model: timm_utils.ModelEmaV3(model, decay=0.9), with_model),
    "timm's first": (lambda model: timm_utils.ModelEma(model, decay=0.9), with_model),
    "torch": (lambda model: AveragedModel(model), lambda average, model: average.update_parameters(model)),
    "torch's EMA with buffers": (
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        lambda average, model: average.update_parameters(model),
    ),
    "diffusers": (
        lambda model: training_utils.EMAModel(model.parameters(), decay=0.9),
        lambda average, model: average.step(model.parameters()),
    ),
    "halfstep": (lambda model: halfstep.Ema(model, 0.9), alone),
    "homemade": (Homemade, with_model),
    "teacher": (Teacher, with_model),
    "weak reference": (WithWeakReference, lambda average, _: average.step()),
    "in buffers": (InBuffers, with_model),
}
NEED_THE_MODEL = ("homemade", "teacher", "in buffers")
"""Averages that hold no reference to the model: they are known by the model beside them."""


def content(average: Any) -> dict[str, Tensor]:
    """Every tensor of an average, wherever it holds it."""
    if isinstance(average, nn.Module):
        return {name: value.clone() for name, value in average.state_dict().items()}
    if isinstance(average, timm_utils.ModelEma):
        return {name: value.clone() for name, value in average.ema.state_dict().items()}
    if isinstance(average, training_utils.EMAModel):
        return {str(place): value.clone() for place, value in enumerate(average.shadow_params)}
    return {name: value.clone() for name, value in average.state_dict()["averages"].items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor) -> bool:
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return bool(scaler.report.applied)


def ready(model: nn.Module, *things: Any, **hold: Any) -> tuple[Any, Any]:
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(*things, **hold)
    return torch.optim.SGD(model.parameters(), lr=0.1), scaler


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("beside", [True, False], ids=["with the model", "alone"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_moves_with_applied_updates_only(name: str, beside: bool) -> None:
    if not beside and name in NEED_THE_MODEL:
        pytest.skip("it holds no model, and is refused or a module then: see below")
    make, move = AVERAGES[name]
    torch.manual_seed(0)
    model = Net()
    average = make(model)
    optimizer, scaler = ready(model, *([model] if beside else []), average)
    for x, applied in ((X, True), (X, True), (X * float("nan"), False), (X, True)):
        assert train(model, optimizer, scaler, x) is applied
        if not applied and not beside:
            model.norm.reset_running_stats()  # not included, so not put back: a copy of NaN would not be comparable
        before = content(average)
        move(average, model)
        assert equal(before, content(average)) is not applied
    assert all(value.isfinite().all() for value in content(average).values())


def test_the_order_of_model_and_average_does_not_matter() -> None:
    torch.manual_seed(0)
    model = Net()
    average = Homemade(model)
    optimizer, scaler = ready(model, average, model)
    train(model, optimizer, scaler, X * float("nan"))
    before = content(average)
    average.update(Net())
    assert equal(before, content(average))


def test_statistics_of_a_teacher_that_moves_itself_are_put_back_too() -> None:
    torch.manual_seed(0)
    model = Net()
    teacher = Teacher(model)
    optimizer, scaler = ready(model, model, teacher)
    for x in (X, X * float("nan")):
        optimizer.zero_grad()
        out = model(x)
        with torch.no_grad():
            target = teacher(x)
        scaler.scale((out - target - 1).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        teacher.update(model)
    assert scaler.counts.skipped_in_a_row == 1
    assert all(value.isfinite().all() for value in teacher.state_dict().values())
    assert int(teacher.norm.num_batches_tracked) == 1


# -- what is no average -----------------------------------------------------------------------------------------------


class Steps(Net):
    """A model with a method that forward uses, as recurrent networks and graph networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def step(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = super().forward(x)
        return out

    update = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


class HeadOnFrozen(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Agent(nn.Module):
    """An agent with its optimizer and a target network, whose `update` trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = Net(), Net().requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def update(self) -> None:
        self.calls += 1


class Wrapper(nn.Module):
    """A wrapper of the trained model itself, with a `step` of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def step(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("make", [Steps, HeadOnFrozen, Agent, lambda: Wrapper(Net())])
def test_a_model_with_such_a_method_is_no_average(make: Any) -> None:
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(model, *(model.children() if isinstance(model, Wrapper) else ()))
    assert not train(model, optimizer, scaler, X * float("nan"))
    before = model.calls
    if isinstance(model, Steps):
        assert isinstance(model(X), Tensor), "its method runs after a skip"
    else:
        (model.update if isinstance(model, Agent) else model.step)()
    assert model.calls == before + 1
    assert all(value.isfinite().all() for value in model.state_dict().values())


class WithNetwork(torchmetrics.MeanMetric):
    """A metric with a frozen network of its own, as the Inception distance is."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(3, 3).requires_grad_(False)


@pytest.mark.parametrize(
    "make", [torchmetrics.MeanMetric, WithNetwork, lambda: torchmetrics.MetricCollection([torchmetrics.MeanMetric()])]
)
def test_a_metric_is_no_average(make: Any) -> None:
    model, metric = Net(), make()
    optimizer, scaler = ready(model, model, metric)
    assert not train(model, optimizer, scaler, X * float("nan"))
    metric.update(torch.tensor(3.0))
    values = metric.compute()
    assert (values if isinstance(values, Tensor) else values["MeanMetric"]) == 3.0


def test_containers_of_torch_are_no_averages() -> None:
    """Their `update` adds members; student and teacher in one are common."""
    net = Net()
    both = nn.ModuleDict({"student": net, "teacher": copy.deepcopy(net).requires_grad_(False)})
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(both, nn.ModuleDict({"frozen": Net().requires_grad_(False)}))
    both.update({"more": nn.Linear(1, 1)})
    assert "more" in both


# -- what cannot be decided -------------------------------------------------------------------------------------------


class Ahead(nn.Module):
    """A model with a trained network, a frozen copy of a part of it, and `update`: BYOL's or DQN's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Net(), nn.Linear(1, 1)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def update(self) -> None: ...


class LitShape(nn.Module):
    """An average that its forward moves, as CompVis' LitEma."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        self.register_buffer("num_updates", torch.tensor(0))
        for name, p in model.named_parameters():
            self.register_buffer(name.replace(".", ""), p.detach().clone())

    def forward(self, model: nn.Module) -> None:
        self.num_updates.add_(1)


MODEL = Net()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("make", "method"),
    [
        (Ahead, "update"),
        (lambda: Steps().requires_grad_(False), "step"),
        (lambda: (Steps(), Steps()), "step"),
        (lambda: Teacher(Net()), "update"),
        (lambda: (MODEL, LitShape(MODEL)), "forward"),
    ],
    ids=["target network", "frozen model", "twins", "teacher without its student", "moved by forward"],
)
def test_what_may_be_an_average_is_refused_by_name_and_can_be_said(make: Any, method: str) -> None:
    things = made if isinstance(made := make(), tuple) else (made,)
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    with pytest.raises(WrongUse, match=rf"include\({type(things[-1]).__name__}\)") as refused:
        scaler.include(*things)
    assert f"hold={method!r}" in refused.value.do
    assert "hold=False" in refused.value.do
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(*things, hold=False)
    scaler.include(things[-1], hold=method)
    with pytest.raises(WrongUse, match="hold=True"):
        scaler.include(things[-1], hold=True)  # type: ignore[arg-type]


@pytest.mark.wording
def test_an_optimizer_in_backward_of_an_included_model_is_refused() -> None:
    model = Net()
    muon = torch.optim.Muon([model.first.weight], lr=1e-2)

    def step_and_free(p: Tensor) -> None:
        muon.step()
        muon.zero_grad()

    handle = model.first.weight.register_post_accumulate_grad_hook(step_and_free)
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    with pytest.raises(WrongUse, match=r"first\.weight of the model has an optimizer in backward"):
        scaler.include(model)
    handle.remove()
    scaler.include(model)


def test_a_named_method_is_held_where_forward_moves_the_average() -> None:
    model = Net()
    average = LitShape(model)
    optimizer, scaler = ready(model, model)
    scaler.include(average, hold="forward")
    for x, moved in ((X, 1), (X * float("nan"), 1), (X, 2)):
        train(model, optimizer, scaler, x)
        average(model)
        assert int(average.num_updates) == moved


# -- teachers that run first ------------------------------------------------------------------------------------------


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


class Distilled:
    """A student and a teacher in training mode, of which the teacher runs first and without gradients."""

    def __init__(self, *, calls: int = 1, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.model, self.teacher = Net(), Net().requires_grad_(False)
        self.optimizer, self.scaler = ready(self.model, self.model, self.teacher)
        self.calls, self.accumulate = calls, accumulate

    def window(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        for _ in range(self.accumulate):
            with torch.no_grad():
                target = sum(self.teacher(x + place) for place in range(self.calls))
            self.scaler.scale((self.model(x) - target - 1).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.report


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_teacher_that_runs_first_is_put_back_from_the_second_window_on(calls: int, accumulate: int) -> None:
    loop = Distilled(calls=calls, accumulate=accumulate)
    assert loop.window(X).applied
    for _ in range(2):
        before = statistics(loop.teacher), statistics(loop.model)
        assert loop.window(X * float("nan")).reason == "loss_not_finite"
        assert equal(statistics(loop.teacher), before[0])
        assert equal(statistics(loop.model), before[1])
        assert loop.window(X).applied
        assert not equal(statistics(loop.teacher), before[0]), "an applied window keeps its statistics"


def test_limit_a_teacher_that_runs_first_is_not_put_back_in_the_first_window() -> None:
    loop = Distilled()
    assert not loop.window(X * float("nan")).applied
    assert not loop.teacher.norm.running_mean.isfinite().all()
    assert loop.model.norm.running_mean.isfinite().all()


@pytest.mark.parametrize("which", ["model", "teacher"])
@pytest.mark.parametrize("batches", [1, 3])
def test_recalibration_without_gradients_still_belongs_to_no_window(which: str, batches: int) -> None:
    loop = Distilled()
    loop.window(X)
    with torch.no_grad():
        for place in range(batches):
            getattr(loop, which)(7 * X + place)
    before = statistics(loop.teacher), statistics(loop.model)
    assert not loop.window(X * float("nan")).applied
    assert equal(statistics(loop.teacher), before[0])
    assert equal(statistics(loop.model), before[1])


def test_evaluation_still_belongs_to_no_window() -> None:
    loop = Distilled()
    loop.window(X)
    loop.teacher.eval()
    with torch.no_grad():
        loop.teacher(X)
    loop.teacher.train()
    loop.teacher.norm.running_mean.fill_(5.0)  # a checkpoint is loaded
    before = statistics(loop.teacher)
    assert not loop.window(X * float("nan")).applied
    assert equal(statistics(loop.teacher), before)


def test_a_model_that_ran_without_gradients_before_its_own_pass_is_no_teacher() -> None:
    """Such as a first pass for statistics or for lazy layers: what it wrote before the window stays."""
    torch.manual_seed(0)
    model = Net()
    optimizer, scaler = ready(model, model)
    for x in (X, X * float("nan")):
        with torch.no_grad():
            model(X)
        before = statistics(model)
        train(model, optimizer, scaler, x)
    assert equal(statistics(model), before)


def test_a_generator_that_runs_first_in_the_other_window_can_still_be_recalibrated() -> None:
    """In the discriminator's window it is like a teacher; its own window begins with its own pass."""
    torch.manual_seed(0)
    model, other = Net(), nn.Linear(1, 1)
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(model, other)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (other, model)]
    with torch.no_grad():
        fake = model(X)
    scaler.scale(other(fake).square().mean()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    with torch.no_grad():
        model(7 * X)
    before = statistics(model)
    assert not train(model, optimizers[1], scaler, X * float("nan"))
    assert equal(statistics(model), before)
