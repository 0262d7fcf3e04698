"""Word the sentences of a verdict: the cause first, then what helps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from halfstep.guard.diagnosis.bad_inputs import Spot
from halfstep.guard.diagnosis.trials import TrialOutcome
from halfstep.guard.verdict import Culprit, History, ProposedRemedy
from halfstep.numbers import number
from halfstep.observe.nonfinite_origin import CONSTANT, all_finite, largest_finite, local, norm_of
from halfstep.observe.recorder import OUTSIDE, as_written
from halfstep.precision.precision import Precision
from halfstep.step.rerun import ON_GRADIENTS

BATCH_WRITTEN = "the batch was written to in place during the step"
CLONE_FIRST = "copy a tensor of the batch before writing into it: x = x.clone()"
ONLY_COMPILED = "compiler: the step is finite in eager mode and not finite when compiled"
NOT_AGAIN = (
    "not_reproducible: a non-deterministic operation, Python state that the step changes, random numbers outside "
    "torch, or the device"
)
NOT_NOW = "a rerun with the same batch and the same random numbers is finite"
NOW_AND_THEN = "of two reruns one was finite and one was not"
OWN_GENERATOR = (
    "the model or the loss function has its own torch.Generator, whose state before the step is unknown: "
    "Guardian.step() keeps it"
)
OTHER_LOSS = "give a loss function that can be called twice with the same batch: again=..., and no iterator as a batch"
FINITE_NORMALIZED = "divided by its own spread, the step is finite"
NO_SIGN = "no sign of divergence: neither the losses nor the weights have grown"
FINITE_WITHOUT = "with another sample in its place the step is finite"


def not_run(outcome: TrialOutcome) -> str:
    """Return the sentence for a step that could not be run again."""
    return f"data: the step could not be run again: {outcome.error}; so its cause is unknown"


def refused(guard: str) -> str:
    """Return the sentence for a finite step that a guard refused."""
    return f"divergence: all numbers are finite, and {guard} refused the step"


def place(outcome: TrialOutcome) -> str:
    """Return the place of the origin: up3.conv2 (aten.convolution, models/unet.py:41)."""
    culprit = outcome.culprit
    if culprit is None and (outcome.loss_too_large or outcome.norm_too_large):
        return "the sum of the losses" if outcome.loss_too_large else "the norm of the gradients"
    if culprit is None:
        return f"the gradient of {outcome.bad_parameters[0]}" if outcome.bad_parameters else "the step"
    if culprit.outside is not None:
        return culprit.outside
    where = {"": "the model's own forward", OUTSIDE: "the loss", ON_GRADIENTS: "on_gradients"}.get(
        culprit.module, culprit.module
    )
    details = [
        culprit.operation,
        *(["in backward"] if culprit.backward else []),
        *([culprit.line] if culprit.line else []),
    ]
    return f"{where} ({', '.join(details)})"


def what_happened(outcome: TrialOutcome) -> str:
    """Return the place of the origin and what it did."""
    # If the loss or a gradient is non-finite too, the origin was found through that, and the buffer adds nothing.
    alone = bool(outcome.bad_buffers) and math.isfinite(outcome.loss) and not outcome.bad_parameters
    bad_buffer = f", so buffer {outcome.bad_buffers[0]} is no longer finite" if alone else ""
    return f"{place(outcome)} {outcome.effect or 'is not finite'}{bad_buffer}"


def scale_too_high(scale: float, at_scale: TrialOutcome) -> str:
    """Return the sentence for a loss scale that is too high, with one that may fit."""
    sentence = f"gradients overflow at a loss scale of {scale:g} and fit without one"
    culprit = at_scale.culprit
    if culprit is None or culprit.in_fp32 is None or not math.isfinite(culprit.in_fp32):
        return sentence
    # A scale falls by powers of two: this many halvings bring the result below the limit.
    halvings = max(1, math.ceil(math.log2(max(culprit.in_fp32 / culprit.limit, 1.0))))
    return f"{sentence}; {what_happened(at_scale)}, so {scale / 2**halvings:g} may fit"


def precision(precision: Precision, outcome: TrialOutcome, remedies: Sequence[ProposedRemedy]) -> str:
    """Return the sentence for a number that does not fit the precision, with the remedies that work."""
    works = [_name_remedy(remedy) for remedy in remedies if remedy.works]
    too = [f"{works[0]} is finite", *(f"{name} is finite too" for name in works[1:])] if works else []
    happened = what_happened(outcome)
    culprit = outcome.culprit
    # The words for the origin name the format that it computed in; those for undefined code do not.
    names_format = (
        culprit is not None and culprit.outside is None and not outcome.undefined and culprit.format == precision.name
    )
    if not names_format:
        happened += f" in {precision}"
    return f"precision: {'; '.join([happened, *([', '.join(too)] if too else []), *_wrap(outcome.culprit)])}"


def not_helping(remedies: Sequence[ProposedRemedy]) -> tuple[str, ...]:
    """Return a line for each remedy that was tried and did not help."""
    return tuple(f"{_name_remedy(remedy)} is not finite either" for remedy in remedies if remedy.works is False)


def _wrap(culprit: Culprit | None) -> list[str]:
    """Return advice to wrap a function, if no module contains the operation alone."""
    if culprit is None or culprit.outside is not None or culprit.module not in ("", OUTSIDE):
        return []
    return ["wrap it: halfstep.island(fn)"]


def _name_remedy(remedy: ProposedRemedy) -> str:
    return f"an island round {remedy.target}" if remedy.kind == "island" else remedy.target


def diverged(fp32: TrialOutcome, why: str) -> str:
    """Return the sentence for a divergence that fails in fp32 too."""
    return f"divergence: {what_happened(fp32)}; the step also fails in fp32, and {why}"


def grown_on_purpose(grown: str, share: float) -> str:
    """Return that losses have grown without updates that would explain it."""
    return f"{grown}, but no update was large enough to be the cause: at most {share:.2g} of the weights' norm"


def in_the_code(fp32: TrialOutcome) -> str:
    """Return the sentence for code without a finite result."""
    return f"code: {what_happened(fp32)}; the step also fails in fp32"


def in_on_gradients(edited: TrialOutcome) -> str:
    """Return the sentence for an on_gradients that spoils finite gradients."""
    return f"code: gradients are finite before on_gradients and not after it: {what_happened(edited)}"


def state(what: str, since: str) -> str:
    """Return the sentence for a bad weight or buffer."""
    return f"state: {what}{f'; {since}' if since else ''}"


def reaches(found: Spot, outcome: TrialOutcome) -> str:
    """Return the sentence for outliers in the batch: far from all other numbers, or from the usual range."""
    return f"data: {found} reaches {found.value}; {what_happened(outcome)}"


def held(culprit: Culprit, rows: str) -> str:
    """Return the sentence for bad values in a tensor of neither the batch nor the model, such as a data set."""
    name = f"a tensor that came from outside, at {culprit.line}," if culprit.outside == CONSTANT else culprit.outside
    return f"data: {name} contains {' and '.join(culprit.kinds)}{f' in {rows}' if rows else ''}, and the step uses it"


def fix(fp32: TrialOutcome) -> str:
    """Return which line to change, and why."""
    where = fp32.culprit.line if fp32.culprit is not None and fp32.culprit.line else place(fp32)
    return f"change {where}, which {fp32.effect or 'is not finite'}"


def fix_on_gradients(edited: TrialOutcome) -> str:
    """Return which line of on_gradients to change, if it is known."""
    return fix(edited) if edited.culprit is not None else f"change on_gradients: {what_happened(edited)}"


def spot(found: Spot) -> str:
    """Return where a batch holds non-finite values."""
    many = f", one of {found.many:,} such numbers" if found.many > 1 else ""
    return f"{found} contains {found.value}{many}"


def batch_written(found: Spot) -> str:
    """Return the sentence for non-finite values in a batch that the step itself wrote to."""
    return f"data: {spot(found)}, and {BATCH_WRITTEN}, so its original values are unknown"


FAR = 1e3
"""The ratio to the median above which a loss or a norm is far from those before."""
HUGE_WEIGHT = 1e6
"""The limit above which no weight of a healthy model lies."""
HUGE = 1e10
"""The limit above which no intermediate result of a healthy model lies, unless the batch has such values."""
LARGE_WEIGHT = 1e3
"""The limit above which a weight confirms that growing losses are a divergence."""
LARGE_UPDATE = 0.1
"""The size of an update, as a part of the weights' norm, that makes a loss grow a thousandfold within a history."""
LEARNT = 1e-4
"""The loss below which a task is as good as learned, so that a jump by any factor means nothing."""


def strayed(fp32: TrialOutcome, history: History) -> str:
    """Return how far even fp32 is from the steps before; empty if it is not far."""
    # One earlier loss is enough to compare with. Gradient norms of the first steps may be small for good reasons, so
    # more are needed.
    for what, now, before, enough, learnt in (
        ("loss", fp32.loss, history.losses, 1, LEARNT),
        ("gradient norm", fp32.grad_norm, history.grad_norms, 5, math.sqrt(LEARNT)),
    ):
        usable = [abs(value) for value in before if math.isfinite(value)]
        usual = statistics.median(usable) if len(usable) >= enough else 0.0
        if usual and abs(now) > FAR * max(usual, usable[0], learnt):
            return f"fp32 is finite, but its {what} is {number(now)}, and the median so far is {number(usual)}"
    return ""


def grown(history: History) -> str:
    """Return how far the newest applied steps are from those before; empty if they are not far."""
    for what, before, enough, learnt in (
        ("loss", history.losses, 2, LEARNT),
        ("gradient norm", history.grad_norms, 5, math.sqrt(LEARNT)),
    ):
        usable = [abs(value) for value in before if math.isfinite(value)]
        if len(usable) >= enough and max(usable[-3:]) > FAR * max(usable[0], learnt):
            return f"the {what} went from {number(usable[0])} to {number(max(usable[-3:]))} in {len(usable)} steps"
    return ""


def strays_slowly(fp32: TrialOutcome, history: History) -> bool:
    """Return whether the loss is near that of the step before, so that it did not jump."""
    newest = next((abs(loss) for loss in reversed(history.losses) if math.isfinite(loss)), math.inf)
    return abs(fp32.loss) <= FAR * max(newest, LEARNT)


def update_share(
    history: History, weights: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], clip_norm: float | None
) -> float | None:
    """Return the largest of the newest updates as a part of the weights' norm; None if no learning rate is known.

    A loss that grows does so on purpose where a weight of it is raised, or because large updates ruin the weights.
    """
    parts = [part for part in map(local, weights) if part.is_floating_point() and part.itemsize > 1]
    norm = math.hypot(*(norm_of(torch.where(part.isfinite(), part, 0)) for part in parts))
    rates = history.rates[-3:] or tuple(float(group["lr"]) for each in optimizers for group in each.param_groups)
    if not rates or not norm:
        return None
    # SGD's update is proportional to the gradient. Others divide by its size, so that each weight moves by the rate.
    scaled = math.sqrt(sum(part.numel() for part in parts))
    gradient = max((value for value in history.grad_norms[-3:] if math.isfinite(value)), default=None)
    if gradient is None:
        return max(rates) * scaled / norm
    gradient = gradient if clip_norm is None else min(gradient, clip_norm)
    if optimizers and all(isinstance(each, torch.optim.SGD) for each in optimizers):
        momentum = max(float(group["momentum"]) for each in optimizers for group in each.param_groups)
        return max(rates) * gradient / max(1.0 - momentum, 1e-3) / norm
    return max(rates) * (scaled if optimizers else min(scaled, gradient)) / norm


def too_large(model: nn.Module, largest_input: float, applied: int) -> str:
    """Return which weights or values are larger than in any healthy run; empty if none are."""
    largest, name = largest_weight(model)
    if largest > HUGE_WEIGHT:
        return f"the largest weight is {number(largest)}, in {name}"
    if applied and largest_input > HUGE:
        return f"numbers have grown to {number(largest_input)}, and earlier steps were finite"
    return ""


def largest_weight(model: nn.Module) -> tuple[float, str]:
    """Return the largest finite absolute value of all weights, and the name of its parameter."""
    sizes = ((largest_finite(weight), as_written(path)) for path, weight in model.named_parameters())
    return max(sizes, default=(0.0, ""), key=lambda pair: pair[0])


def weight_evidence(model: nn.Module) -> str:
    """Return the first non-finite weight, or the largest absolute value of all weights."""
    largest, name = 0.0, ""
    for path, weight in model.named_parameters():
        if not all_finite(weight):
            return f"weight {as_written(path)} is not finite"
        if (size := largest_finite(weight)) > largest:
            largest, name = size, as_written(path)
    return f"the largest weight is {number(largest)}, in {name}" if name else "all weights are 0"


def rate_evidence(history: History) -> tuple[str, ...]:
    """Return the learning rate and the course of the loss, as evidence."""
    found = []
    if history.rates:
        found.append(f"the learning rate is {history.rates[-1]:.3g}")
    if len(history.losses) > 1:
        first, last = number(history.losses[0]), number(history.losses[-1])
        found.append(f"the loss went from {first} to {last} in {len(history.losses)} steps")
    return tuple(found)
