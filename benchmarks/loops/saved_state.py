"""State saved and loaded in the middle of everything, and states of other runs, which are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from benchmarks.loops.harness import (
    Case,
    HalfstepError,
    adamw,
    ce,
    differences,
    labelled,
    loop,
    mlp,
    mse,
    named,
    pairs,
    poisoned,
    refuses,
    require,
    require_same,
    sgd,
    skips,
    trains,
)
from halfstep import Counted, DynamicScale, Ema, Window


def full(make: Callable[[nn.Module], Any] = adamw, precision: str = "fp32", ema: bool = True, **options: Any) -> Case:
    torch.manual_seed(0)
    model = mlp(norm=True)
    optimizer = make(model)
    given: dict[str, Any] = {"clip_norm": 1.0, **options}
    if ema:
        given["ema"] = Ema(model, 0.9)
    case = Case(model, optimizer, ce, schedule=optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), options=given)
    case.start(precision=precision)
    return case


def saved(case: Case) -> Any:
    """Through `torch.save` and `torch.load(weights_only=True)`, as people do."""
    stream = io.BytesIO()
    torch.save({"model": case.model.state_dict(), "stepper": case.stepper.state_dict()}, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def restore(case: Case, state: Any) -> None:
    case.model.load_state_dict(state["model"])
    case.stepper.load_state_dict(state["stepper"])


def _resumed(precision: str) -> str:
    """Six steps at once, or three, saved, loaded into a new process's objects, and three more."""
    batches = labelled(6)
    whole = full(precision=precision)
    parts = full(precision=precision)
    for case in (whole, parts):
        case.stepper.step(ce, poisoned(batches[0]))
        trains(case, batches[:3])
    state = saved(parts)
    resumed = full(precision=precision)
    restore(resumed, state)
    for case in (whole, resumed):
        trains(case, batches[3:])
        case.stepper.step(ce, poisoned(batches[0]))
    require_same(whole.state(), resumed.state(), "after resuming")
    require(str(whole.stepper.counts) == str(resumed.stepper.counts), "counters differ")
    require(whole.stepper.loss_scales == resumed.stepper.loss_scales, "scales differ")
    return f"bitwise as without stopping; {resumed.stepper.counts}"


for _precision in ("fp32", "bf16", "fp16"):
    named(f"resume_{_precision}", partial(_resumed, _precision), "saved_state")


@loop
def resume_after_a_skipped_first_step() -> str:
    """Saved before anything was applied: no optimizer state exists yet."""
    case = full(precision="fp16")
    case.stepper.step(ce, poisoned(labelled(1)[0]))
    other = full(precision="fp16")
    restore(other, saved(case))
    for one in (case, other):
        trains(one, labelled(3))
    require_same(case.state(), other.state(), "after resuming")
    return "bitwise as without stopping"


@loop
def load_back_in_time() -> str:
    """The same objects go back to an earlier state (a rewind after divergence)."""
    case = full()
    trains(case, labelled(3))
    state, then = saved(case), case.state()
    trains(case, labelled(5))
    restore(case, state)
    require_same(then, case.state(), "after the rewind")
    trains(case, labelled(3))
    skips(case, poisoned(labelled(1)[0]))
    return "bitwise as then, and the loop went on"


@loop
def saved_state_does_not_move() -> str:
    """A state that was taken is a picture: later steps do not write into it."""
    case = full()
    trains(case, labelled(2))
    state = case.stepper.state_dict()
    kept = copy.deepcopy(state)
    trains(case, labelled(3))
    from benchmarks.loops.harness import flat

    moved = differences(dict(flat(state)), dict(flat(kept)))
    if moved:
        # torch's own state_dict() of optimizers and averages shares its tensors, and says so.
        shared = ("exp_avg", ".step", ".ema.")
        require(all(any(part in name for part in shared) for name in moved), f"moved: {moved[:4]}")
        return f"tensors are shared, as by torch's own state_dict ({len(moved)}); numbers stay"
    return "nothing of it moved"


@loop
def save_in_the_middle_of_a_window() -> str:
    """state_dict() between backward and apply: refused, or the state from before the window."""
    case = full()
    trains(case, labelled(2))
    before = case.stepper.counts.applied
    with case.stepper.forward(last=False):
        loss = ce(case.model, labelled(1)[0])
    case.stepper.backward(loss)
    try:
        state = case.stepper.state_dict()
    except HalfstepError as refusal:
        said = f"refused: {str(refusal).splitlines()[0][:80]}"
    else:
        require(state["counts"]["applied"] == before, "the window was counted")
        said = "the state from before the window"
    case.stepper.discard()
    trains(case, labelled(2))
    return said


@loop
def save_inside_the_loss_function() -> str:
    """A checkpoint callback that runs inside a step: weights and buffers that belong together."""
    case = full()
    trains(case, labelled(2))
    seen: list[Any] = []

    def loss(m: nn.Module, b: Any) -> Any:
        try:
            seen.append(case.stepper.state_dict())
        except HalfstepError as refusal:
            seen.append(str(refusal).splitlines()[0])
        return ce(m, b)

    require(case.stepper.step(loss, labelled(1)[0]).applied, "not applied")
    what = seen[0] if isinstance(seen[0], str) else f"state of step {seen[0]['counts']['applied']}"
    return f"inside a step: {what[:90]}"


# -- states of other runs -----------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[], Case], Callable[[], Case]]] = {
    "adamw_into_sgd": (full, lambda: full(sgd)),
    "sgd_into_adamw": (lambda: full(sgd), full),
    "momentum_into_adamw": (lambda: full(partial(sgd, momentum=0.9)), full),
    "with_average_into_without": (full, lambda: full(ema=False)),
    "without_average_into_with": (lambda: full(ema=False), full),
    "fp16_into_fp32": (lambda: full(precision="fp16"), full),
    "fp32_into_fp16": (full, lambda: full(precision="fp16")),
    "other_width": (lambda: _other_width(), full),
    "two_optimizers_into_one": (lambda: _two_optimizers(), full),
    "schedule_into_none": (full, lambda: _no_schedule()),
}


def _other_width() -> Case:
    torch.manual_seed(0)
    model = mlp(16, 48, 4, norm=True)
    optimizer = adamw(model)
    options = {"clip_norm": 1.0, "ema": Ema(model, 0.9)}
    case = Case(model, optimizer, ce, schedule=optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), options=options)
    case.start()
    return case


def _two_optimizers() -> Case:
    torch.manual_seed(0)
    model = mlp(norm=True)
    case = Case(model, {"a": adamw(model[:2]), "b": adamw(model[2:])}, ce, options={"ema": Ema(model, 0.9)})
    case.start()
    return case


def _no_schedule() -> Case:
    torch.manual_seed(0)
    model = mlp(norm=True)
    case = Case(model, adamw(model), ce, options={"clip_norm": 1.0, "ema": Ema(model, 0.9)})
    case.start()
    return case


def _other(name: str) -> str:
    """Refused before anything changed, and the run that it was offered to goes on."""
    make, into = OTHERS[name]
    source, target = make(), into()
    trains(source, labelled(3))
    trains(target, labelled(2))
    before = target.state()
    counts = str(target.stepper.counts)
    with refuses(HalfstepError):
        target.stepper.load_state_dict(source.stepper.state_dict())
    require_same(before, target.state(), "a refused state changed something")
    require(counts == str(target.stepper.counts), "counters changed")
    trains(target, labelled(2))
    return "refused before anything changed, and the loop went on"


for _name in OTHERS:
    named(f"state_{_name}_is_refused", partial(_other, _name), "saved_state")


@loop
def state_with_a_missing_key_is_refused() -> str:
    case = full()
    trains(case, labelled(2))
    before = case.state()
    state = case.stepper.state_dict()
    for key in list(state):
        less = {k: v for k, v in state.items() if k != key}
        with refuses(HalfstepError):
            case.stepper.load_state_dict(less)
        require_same(before, case.state(), f"without {key}")
    with refuses(HalfstepError):
        case.stepper.load_state_dict({**state, "unknown": 1})
    return f"{len(state)} keys left out one by one, one added: refused, nothing changed"


@loop
def optimizer_state_of_torch_into_a_new_stepper() -> str:
    """Coming from a loop by hand: optimizer and schedule were loaded by their own load_state_dict."""
    from benchmarks.loops.harness import by_hand

    def make() -> Case:
        torch.manual_seed(0)
        model = mlp(norm=True)
        return Case(model, adamw(model), ce)

    hand = make()
    for batch in labelled(3):
        by_hand(hand, batch)
    ours = make()
    ours.model.load_state_dict(hand.model.state_dict())
    ours.optimizer.load_state_dict(copy.deepcopy(hand.optimizer.state_dict()))
    ours.start()
    for batch in labelled(6)[3:]:
        by_hand(hand, batch)
        trains(ours, [batch])
    require_same(hand.state(), ours.state(), "after moving over")
    return "3 steps by hand, 3 with a Stepper: bitwise as 6 by hand"


@loop
def optimizer_loaded_after_the_stepper_was_made() -> str:
    """`optimizer.load_state_dict` behind the Stepper's back, between steps."""
    case = full()
    trains(case, labelled(2))
    kept = copy.deepcopy(case.optimizer.state_dict())
    trains(case, labelled(2))
    case.optimizer.load_state_dict(kept)
    trains(case, labelled(2))
    skips(case, poisoned(labelled(1)[0]))
    return "goes on, a skip is undone"


@loop
def model_loaded_between_steps() -> str:
    """The best weights are loaded back at a plateau; the average and a skip follow."""
    case = full(ema=False)
    trains(case, labelled(2))
    best = copy.deepcopy(case.model.state_dict())
    trains(case, labelled(3))
    case.model.load_state_dict(best)
    before = case.state()
    skips(case, poisoned(labelled(1)[0]))
    require_same(before, case.state(), "after loading and a skip")
    trains(case, labelled(2))
    return "loaded weights stay through a skip"


@loop
def model_loaded_with_assign() -> str:
    """`load_state_dict(assign=True)` replaces the very parameters: refused or followed, never trained in vain."""
    case = full(ema=False)
    trains(case, labelled(2))
    case.model.load_state_dict(copy.deepcopy(case.model.state_dict()), assign=True)
    before = case.model[0].weight.detach().clone()
    try:
        case.stepper.step(ce, labelled(1)[0])
    except HalfstepError as refusal:
        return f"refused: {str(refusal).splitlines()[0][:90]}"
    require(not torch.equal(before, case.model[0].weight), "the optimizer trains parameters that the model left")
    return "followed"


@loop
def base_count_of_counted_losses_is_kept() -> str:
    """N0, by which sums are divided, is part of the state: resumed steps are bitwise the same."""

    def counted(m: nn.Module, b: Any) -> Counted:
        return Counted((m(b[0]) - b[1]).square().sum(), b[1].numel())

    def make() -> Case:
        torch.manual_seed(0)
        model = mlp()
        case = Case(model, adamw(model), counted)
        case.start()
        return case

    whole, parts = make(), make()
    batches = [Window(pairs(k)) for k in (3, 1, 2, 4)]
    for case in (whole, parts):
        trains(case, batches[:2])
    resumed = make()
    restore(resumed, saved(parts))
    for case in (whole, resumed):
        trains(case, batches[2:])
    require_same(whole.state(), resumed.state(), "after resuming")
    return "bitwise as without stopping"


@loop
def growth_tracker_is_kept() -> str:
    """Half-way to a growth of the scale: the other half comes after resuming."""

    def make() -> Case:
        torch.manual_seed(0)
        model = mlp()
        case = Case(model, adamw(model, 1e-4), mse)
        case.start(precision="fp16", loss_scale=DynamicScale(init_scale=64.0, growth_interval=4))
        return case

    first = make()
    trains(first, pairs(3))
    second = make()
    restore(second, saved(first))
    trains(second, pairs(1))
    scale = next(iter(second.stepper.loss_scales.values()))
    require(scale == 128.0, f"scale {scale} after 3 + 1 clean steps")
    return "grown after 3 + 1 clean steps"
