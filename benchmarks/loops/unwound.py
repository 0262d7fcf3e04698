"""Errors, Ctrl-C, skips in a row, saved state and evaluation next to state that only observation can cover."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    by_hand,
    flat,
    frozen_copy,
    in_three_calls,
    limit,
    loop,
    mlp,
    mse,
    pairs,
    poisoned,
    refuses,
    require,
    require_same,
    sgd,
    skips,
    trains,
)
from halfstep import Ema, StepReport, Window

BATCHES = pairs(6)


class Error(Exception):
    """Somebody's own."""


class Rich(nn.Module):
    """A teacher in a list, a queue and a pointer as plain attributes, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)
        self.teachers = [frozen_copy(self.net)]
        self.queue, self.at = torch.zeros(32, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for t, s in zip(self.teachers[0].parameters(), self.net.parameters(), strict=True):
                t.lerp_(s, 0.2)
        out = self.net(x)
        self.queue[self.at % 32] = out.detach().mean(0)
        self.at += 1
        return out + 0.1 * self.teachers[0](x) - 0.1 * self.queue.mean(0)


def rich(**options: Any) -> Case:
    torch.manual_seed(0)
    model = Rich()
    log = torch.zeros(8)

    def loss(m: nn.Module, b: Any) -> Tensor:
        log[0] += 1
        return mse(m, b)

    seen = Seen(lambda: {"queue": model.queue, "at": model.at})
    case = Case(model, adamw(model), loss, beside=[model.teachers[0], seen, log], options=options)
    case.start()
    return case


def as_by_hand(batches: list[Any]) -> dict[str, Any]:
    case = rich()
    for batch in batches:
        by_hand(case, batch)
    return case.state()


def undone(case: Case, act: Callable[[], object], error: type[BaseException]) -> None:
    """What `act` raised came through, and nothing of the step stayed."""
    before = case.state()
    try:
        act()
    except error:
        require_same(before, case.state(), f"after {error.__name__}")
        return
    require(False, f"{error.__name__} was swallowed")


@loop
def error_after_the_forward_of_a_rich_model() -> str:
    """A step that raises is no step: at the first step, and later."""
    case = rich()
    inner = case.loss_fn

    def failing(m: nn.Module, b: Any) -> Tensor:
        inner(m, b)
        raise Error("a label is out of range")

    for i, batch in enumerate(BATCHES):
        if i in (0, 3):
            undone(case, lambda b=batch: case.stepper.step(failing, b), Error)
        trains(case, [batch])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "2 errors undone, 6 steps bitwise as by hand"


@loop
def error_in_backward_of_a_rich_model() -> str:
    case = rich()
    inner = case.loss_fn

    def fail(_: Tensor) -> None:
        raise Error("in backward")

    def failing(m: nn.Module, b: Any) -> Tensor:
        loss = inner(m, b)
        loss.register_hook(fail)
        return loss

    trains(case, BATCHES[:2])
    undone(case, lambda: case.stepper.step(failing, BATCHES[2]), Error)
    undone(case, lambda: case.stepper.step(failing, Window(BATCHES[2:4])), Error)
    trains(case, BATCHES[2:])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "2 errors in backward undone, 6 steps bitwise as by hand"


@loop
def ctrl_c_in_the_forward_of_a_rich_model() -> str:
    case = rich()
    inner = case.loss_fn

    def interrupted(m: nn.Module, b: Any) -> Tensor:
        loss = inner(m, b)
        signal.raise_signal(signal.SIGINT)
        return loss

    for i, batch in enumerate(BATCHES):
        if i in (0, 2):
            undone(case, lambda b=batch: case.stepper.step(interrupted, b), KeyboardInterrupt)
        trains(case, [batch])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "2 interrupts undone, 6 steps bitwise as by hand"


@loop
def discarded_window_of_a_rich_model() -> str:
    """The context form, given up by `discard()` after two of four micro-batches."""
    case = rich()
    trains(case, BATCHES[:2])
    before = case.state()
    for micro in BATCHES[2:4]:
        with case.stepper.forward(last=False):
            loss = case.loss_fn(case.model, micro)
        case.stepper.backward(loss)
    case.stepper.discard()
    require_same(before, case.state(), "after discard()")
    trains(case, BATCHES[2:])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "the window was given up, 6 steps bitwise as by hand"


@loop
def error_inside_the_context_of_a_rich_model() -> str:
    """An error in the second micro-batch of the context form takes back the first one, too."""
    case = rich()
    trains(case, BATCHES[:2])
    before = case.state()
    with case.stepper.forward(last=False):
        loss = case.loss_fn(case.model, BATCHES[2])
    case.stepper.backward(loss)
    try:
        with case.stepper.forward(last=True):
            case.loss_fn(case.model, BATCHES[3])
            raise Error("in the second")
    except Error:
        pass
    require_same(before, case.state(), "after an error in the window")
    trains(case, BATCHES[2:])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "both micro-batches undone, 6 steps bitwise as by hand"


@loop
def five_bad_batches_in_a_row() -> str:
    case = rich()
    for i, batch in enumerate(BATCHES):
        for _ in range(5 if i in (0, 2) else 0):
            skips(case, poisoned(batch))
        trains(case, [batch])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "two rows of 5 skips undone, 6 steps bitwise as by hand"


@loop
def both_forms_in_one_run() -> str:
    """`step()` and the context form in turns, with bad batches in either."""
    case = rich()
    for i, batch in enumerate(BATCHES):
        before = case.state()
        if i % 2:
            skips(case, poisoned(batch))
            require(in_three_calls(case, batch).applied, "not applied")
        else:
            require(not in_three_calls(case, poisoned(batch)).applied, "a bad batch was applied")
            require_same(before, case.state(), "after a skip in three calls")
            trains(case, [batch])
    require_same(as_by_hand(BATCHES), case.state(), "compared with the loop by hand")
    return "6 skips undone, 6 steps bitwise as by hand"


@loop
def bad_micro_batch_in_each_place_of_three_calls() -> str:
    case = rich()
    trains(case, BATCHES[:1])
    for place in range(3):
        before = case.state()
        window = Window([poisoned(b) if i == place else b for i, b in enumerate(BATCHES[1:4])])
        require(in_three_calls(case, window).reason == "loss_not_finite", "the reason")
        require_same(before, case.state(), f"micro-batch {place} was bad")
    require(in_three_calls(case, Window(BATCHES[1:4])).applied, "not applied")
    return "first, middle and last bad: bitwise as before"


@loop
def refused_by_a_guard_after_a_rich_forward() -> str:
    class Every:
        name, same_on_all_ranks = "third", True

        def passes(self, report: StepReport) -> bool:
            return report.attempt % 3 != 0

    torch.manual_seed(0)
    case = rich(guards=[Every()])
    done = []
    for batch in BATCHES:
        if (case.stepper.counts.attempted + 1) % 3 == 0:
            skips(case, batch, ("guard:third",))
        else:
            trains(case, [batch])
            done.append(batch)
    require_same(as_by_hand(done), case.state(), "compared with the loop by hand")
    return f"2 refusals undone, {len(done)} steps bitwise as by hand"


@loop
def overflow_of_the_loss_scale_of_a_rich_model() -> str:
    """fp16 whose scale begins too high: every skip until it fits leaves teacher, queue and pointer alone."""
    case = rich(precision="fp16", loss_scale=halfstep.DynamicScale(init_scale=2.0**24))
    inner, skipped = case.loss_fn, 0
    for _ in range(40):
        before = case.state()
        if case.stepper.step(lambda m, b: 30 * inner(m, b), BATCHES[0]).applied:
            break
        skipped += 1
        require_same(before, case.state(), f"after overflow {skipped}")
    require(skipped > 1 and case.model.at == 1, f"{skipped} skips, pointer at {case.model.at}")
    return f"{skipped} overflows undone, then applied"


# -- saved state --------------------------------------------------------------------------------------------------


@loop
def resumed_right_after_a_skip() -> str:
    """Saved after a skip, loaded into a new process' objects: the run goes on as the one without the bad batch."""
    case = rich()
    trains(case, BATCHES[:3])
    skips(case, poisoned(BATCHES[0]))
    model, stepper = copy.deepcopy(case.model), case.stepper.state_dict()
    log = case.beside[2].clone()
    again = rich()
    again.model.load_state_dict(model.state_dict())
    again.model.teachers[0].load_state_dict(model.teachers[0].state_dict())
    again.model.queue, again.model.at = model.queue.clone(), model.at
    again.beside[2].copy_(log)
    again.stepper.load_state_dict(stepper)
    skips(again, poisoned(BATCHES[0]))
    trains(again, BATCHES[3:])
    require_same(as_by_hand(BATCHES), again.state(), "compared with the loop by hand")
    return "6 steps bitwise as by hand, with a skip on either side of the file"


@loop
def saved_in_an_open_window_is_refused() -> str:
    case = rich()
    trains(case, BATCHES[:1])
    with case.stepper.forward(last=False):
        loss = case.loss_fn(case.model, BATCHES[1])
    case.stepper.backward(loss)
    with refuses(halfstep.HalfstepError):
        case.stepper.state_dict()
    case.stepper.discard()
    case.stepper.state_dict()
    return "refused in the window, given after it"


@loop
def weights_loaded_between_steps_are_not_taken_back() -> str:
    """A loop writes the teacher and the queue itself between two steps: the next skip comes back to that."""
    case = rich()
    trains(case, BATCHES[:3])
    case.model.teachers[0].load_state_dict(case.model.net.state_dict())
    case.model.queue.fill_(0.5)
    case.model.at = 7
    with torch.no_grad():
        case.model.net[0].weight.mul_(0.5)
    skips(case, poisoned(BATCHES[3]))
    require(case.model.at == 7 and bool((case.model.queue == 0.5).all()), "an older copy was written back")
    trains(case, BATCHES[3:])
    return "the skip came back to what the loop had written"


@loop
def state_moved_by_the_loop_after_each_step() -> str:
    """Everything is moved by the loop after `report.applied`, and nothing by the step."""
    torch.manual_seed(0)
    model = mlp(norm=True)
    teacher, history = frozen_copy(model), torch.zeros(16)
    case = Case(model, adamw(model), mse, beside=[teacher, history])
    case.start()
    for i, batch in enumerate(BATCHES):
        skips(case, poisoned(batch))
        if case.stepper.step(mse, batch).applied:
            history[i] = 1.0
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                    t.lerp_(s, 0.1)
    require(float(history.sum()) == 6.0, f"{history}")
    return "6 skips left what the loop had written; 6 steps counted"


@loop
def evaluated_with_the_average_between_skips() -> str:
    """`evaluating(ema=True)` of a model with plain attributes: they are as before it, and so is the next skip."""
    torch.manual_seed(0)
    model = Rich()
    seen = Seen(lambda: {"queue": model.queue, "at": model.at})
    case = Case(model, adamw(model), mse, beside=[model.teachers[0]], options={"ema": Ema(model, 0.9)})
    stepper = case.start()
    for batch in BATCHES[:3]:
        trains(case, [batch])
        before = case.state()
        with stepper.evaluating(ema=True) as net:
            net.net(batch[0])
        require_same(before, case.state(), "after evaluating")
        kept = dict(flat(seen))
        skips(case, poisoned(batch))
        require_same(kept, dict(flat(seen)), "after the skip")
    return "3 evaluations and 3 skips moved nothing"


# -- what observe=False leaves out --------------------------------------------------------------------------------


@loop
def modules_without_observation() -> str:
    """With `observe=False` modules are covered all the same: buffers, small attributes, Python numbers."""
    torch.manual_seed(0)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mean, self.calls = mlp(norm=True), torch.zeros(4), 0

        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            self.calls += 1
            return out - self.mean

    model = Plain()
    seen = Seen(lambda: {"mean": model.mean, "calls": model.calls})
    case = Case(model, adamw(model), mse, beside=[seen])
    case.start(observe=False)
    for batch in BATCHES:
        skips(case, poisoned(batch))
        trains(case, [batch])
    return "6 skips bitwise undone"


@loop
def outside_tensor_without_observation() -> str:
    torch.manual_seed(0)
    model, bank = mlp(), torch.zeros(4)

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        bank.add_(1.0)
        return F.mse_loss(out, b[1])

    case = Case(model, sgd(model), loss)
    case.start(observe=False)
    trains(case, BATCHES[:2])
    skips(case, poisoned(BATCHES[2]))
    if float(bank[0]) == 2.0:
        return "restored without observation"
    return limit("With `observe=False`, only modules and included objects are covered", "a bank outside kept the write")
