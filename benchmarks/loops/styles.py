"""Ways of writing a loop: batches, loss functions, classes, callbacks, what a loss function returns."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from benchmarks.loops.harness import (
    NAN,
    Case,
    HalfstepError,
    adamw,
    ce,
    frozen_copy,
    labelled,
    limit,
    loop,
    mlp,
    mse,
    normal,
    pairs,
    poisoned,
    promise,
    refuses,
    require,
    require_same,
    same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Out, Stepper, StepReport

# -- batches ------------------------------------------------------------------------------------------------------


def simple(loss_fn: Callable[..., Any], norm: bool = True) -> Callable[[], Case]:
    def build() -> Case:
        model = mlp(norm=norm)
        return Case(model, adamw(model), loss_fn)

    return build


@loop
def dict_batches() -> str:
    batches = [{"image": x, "label": y, "path": ["a.png"] * 8} for x, y in labelled()]
    return promise(simple(lambda m, b: F.cross_entropy(m(b["image"]), b["label"])), batches)


@loop
def dataclass_batches() -> str:
    @dataclass
    class Batch:
        x: Tensor
        y: Tensor

    batches = [Batch(x, y) for x, y in labelled()]
    bad = Batch(batches[0].x * NAN, batches[0].y)
    return promise(simple(lambda m, b: F.cross_entropy(m(b.x), b.y)), batches, bad)


@loop
def namedtuple_batches() -> str:
    Batch = namedtuple("Batch", "x y")
    batches = [Batch(x, y) for x, y in labelled()]
    return promise(simple(ce), batches)


@loop
def list_batches_are_one_batch() -> str:
    """A DataLoader gives lists: a list is a batch, and no window."""
    return promise(simple(ce), [list(pair) for pair in labelled()])


@loop
def data_loader_over_two_epochs() -> str:
    """A real loader, a short last batch, evaluation between epochs."""

    def run(ours: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = mlp(norm=True)
        case = Case(model, adamw(model), ce)
        case.start()
        data = TensorDataset(normal(37, 16), whole(4, 37))
        for _ in range(2):
            for batch in DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1)):
                if ours:
                    case.stepper.step(ce, batch)
                else:
                    case.optimizer.zero_grad()
                    ce(model, batch).backward()
                    case.optimizer.step()
            model.eval()
            with torch.no_grad():
                model(normal(4, 16))
            model.train()
        return case.state()

    require_same(run(False), run(True), "compared with the loop by hand")
    return "2 epochs of 5 batches bitwise as by hand"


@loop
def evaluating_between_steps() -> str:
    """`with stepper.evaluating()`: modes of every module come back, BatchNorm does not move."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    model[1].eval()  # one layer frozen in eval mode by the user
    case = Case(model, adamw(model), ce)
    stepper = case.start()
    for batch in labelled(3):
        trains(case, [batch])
        before, modes = case.state(), [m.training for m in model.modules()]
        with stepper.evaluating() as net:
            require(not net.training and not torch.is_grad_enabled(), "not in eval mode")
            net(batch[0])
        require(modes == [m.training for m in model.modules()], "modes did not come back")
        require_same(before, case.state(), "after evaluating")
    return "3 evaluations moved nothing; a layer left in eval mode stays so"


# -- loss functions -----------------------------------------------------------------------------------------------


@loop
def lambda_in_the_loop() -> str:
    """A notebook's `stepper.step(lambda m, b: ..., batch)`: another function in every step."""
    states = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = mlp(norm=True)
        head = nn.BatchNorm1d(4)
        case = Case(model, adamw(model), ce, beside=[head])
        stepper = case.start()
        for x, y in labelled(4):
            if ours:
                case.loss_fn = lambda m, b, head=head: F.cross_entropy(head(m(b[0])), b[1])
                skips(case, (x * NAN, y))
                require(
                    stepper.step(lambda m, b, head=head: F.cross_entropy(head(m(b[0])), b[1]), (x, y)).applied,
                    "skipped",
                )
            else:
                case.optimizer.zero_grad()
                F.cross_entropy(head(model(x)), y).backward()
                case.optimizer.step()
        states.append(case.state())
    require_same(*states, "compared with the loop by hand")
    return "4 lambdas bitwise as by hand, and the module that they hold is taken back"


@loop
def lambda_over_the_loops_variables() -> str:
    """`lambda m, _: mse(m, batch)`: the batch comes from the closure."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, adamw(model), mse)
    stepper = case.start()
    for batch in pairs(3):
        report = stepper.step(lambda m, _: mse(m, batch), None)  # noqa: B023
        require(report.applied, str(report))
    return "3 steps applied"


class Trainer:
    """A Lightning-like class: everything hangs on `self`."""

    def __init__(self) -> None:
        self.model, self.teacher = mlp(norm=True), mlp(norm=True).requires_grad_(False)
        self.optimizer = adamw(self.model)
        self.stepper = Stepper(self.model, self.optimizer, precision="fp32")
        self.seen = 0

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        with torch.no_grad():
            aim = self.teacher(batch[0])
        return F.mse_loss(model(batch[0]), aim)

    def step(self, batch: Any) -> StepReport:
        return self.stepper.step(self.training_step, batch)


@loop
def class_with_self_step() -> str:
    torch.manual_seed(0)
    trainer = Trainer()
    case = Case(trainer.model, trainer.optimizer, trainer.training_step, beside=[trainer.teacher])
    case.stepper = trainer.stepper
    for batch in pairs(3):
        skips(case, poisoned(batch))
        require(trainer.step(batch).applied, "not applied")
    return "the teacher on self is taken back, too"


@loop
def functools_partial() -> str:
    def loss(m: nn.Module, b: Any, *, teacher: nn.Module, weight: float) -> Tensor:
        return weight * F.mse_loss(m(b[0]), teacher(b[0]).detach())

    def build() -> Case:
        model, teacher = mlp(), mlp(norm=True).requires_grad_(False)
        return Case(model, adamw(model), functools.partial(loss, teacher=teacher, weight=0.5), beside=[teacher])

    return promise(build, pairs())


@loop
def callable_object() -> str:
    class Criterion:
        def __init__(self) -> None:
            self.norm = nn.BatchNorm1d(4)

        def __call__(self, m: nn.Module, b: Any) -> Tensor:
            return F.cross_entropy(self.norm(m(b[0])), b[1])

    def build() -> Case:
        model, criterion = mlp(), Criterion()
        return Case(model, adamw(model), criterion, beside=[criterion.norm])

    return promise(build, labelled())


@loop
def loss_module_is_the_loss_function() -> str:
    """An nn.Module whose forward takes (model, batch)."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, m: nn.Module, b: Any) -> Tensor:
            return F.cross_entropy(self.norm(m(b[0])), b[1])

    def build() -> Case:
        model, criterion = mlp(), Criterion()
        return Case(model, adamw(model), criterion, beside=[criterion])

    return promise(build, labelled())


GLOBAL = nn.BatchNorm1d(4)


def global_loss(m: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(GLOBAL(m(b[0])), b[1])


@loop
def module_level_global() -> str:
    """A notebook: the other network is a global."""

    def build() -> Case:
        GLOBAL.reset_running_stats()
        model = mlp()
        return Case(model, adamw(model), global_loss, beside=[GLOBAL])

    return promise(build, labelled())


@loop
def function_that_calls_a_function() -> str:
    """The module is held by a helper that the loss function calls."""

    def build() -> Case:
        model, norm = mlp(), nn.BatchNorm1d(4)

        def helper(x: Tensor) -> Tensor:
            return norm(x)

        def loss(m: nn.Module, b: Any) -> Tensor:
            return F.cross_entropy(helper(m(b[0])), b[1])

        return Case(model, adamw(model), loss, beside=[norm])

    return promise(build, labelled())


@loop
def model_is_not_the_argument() -> str:
    """`lambda _, b: ...` over the model of the closure."""

    def build() -> Case:
        model = mlp(norm=True)
        return Case(model, adamw(model), lambda _, b: ce(model, b))

    return promise(build, labelled())


# -- what comes back ----------------------------------------------------------------------------------------------


@loop
def out_with_aux() -> str:
    def loss(m: nn.Module, b: Any) -> Out:
        logits = m(b[0])
        return Out(F.cross_entropy(logits, b[1]), aux={"accuracy": (logits.argmax(1) == b[1]).float().mean()})

    torch.manual_seed(0)
    case = simple(loss)()
    case.start()
    report = trains(case, labelled(1))[0]
    require(not report.aux["accuracy"].requires_grad, "the aux holds a graph")
    return promise(simple(loss), labelled())


@loop
def tuple_is_refused() -> str:
    """`return loss, accuracy` could be (loss, metric) or (sum, count)."""
    torch.manual_seed(0)
    case = simple(lambda m, b: (ce(m, b), torch.tensor(8.0)))()
    case.start()
    before = case.state()
    with refuses(HalfstepError, "tuple", "Out"):
        case.stepper.step(case.loss_fn, labelled(1)[0])
    require_same(before, case.state(), "after the refusal")
    require(case.stepper.step(ce, labelled(1)[0]).applied, "did not go on")
    return "refused, the remedy named, nothing moved, and the loop went on"


def _not_a_loss(loss_fn: Callable[..., Any]) -> str:
    torch.manual_seed(0)
    case = simple(loss_fn)()
    case.start()
    before = case.state()
    with refuses(HalfstepError):
        case.stepper.step(loss_fn, labelled(1)[0])
    require_same(before, case.state(), "after the refusal")
    return "refused, nothing moved"


@loop
def loss_of_a_whole_batch_is_refused() -> str:
    return _not_a_loss(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))


@loop
def loss_item_is_refused() -> str:
    return _not_a_loss(lambda m, b: ce(m, b).item())


@loop
def detached_loss_is_refused() -> str:
    return _not_a_loss(lambda m, b: ce(m, b).detach())


@loop
def nothing_returned_is_refused() -> str:
    return _not_a_loss(lambda m, b: None)


# -- gradients edited ---------------------------------------------------------------------------------------------


@loop
def gradient_noise_in_on_gradients() -> str:
    """Noise is added to unscaled gradients, before the norm and the clip."""
    drawn = torch.Generator()

    def noise(parameters: list[Tensor]) -> None:
        for p in parameters:
            p.grad.add_(torch.randn(p.shape, generator=drawn) * 0.01)

    return _edited(noise, drawn)


@loop
def gradient_centralisation_in_on_gradients() -> str:
    def centralise(parameters: list[Tensor]) -> None:
        for p in parameters:
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    return _edited(centralise, torch.Generator())


def _edited(edit: Callable[[list[Tensor]], None], drawn: torch.Generator) -> str:
    states = []
    for ours in (False, True):
        drawn.manual_seed(0)
        torch.manual_seed(0)
        model = mlp(norm=True)
        case = Case(model, adamw(model), ce, options={"clip_norm": 0.5})
        case.start(on_gradients=edit)
        for batch in labelled(4):
            if ours:
                require(case.stepper.step(ce, batch).applied, "not applied")
            else:
                case.optimizer.zero_grad()
                ce(model, batch).backward()
                edit(list(model.parameters()))
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                case.optimizer.step()
        states.append(case.state())
    require_same(*states, "compared with the loop by hand")
    return "4 edited steps bitwise as by hand"


@loop
def edit_that_makes_nan_is_judged() -> str:
    """What `on_gradients` writes is judged like any gradient."""

    def spoil(parameters: list[Tensor]) -> None:
        parameters[0].grad.fill_(NAN)

    torch.manual_seed(0)
    case = simple(ce)()
    case.start(on_gradients=spoil)
    report = skips(case, labelled(1)[0], ("gradient_not_finite",))
    return f"skipped: {report.reason}"


# -- what torch does not hold -------------------------------------------------------------------------------------


@loop
def torchmetrics_in_the_loss_function() -> str:
    """Metrics count a batch that was then skipped."""
    from torchmetrics.classification import MulticlassAccuracy

    torch.manual_seed(0)
    model, metric = mlp(), MulticlassAccuracy(num_classes=4)

    def loss(m: nn.Module, b: Any) -> Tensor:
        logits = m(b[0])
        metric.update(logits.detach().nan_to_num(), b[1])
        return F.cross_entropy(logits, b[1])

    case = Case(model, adamw(model), loss)
    case.start()
    trains(case, labelled(2))
    skips(case, poisoned(labelled(1)[0]))
    counted = int(metric.tp.sum() + metric.fn.sum()) if hasattr(metric, "tp") else -1
    if counted == 16:
        return "the metric counted the 2 applied batches of 8, and not the skipped one"
    return limit("metrics", f"the metric counted {counted} rows of 3 batches, one of which was skipped")


@loop
def python_counters() -> str:
    torch.manual_seed(0)
    seen = {"steps": 0}

    def loss(m: nn.Module, b: Any) -> Tensor:
        seen["steps"] += 1
        return ce(m, b)

    case = simple(loss)()
    case.start()
    trains(case, labelled(2))
    skips(case, poisoned(labelled(1)[0]))
    require(seen["steps"] == 3, f"{seen}")
    return limit("numbers", "a Python number counted 3, applied were 2; report.applied tells")


@loop
def foreign_clip_and_optimizer_step() -> str:
    """The three-call form, with the old lines left in: clip_grad_norm_ and optimizer.step() by hand."""
    torch.manual_seed(0)
    case = simple(ce)()
    stepper = case.start()
    batch = labelled(1)[0]
    with stepper.forward():
        loss = ce(case.model, batch)
    stepper.backward(loss)
    with refuses(HalfstepError):
        case.optimizer.step()
        stepper.apply()
    return "an optimizer.step() of one's own is noticed"


@loop
def deepcopied_model_after_training() -> str:
    """`best = copy.deepcopy(model)` in the middle, and the copy predicts what the model predicted."""
    torch.manual_seed(0)
    case = simple(ce)()
    case.start()
    trains(case, labelled(3))
    best = frozen_copy(case.model).eval()
    told = best(normal(4, 16))
    trains(case, labelled(3))
    require(same(told, best(normal(4, 16))), "the copy moved with the model")
    require(
        halfstep.Stepper(best.requires_grad_(True), sgd(best), precision="fp32").step(ce, labelled(1)[0]).applied, ""
    )
    return "the copy stays, and can be trained by a Stepper of its own"
