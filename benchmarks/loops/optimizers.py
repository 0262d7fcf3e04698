"""Every first-order optimizer of torch, schedules, parameter groups, and the optimizers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from benchmarks.loops.harness import (
    Case,
    HalfstepError,
    adamw,
    ce,
    labelled,
    loop,
    mlp,
    mse,
    named,
    pairs,
    promise,
    refuses,
    require,
    require_same,
    sgd,
    skips,
)
from halfstep import Ema, Stepper

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {"t0": 1.0},
    "Rprop": {},
    "Adafactor": {},
}
KINDS = ("plain", "foreach", "fused")


def _optimizer_case(name: str, kind: str) -> Case:
    model = mlp(norm=True)
    options = OPTIMIZERS[name] | ({"foreach": False} if kind == "plain" else {kind: True})
    return Case(model, getattr(optim, name)(model.parameters(), **options), ce)


def _optimizer_loop(name: str, kind: str) -> str:
    return promise(partial(_optimizer_case, name, kind), labelled())


for _name in OPTIMIZERS:
    for _kind in KINDS:
        if _kind == "fused" and _name not in ("SGD", "Adam", "AdamW", "Adagrad"):
            continue
        named(f"{_name.lower()}_{_kind}", partial(_optimizer_loop, _name, _kind), "optimizers")


@loop
def muon_and_adamw_one_loss() -> str:
    """Hidden matrices with Muon, the rest with AdamW, one loss and one clip."""

    def build() -> Case:
        model = mlp(16, 32, 32, 4)
        matrices = [p for p in model[2].parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if all(p is not q for q in matrices)]
        both = {"muon": optim.Muon(matrices, lr=0.02), "adamw": optim.AdamW(rest, lr=1e-3)}
        return Case(model, both, mse, options={"clip_norm": 0.5})

    return promise(build, pairs())


@loop
def sgd_fused_momentum_first_step_nan() -> str:
    """Stock GradScaler leaves uninitialized memory in fused SGD's momentum when the first step is skipped."""

    def build() -> Case:
        model = mlp()
        return Case(model, sgd(model, momentum=0.9, fused=True), mse)

    return promise(build, pairs(), precision="fp16")


@loop
def parameter_groups_with_own_rates() -> str:
    """A backbone and a head, no decay on biases."""

    def build() -> Case:
        model = mlp(16, 32, 32, 4)
        groups = [
            {"params": [p for p in model[:3].parameters() if p.ndim > 1], "lr": 1e-3},
            {"params": [p for p in model[:3].parameters() if p.ndim == 1], "lr": 1e-3, "weight_decay": 0.0},
            {"params": list(model[3:].parameters())},
        ]
        return Case(model, optim.AdamW(groups, lr=1e-2, weight_decay=0.1), mse, options={"clip_norm": 1.0})

    return promise(build, pairs())


@loop
def learning_rate_is_a_tensor() -> str:
    def build() -> Case:
        model = mlp()
        return Case(model, optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False), mse)

    return promise(build, pairs())


@loop
def maximize() -> str:
    def build() -> Case:
        model = mlp()
        return Case(model, optim.SGD(model.parameters(), lr=1e-3, maximize=True), mse)

    return promise(build, pairs())


@loop
def learning_rate_set_by_hand() -> str:
    """`for g in optimizer.param_groups: g["lr"] = ...` before every step."""

    def run(step: Callable[[Case, Any], object]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = mlp()
        case = Case(model, adamw(model), mse)
        case.start()
        for i, batch in enumerate(pairs(5)):
            for group in case.optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (i + 1) / 3)
            step(case, batch)
        return case.state()

    from benchmarks.loops.harness import by_hand

    hand, ours = run(by_hand), run(lambda case, batch: case.stepper.step(mse, batch))
    require_same(hand, ours, "compared with the loop by hand")
    return "5 warm-up rates written by hand, bitwise as by hand"


# -- schedules ----------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "one_cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "warmup_then_cosine": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 10)], milestones=[2]
    ),
    "cosine_restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "lambda_warmup": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "multistep": lambda o: schedules.MultiStepLR(o, [1, 3]),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, total_iters=2), schedules.ExponentialLR(o, 0.9)]
    ),
    "cyclic_momentum": lambda o: schedules.CyclicLR(o, 1e-3, 1e-1, step_size_up=2, cycle_momentum=True),
    "polynomial": lambda o: schedules.PolynomialLR(o, total_iters=6, power=2.0),
}


def _schedule_loop(name: str) -> str:
    def build() -> Case:
        model = mlp()
        optimizer = sgd(model, lr=1e-2, momentum=0.9)
        return Case(model, optimizer, mse, schedule=SCHEDULES[name](optimizer))

    return promise(build, pairs(6))


for _name in SCHEDULES:
    named(f"schedule_{_name}", partial(_schedule_loop, _name), "optimizers")


@loop
def schedules_by_name() -> str:
    """Two optimizers, one loss, a schedule each."""

    def build() -> Case:
        model = mlp(16, 32, 4)
        one, two = sgd(model[0]), adamw(model[2])
        by_name = {"one": schedules.StepLR(one, 1), "two": schedules.ExponentialLR(two, 0.5)}
        return Case(model, {"one": one, "two": two}, mse, schedule=by_name, options={"clip_norm": 1.0})

    return promise(build, pairs())


@loop
def plateau_outside() -> str:
    """ReduceLROnPlateau belongs to the loop: stepped by hand with the validation loss, kept across skips."""
    torch.manual_seed(0)
    model = mlp()
    case = Case(model, sgd(model), mse)
    stepper = case.start()
    plateau = schedules.ReduceLROnPlateau(case.optimizer, patience=0, factor=0.5)
    rates = []
    for batch in pairs(4):
        stepper.step(mse, batch)
        plateau.step(1.0)
        rates.append(case.optimizer.param_groups[0]["lr"])
    require(rates == [0.1, 0.05, 0.025, 0.0125], f"rates {rates}")
    skips(case, (pairs()[0][0] * float("nan"), pairs()[0][1]))
    require(case.optimizer.param_groups[0]["lr"] == 0.0125, "a skip moved the rate")
    return f"rates {rates}"


@loop
def plateau_given_as_schedule_is_refused() -> str:
    model = mlp()
    optimizer = sgd(model)
    with refuses(HalfstepError, "ReduceLROnPlateau"):
        Stepper(model, optimizer, precision="fp32", schedule=schedules.ReduceLROnPlateau(optimizer))
    return "refused by name"


@loop
def schedule_of_another_optimizer() -> str:
    """A schedule that was made for an optimizer which the Stepper does not have would silently do nothing."""
    model = mlp()
    with refuses(HalfstepError, "schedule"):
        Stepper(model, sgd(model), precision="fp32", schedule=schedules.StepLR(sgd(model), 1))
    return "refused"


# -- averages -----------------------------------------------------------------------------------------------------


@loop
def ema_as_by_hand() -> str:
    """The average in fp32, buffers copied along, and worn for evaluation."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    case = Case(model, adamw(model), mse, options={"ema": Ema(model, 0.9)})
    stepper = case.start()
    for batch in pairs(6):
        skips(case, (batch[0] * float("inf"), batch[1]))
        stepper.step(mse, batch)
        for name, p in model.named_parameters():
            mean[name].lerp_(p.detach(), 1 - 0.9)
    with stepper.evaluating(ema=True) as worn:
        far = max((p - mean[n]).abs().max().item() for n, p in worn.named_parameters())
        require(same_buffers(worn, model), "buffers of the average")
    require(far < 1e-6, f"the average is {far} away")
    return f"6 averages within {far:.1e} of those by hand; skips left it"


def same_buffers(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


@loop
def ema_with_layers_frozen_for_a_while() -> str:
    """A layer that is frozen for a while keeps its average, and it goes on from there."""
    torch.manual_seed(0)
    model = mlp(16, 32, 4)
    mean = [p.detach().clone() for p in model.parameters()]
    ema = Ema(model, 0.5)
    case = Case(model, optim.SGD(model.parameters(), lr=0.1), mse, options={"ema": ema})
    stepper = case.start()
    for i, batch in enumerate(pairs(6)):
        model[0].requires_grad_(not 2 <= i < 4)
        stepper.step(mse, batch)
        for m, p in zip(mean, model.parameters(), strict=True):
            m.lerp_(p.detach(), 0.5)
    with stepper.evaluating(ema=True) as worn:
        far = max((p - m).abs().max().item() for p, m in zip(worn.parameters(), mean, strict=True))
    require(far < 1e-6, f"the average is {far} away from the one by hand")
    return f"within {far:.1e} of the average by hand over freezing and thawing"


@loop
def ema_by_torch_swa_utils() -> str:
    """AveragedModel, updated by the loop after each applied step."""
    torch.manual_seed(0)
    model = mlp()
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9))
    case = Case(model, sgd(model), mse, beside=[average])
    stepper = case.start()
    for batch in pairs(4):
        if stepper.step(mse, batch).applied:
            average.update_parameters(model)
        skips(case, (batch[0] * float("nan"), batch[1]))
    require(int(average.n_averaged) == 4, "averaged more often than applied")
    return "4 applied, 4 averaged, skips left it"


# -- refused at construction --------------------------------------------------------------------------------------


class Sam(optim.Optimizer):
    """Sharpness-aware minimization, as the widely used implementation writes it."""

    def __init__(self, params: Any, base: type[optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)

    def first_step(self, zero_grad: bool = False) -> None: ...

    def second_step(self, zero_grad: bool = False) -> None: ...

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure()


@loop
def lbfgs_is_refused() -> str:
    model = mlp()
    with refuses(HalfstepError, "LBFGS"):
        Stepper(model, optim.LBFGS(model.parameters()), precision="fp32")
    return "refused by name at construction"


@loop
def sam_is_refused() -> str:
    model = mlp()
    with refuses(HalfstepError, "Sam"):
        Stepper(model, Sam(model.parameters(), optim.SGD, lr=0.1), precision="fp32")
    return "refused by name at construction"


@loop
def optimizer_in_backward_is_refused() -> str:
    """torchtune's and torch's tutorial: a step inside `register_post_accumulate_grad_hook`."""
    model = mlp()
    each = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        each[p].step()  # type: ignore[index]
        each[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with refuses(HalfstepError, "backward"):
        Stepper(model, optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    return "refused at construction"


@loop
def data_parallel_is_refused() -> str:
    model = nn.DataParallel(mlp())
    with refuses(HalfstepError, "DataParallel"):
        Stepper(model, sgd(model), precision="fp32")
    return "refused by name at construction"


@loop
def optimizer_of_another_model_is_refused() -> str:
    """`optimizer = SGD(model.parameters())`, and then the model is made anew."""
    old, model = mlp(), mlp()
    with refuses(HalfstepError):
        Stepper(model, sgd(old), precision="fp32")
    return "refused at construction"


@loop
def clip_by_value() -> str:
    """torch's clip_grad_value_, with a norm that is reported from before it."""
    torch.manual_seed(0)
    model = mlp()
    hand = mlp()
    hand.load_state_dict(model.state_dict())
    case = Case(model, sgd(model), mse, options={"clip_value": 1e-3})
    case.start()
    other = sgd(hand)
    for batch in pairs():
        case.stepper.step(mse, batch)
        other.zero_grad()
        mse(hand, batch).backward()
        nn.utils.clip_grad_value_(hand.parameters(), 1e-3)
        other.step()
    require_same(Case(hand, other, mse).state(), case.state(), "compared with clip_grad_value_")
    return "bitwise as clip_grad_value_"


@loop
def clip_norm_by_optimizer() -> str:
    """A dict of norms: each optimizer is clipped by its own."""
    torch.manual_seed(0)
    model = mlp(16, 32, 4)
    hand = mlp(16, 32, 4)
    hand.load_state_dict(model.state_dict())
    case = Case(model, {"a": sgd(model[0]), "b": sgd(model[2])}, mse, options={"clip_norm": {"a": 0.1, "b": 0.2}})
    case.start()
    a, b = sgd(hand[0]), sgd(hand[2])
    for batch in pairs():
        case.stepper.step(mse, batch)
        hand.zero_grad()
        mse(hand, batch).backward()
        nn.utils.clip_grad_norm_(hand[0].parameters(), 0.1)
        nn.utils.clip_grad_norm_(hand[2].parameters(), 0.2)
        a.step()
        b.step()
    require_same(Case(hand, {"a": a, "b": b}, mse).state(), case.state(), "compared with clipping by hand")
    return "bitwise as two clip_grad_norm_"
