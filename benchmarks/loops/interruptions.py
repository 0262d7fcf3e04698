"""Ctrl-C and errors wherever they may come: a step happened, or it did not, and the loop can go on."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Broken,
    Case,
    HalfstepError,
    adamw,
    differences,
    limit,
    loop,
    mlp,
    mse,
    named,
    normal,
    pairs,
    poisoned,
    refuses,
    require,
    require_same,
    trains,
)
from halfstep import Ema, StepReport, Window

BATCHES = pairs(4)


class Error(Exception):
    """Somebody's own."""


def full(**options: Any) -> Case:
    """BatchNorm, AdamW, a schedule and an average, with two steps behind it."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    optimizer = adamw(model)
    options = {"ema": Ema(model, 0.9), "clip_norm": 1.0, **options}
    case = Case(model, optimizer, mse, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 1), options=options)
    case.start()
    trains(case, BATCHES[:2])
    return case


def interrupted(step: Callable[[], object]) -> bool:
    """Take a step, and return whether it ended in a KeyboardInterrupt."""
    try:
        step()
    except KeyboardInterrupt:
        return True
    return False


def reference() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """States before the third step, after it, and after the fourth."""
    case = full()
    before = case.state()
    trains(case, BATCHES[2:3])
    after = case.state()
    trains(case, BATCHES[3:])
    return before, after, case.state()


@contextmanager
def at(place: str, case: Case, act: Callable[[], None]) -> Any:
    """Have `act` called once from this place of the next step."""
    armed = [True]

    def once(*_: Any, **__: Any) -> None:
        if armed:
            armed.clear()
            act()

    model = case.model
    if place == "forward":
        handle = model[0].register_forward_hook(once)
    elif place == "backward":
        handle = model[0].weight.register_hook(once)
    elif place == "accumulated":
        handle = model[3].register_full_backward_hook(once)
    elif place == "before_optimizer":
        handle = case.optimizer.register_step_pre_hook(once)
    elif place == "after_optimizer":
        handle = case.optimizer.register_step_post_hook(once)
    else:
        raise ValueError(place)
    try:
        yield
    finally:
        handle.remove()


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


PLACES = ("forward", "backward", "accumulated", "before_optimizer", "after_optimizer")


def _interrupted_at(place: str) -> str:
    before, after, end = reference()
    case = full()
    with at(place, case, ctrl_c):
        came = interrupted(lambda: case.stepper.step(mse, BATCHES[2]))
    return _before_or_after(case, before, after, end, came)


def _before_or_after(case: Case, before: Any, after: Any, end: Any, came: bool) -> str:
    now = case.state()
    happened = not differences(now, after)
    if not happened:
        require_same(before, now, "neither before nor after the step")
    require(came, "the interrupt was swallowed")
    require(case.stepper.counts.applied == (3 if happened else 2), f"{case.stepper.counts}")
    trains(case, BATCHES[3:] if happened else BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return f"the step {'happened' if happened else 'did not happen'}, and the loop went on bitwise"


for _place in PLACES:
    named(f"ctrl_c_in_{_place}", partial(_interrupted_at, _place), "interruptions")


@loop
def ctrl_c_in_the_loss_function() -> str:
    before, after, end = reference()
    case = full()

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = mse(m, b)
        ctrl_c()
        return out

    came = interrupted(lambda: case.stepper.step(loss, BATCHES[2]))
    return _before_or_after(case, before, after, end, came)


@loop
def ctrl_c_in_a_guard() -> str:
    before, after, end = reference()

    class Watching:
        name = "watching"
        same_on_all_ranks = True
        armed = False

        def passes(self, report: StepReport) -> bool:
            if self.armed:
                self.armed = False
                ctrl_c()
            return True

    guard = Watching()
    case = full(guards=[guard])
    guard.armed = True
    came = interrupted(lambda: case.stepper.step(mse, BATCHES[2]))
    return _before_or_after(case, before, after, end, came)


@loop
def ctrl_c_in_on_gradients() -> str:
    before, after, end = reference()
    armed: list[bool] = []

    def look(parameters: list[Tensor]) -> None:
        if armed:
            armed.clear()
            ctrl_c()

    case = full(on_gradients=look)
    armed.append(True)
    came = interrupted(lambda: case.stepper.step(mse, BATCHES[2]))
    return _before_or_after(case, before, after, end, came)


def _lines_of_a_step(batch: Any) -> int:
    """Lines of halfstep that one such step runs through."""
    case, seen = full(), [0]

    def count(frame: Any, event: str, _: Any) -> Any:
        if "halfstep" not in frame.f_code.co_filename:
            return None
        seen[0] += event == "line"
        return count

    sys.settrace(count)
    try:
        case.stepper.step(mse, batch)
    finally:
        sys.settrace(None)
    return seen[0]


def _interrupted_on_line(case: Case, batch: Any, line: int) -> bool:
    """Ctrl-C as the step arrives at the n-th line of halfstep. Whether it came out."""
    seen = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "halfstep" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                sys.settrace(None)
                ctrl_c()
        return trace

    sys.settrace(trace)
    try:
        case.stepper.step(mse, batch)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        left = signal.signal(signal.SIGINT, signal.default_int_handler)
        require(left is signal.default_int_handler, f"SIGINT at line event {line}: its handler was left as {left}")
    return False


def _sweep(batch: Any, offset: int, stride: int) -> str:
    """A real SIGINT at every `stride`-th line that halfstep runs in a step."""
    bad = not bool(torch.isfinite(batch[0]).all())
    before, after, end = reference()
    lines = _lines_of_a_step(batch)
    require(lines > 100, f"only {lines} lines were seen")
    places = range(1 + offset, lines + 1, stride)
    out = 0
    for line in places:
        case = full()
        came = _interrupted_on_line(case, batch, line)
        now = case.state()
        try:
            happened = not bad and not differences(now, after)
            if not happened:
                require_same(before, now, "neither before nor after the step")
            require(came, "the interrupt was swallowed")
            trains(case, BATCHES[3:] if happened else BATCHES[2:])
            require_same(end, case.state(), "after going on")
        except Exception as error:
            raise Broken(f"SIGINT at line event {line} of {lines}: {' '.join(str(error).split())}") from error
        out += came
    return f"{len(places)} of {lines} places, before or after and never between; {out} came out as KeyboardInterrupt"


STRIDE = 9
for _offset in (0, 3, 6):
    named(f"ctrl_c_sweep_good_step_{_offset}", partial(_sweep, BATCHES[2], _offset, STRIDE), "interruptions")
    named(f"ctrl_c_sweep_nan_step_{_offset}", partial(_sweep, poisoned(BATCHES[2]), _offset, STRIDE), "interruptions")


# -- errors -------------------------------------------------------------------------------------------------------


def _raise() -> None:
    raise Error("mine")


def _error_at(place: str) -> str:
    before, _, end = reference()
    case = full()
    with at(place, case, _raise):
        try:
            case.stepper.step(mse, BATCHES[2])
        except Error:
            pass
        else:
            raise Broken("the error was swallowed")
    require_same(before, case.state(), f"after an error in {place}")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, and the loop went on bitwise"


for _place in ("forward", "backward", "accumulated"):
    named(f"error_in_{_place}", partial(_error_at, _place), "interruptions")


def _error_in_the_optimizer(place: str) -> str:
    """Nothing can know what an optimizer had written when it raised: no further step, and the reason is told."""
    before, after, _ = reference()
    case = full()
    with at(place, case, _raise), suppress(Error):
        case.stepper.step(mse, BATCHES[2])
    now = case.state()
    if not differences(now, before) or not differences(now, after):
        trains(case, BATCHES[3:])
        return "whole, and the loop went on"
    with refuses(HalfstepError, "checkpoint"):
        case.stepper.step(mse, BATCHES[3])
    return limit("TornUpdate", "torn, and every further step is refused")


for _place in ("before_optimizer", "after_optimizer"):
    named(f"error_{_place}_moved", partial(_error_in_the_optimizer, _place), "interruptions")


@loop
def error_in_the_loss_of_the_last_micro_batch() -> str:
    before, _, end = reference()
    case = full()

    def loss(m: nn.Module, b: Any) -> Tensor:
        if b is None:
            raise Error("unreadable sample")
        return mse(m, b)

    with suppress(Error):
        case.stepper.step(loss, Window([BATCHES[0], BATCHES[1], None]))
    require_same(before, case.state(), "after an error in the third micro-batch")
    require(all(p.grad is None or not p.grad.any() for p in case.model.parameters()), "gradients were left")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, gradients gone, and the loop went on bitwise"


@loop
def error_in_a_guard() -> str:
    before, _, end = reference()

    class Broke:
        name = "broke"
        armed = False

        def passes(self, report: StepReport) -> bool:
            if self.armed:
                self.armed = False
                raise Error("mine")
            return True

    guard = Broke()
    case = full(guards=[guard])
    guard.armed = True
    with suppress(Error):
        case.stepper.step(mse, BATCHES[2])
    require_same(before, case.state(), "after an error in a guard")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, and the loop went on bitwise"


@loop
def error_in_the_schedule() -> str:
    """A OneCycle schedule that is at its end would raise in `step()`, after the weights have moved."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    optimizer = adamw(model)
    case = Case(model, optimizer, mse, schedule=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3))
    case.start()
    trains(case, pairs(3))
    before = case.state()
    try:
        case.stepper.step(mse, pairs(3)[2])
    except (ValueError, HalfstepError):
        pass
    else:
        raise Broken("a schedule past its end was not noticed")
    if not differences(before, case.state()):
        return "as before"
    with refuses(HalfstepError, "checkpoint"):
        case.stepper.step(mse, pairs(3)[2])
    return limit("TornUpdate", "torn, and every further step is refused")


@loop
def out_of_memory_is_caught_and_the_batch_halved() -> str:
    """The usual `except RuntimeError: skip this batch`."""
    before, _, end = reference()
    case = full()

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = mse(m, b)
        if len(b[0]) > 8:
            raise torch.OutOfMemoryError("out of memory")
        return out

    with suppress(RuntimeError):
        case.stepper.step(loss, (normal(16, 16), normal(16, 4)))
    require_same(before, case.state(), "after out of memory")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, and the loop went on bitwise"


@loop
def context_form_break_then_discard() -> str:
    before, _, end = reference()
    case = full()
    with case.stepper.forward(last=False):
        out = mse(case.model, BATCHES[0])
    case.stepper.backward(out)
    case.stepper.discard()
    require_same(before, case.state(), "after discard()")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, and the loop went on bitwise"


@loop
def context_form_error_inside() -> str:
    before, _, end = reference()
    case = full()
    try:
        with case.stepper.forward():
            mse(case.model, BATCHES[0])
            raise Error("mine")
    except Error:
        pass
    require_same(before, case.state(), "after an error inside forward()")
    trains(case, BATCHES[2:])
    require_same(end, case.state(), "after going on")
    return "as before, and the loop went on bitwise"


@loop
def step_inside_a_step_is_refused() -> str:
    case = full()
    before = case.state()

    def loss(m: nn.Module, b: Any) -> Tensor:
        case.stepper.step(mse, b)
        return mse(m, b)

    with refuses(HalfstepError):
        case.stepper.step(loss, BATCHES[2])
    require_same(before, case.state(), "after the refusal")
    trains(case, BATCHES[2:])
    return "refused, nothing moved, and the loop went on"


@loop
def two_threads_two_steppers() -> str:
    """Two trainings side by side, bitwise as one after the other, and torch's switches as they were."""
    from halfstep.precision.flags import read_fp32_flags

    flags, found = read_fp32_flags(), {}

    def train(seed: int) -> dict[str, Any]:
        model = mlp(norm=True)
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(normal(*p.shape, seed=seed + i) * 0.2)
        case = Case(model, adamw(model), mse)
        case.start(precision=("fp16", "bf16")[seed % 2])
        for batch in pairs(8):
            case.stepper.step(mse, batch)
            case.stepper.step(mse, poisoned(batch))
        return case.state()

    def target(seed: int) -> None:
        found[seed] = train(seed)

    threads = [threading.Thread(target=target, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 1):
        require(seed in found, f"thread {seed} died")
        require_same(train(seed), found[seed], f"thread {seed}")
    require(read_fp32_flags() == flags, "switches were left changed")
    return "both bitwise as alone, switches as they were"
