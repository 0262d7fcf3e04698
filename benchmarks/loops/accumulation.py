"""Micro-batches: windows, counts, the three-call form, short last windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from benchmarks.loops.harness import (
    INF,
    NAN,
    Case,
    Counted,
    HalfstepError,
    adamw,
    ce,
    labelled,
    loop,
    mlp,
    mse,
    normal,
    pairs,
    poisoned,
    promise,
    refuses,
    require,
    require_close,
    require_same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Out, Window, windows


def two(norm: bool = False, **options: Any) -> tuple[Case, Case]:
    cases = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mlp(norm=norm)
        cases.append(Case(model, sgd(model), mse, options=options))
    return cases[0], cases[1]


def parts(batch: Any, *sizes: int) -> Window:
    """A batch cut into pieces of these sizes."""
    return Window(zip(*(t.split(list(sizes)) for t in batch), strict=True))


def counted(m: nn.Module, b: Any) -> Counted:
    return Counted((m(b[0]) - b[1]).square().sum(), b[1].numel())


@loop
def four_micro_batches_as_one() -> str:
    one, many = two(clip_norm=0.5)
    one.start()
    many.start()
    for batch in pairs(5, n=16):
        a, b = one.stepper.step(mse, batch), many.stepper.step(mse, parts(batch, 4, 4, 4, 4))
        require(abs(a.grad_norm / b.grad_norm - 1) < 1e-5 and abs(a.loss / b.loss - 1) < 1e-5, f"{a}; {b}")
    require_close(one.model, many.model, "4 micro-batches")
    return "5 steps: loss, norm and weights as of one batch"


@loop
def four_micro_batches_by_hand() -> str:
    """loss / 4, backward four times: bitwise."""

    def build() -> Case:
        model = mlp(norm=True)
        return Case(model, adamw(model), mse, options={"clip_norm": 0.5})

    return promise(build, [parts(batch, 4, 4, 4, 4) for batch in pairs(3, n=16)])


@loop
def unequal_counts_as_one() -> str:
    one, many = two(clip_norm=0.5)
    one.start()
    many.start()
    for i, batch in enumerate(pairs(5, n=16)):
        sizes = [(1, 15), (8, 8), (3, 3, 10), (16,), (1, 1, 1, 13)][i]
        one.stepper.step(counted, batch)
        report = many.stepper.step(counted, parts(batch, *sizes))
        require(report.applied, str(report))
    require_close(one.model, many.model, "unequal micro-batches")
    return "5 windows of unequal micro-batches as one batch each"


@loop
def unequal_counts_fp16_sums_do_not_overflow() -> str:
    """A sum over 65504 in fp16, divided before backward."""
    one, many = two()
    one.start()
    many.start(precision="fp16")
    x, y = normal(4096, 16), normal(4096, 4)
    one.stepper.step(counted, (x, y))
    for _ in range(8):
        report = many.stepper.step(counted, parts((x, y), 1000, 3000, 96))
        if report.applied:
            break
    require(report.applied, str(report))
    require_close(one.model, many.model, "sums in fp16", rtol=2e-2, atol=2e-3)
    return f"sum of {4096 * 4} squares applied at scale {report.loss_scale:g}"


@loop
def a_count_of_zero_in_one_micro_batch() -> str:
    """All labels of one micro-batch are padding: it adds nothing, and is no NaN."""

    def loss(m: nn.Module, b: Any) -> Counted:
        total = F.cross_entropy(m(b[0]), b[1], ignore_index=-100, reduction="sum")
        return Counted(total, (b[1] != -100).sum())

    one, many = two()
    x, y = normal(12, 16), whole(4, 12)
    y[4:8] = -100
    one.start().step(loss, (x, y))
    report = many.start().step(loss, parts((x, y), 4, 4, 4))
    require(report.applied, str(report))
    require_close(one.model, many.model, "an empty micro-batch")
    return "as one batch"


@loop
def a_count_of_zero_in_all() -> str:
    def loss(m: nn.Module, b: Any) -> Counted:
        total = F.cross_entropy(m(b[0]), b[1], ignore_index=-100, reduction="sum")
        return Counted(total, (b[1] != -100).sum())

    case, _ = two()
    case.loss_fn = loss
    case.start()
    report = skips(case, (normal(8, 16), torch.full((8,), -100)), ("loss_not_finite",))
    return f"skipped: {report.reason}"


@loop
def plain_and_counted_in_one_window_is_refused() -> str:
    case, _ = two()
    case.start()
    before = case.state()
    batches = pairs(2)

    def loss(m: nn.Module, b: Any) -> Any:
        return counted(m, b) if b is batches[1] else mse(m, b)

    with refuses(HalfstepError, "Counted"):
        case.stepper.step(loss, Window(batches))
    require_same(before, case.state(), "after the refusal")
    return "refused, nothing moved"


@loop
def windows_over_a_loader() -> str:
    """10 batches by 4: windows of 4, 4 and 2; the last is divided by its own length."""
    one, many = two()
    batches = pairs(10)
    many.start()
    sizes = []
    for window in windows(batches, 4):
        sizes.append(len(window))
        require(many.stepper.step(mse, window).applied, "not applied")
        from benchmarks.loops.harness import by_hand

        by_hand(one, window)
    require(sizes == [4, 4, 2], f"{sizes}")
    require_same(one.state(), many.state(), "compared with the loop by hand")
    return "windows of 4, 4 and 2, bitwise as by hand"


@loop
def empty_window_is_refused() -> str:
    case, _ = two()
    case.start()
    with refuses(HalfstepError):
        case.stepper.step(mse, Window([]))
    trains(case, pairs(2))
    return "refused, and the loop went on"


@loop
def aux_of_every_micro_batch() -> str:
    case, _ = two()
    case.start()

    def loss(m: nn.Module, b: Any) -> Out:
        return Out(mse(m, b), aux=len(b[0]))

    report = case.stepper.step(loss, parts(pairs(1, n=16)[0], 3, 13))
    require(report.aux == [3, 13], f"{report.aux}")
    return "[3, 13]"


@loop
def three_call_form() -> str:
    """forward / backward / apply, four micro-batches, bitwise as the function form."""
    one, many = two(norm=True, clip_norm=0.5)
    one.start()
    stepper = many.start()
    for batch in pairs(3, n=16):
        window = parts(batch, 4, 4, 4, 4)
        one.stepper.step(mse, window)
        for i, micro in enumerate(window):
            with stepper.forward(last=i == 3):
                loss = mse(many.model, micro)
            stepper.backward(loss)
        require(stepper.apply().applied, "not applied")
    require_close(one.model, many.model, "three calls")
    return "3 updates of 4 micro-batches as `step`"


@loop
def three_call_form_bad_micro_batches() -> str:
    case, _ = two(norm=True)
    stepper = case.start()
    trains(case, pairs(2))
    for bad in range(3):
        before = case.state()
        for i, micro in enumerate(pairs(3)):
            with stepper.forward(last=i == 2):
                loss = mse(case.model, poisoned(micro) if i == bad else micro)
            stepper.backward(loss)
        require(stepper.apply().reason == "loss_not_finite", "the reason")
        require_same(before, case.state(), f"micro-batch {bad} was bad")
    return "first, middle and last bad: bitwise as before"


@loop
def three_call_form_out_of_order_is_refused() -> str:
    case, _ = two()
    stepper = case.start()
    with refuses(HalfstepError):
        stepper.apply()
    with stepper.forward():
        loss = mse(case.model, pairs(1)[0])
    with refuses(HalfstepError):
        stepper.apply()
    stepper.discard()
    del loss
    trains(case, pairs(2))
    return "apply() without backward() is refused, and the loop went on"


@loop
def three_call_form_forgotten_apply() -> str:
    """The loop breaks after backward and begins a new epoch with `step`."""
    case, _ = two()
    stepper = case.start()
    with stepper.forward():
        loss = mse(case.model, pairs(1)[0])
    stepper.backward(loss)
    with refuses(HalfstepError, "discard"):
        stepper.step(mse, pairs(1)[0])
    stepper.discard()
    trains(case, pairs(2))
    return "refused with the remedy, and the loop went on"


@loop
def bad_micro_batch_in_every_place_fp16() -> str:
    torch.manual_seed(0)
    model = mlp(norm=True)
    case = Case(model, adamw(model), ce)
    case.start(precision="fp16")
    batches = labelled(4)
    trains(case, batches[:1])
    for value in (NAN, INF):
        for bad in range(4):
            spoilt = Window(poisoned(b, value) if i == bad else b for i, b in enumerate(batches))
            skips(case, spoilt, ("loss_not_finite",))
    trains(case, [Window(batches)])
    return "8 windows with one bad micro-batch bitwise undone"


@loop
def token_weighted_loss_over_a_window() -> str:
    """The gradient accumulation bug of 2024: mean of means is not the mean over tokens; Counted is."""
    one, many = two()
    x, y = normal(10, 16), normal(10, 4)
    keep = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 0, 0], dtype=torch.float)

    def loss(m: nn.Module, b: Any) -> Counted:
        each = (m(b[0]) - b[1]).square().mean(1) * b[2]
        return Counted(each.sum(), b[2].sum())

    one.start().step(loss, (x, y, keep))
    many.start().step(loss, parts((x, y, keep), 5, 5))
    require_close(one.model, many.model, "2 micro-batches with 5 and 2 tokens")
    return "5 and 2 tokens as one batch of 7"


@loop
def graph_of_a_micro_batch_is_freed() -> str:
    """Only one micro-batch's graph lives at a time."""
    import weakref

    torch.manual_seed(0)
    case, _ = two()
    case.start()
    alive: list[Any] = []
    most = 0

    def loss(m: nn.Module, b: Any) -> Tensor:
        nonlocal most
        out = m(b[0])
        alive.append(weakref.ref(out))
        most = max(most, sum(ref() is not None for ref in alive))
        return (out - b[1]).square().mean()

    case.stepper.step(loss, Window(pairs(4)))  # the first step is watched
    alive.clear()
    most = 0
    case.stepper.step(loss, Window(pairs(4)))
    require(most == 1, f"{most} graphs at once")
    return "1 graph at a time"


@loop
def hugging_face_trainer_style_sum() -> str:
    """`num_items_in_batch` known beforehand: the loss is already divided by it, returned per micro-batch."""
    one, many = two()
    x, y = pairs(1, n=16)[0]
    window = parts((x, y), 4, 12)
    one.start().step(mse, (x, y))

    def loss(m: nn.Module, b: Any) -> Tensor:
        return len(window) * (m(b[0]) - b[1]).square().sum() / y.numel()

    many.start().step(loss, window)
    require_close(one.model, many.model, "sums divided by the window's count")
    require(isinstance(halfstep.Window([1]), list), "a window is a list")
    return "as one batch"
