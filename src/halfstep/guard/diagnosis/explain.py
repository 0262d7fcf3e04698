"""Word the sentences of a verdict: the cause first, then what helps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from halfstep.guard.diagnosis.bad_inputs import BatchSpot
from halfstep.guard.diagnosis.trials import TrialOutcome
from halfstep.guard.verdict import Culprit, ProposedRemedy, ProposedRemedyKind, StepHistory
from halfstep.numbers import format_number
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.observe.nonfinite_origin import (
    CONSTANT,
    compute_norm,
    extract_local_tensor,
    find_largest_finite,
    is_all_finite,
)
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.precision import Precision
from halfstep.step.experiment.rerun import ON_GRADIENTS

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


def explain_not_rerun(outcome: TrialOutcome) -> str:
    """Return the sentence for a step that could not be run again."""
    return f"data: the step could not be run again: {outcome.error}; so its cause is unknown"


def explain_refused_step(guard: str) -> str:
    """Return the sentence for a finite step that a guard refused."""
    return f"divergence: all numbers are finite, and {guard} refused the step"


def describe_origin(outcome: TrialOutcome) -> str:
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
        *([f"in backward of {culprit.forward}" if culprit.forward else "in backward"] if culprit.backward else []),
        *([culprit.line] if culprit.line else []),
    ]
    return f"{where} ({', '.join(details)})"


def describe_failure(outcome: TrialOutcome) -> str:
    """Return the place of the origin and what it did."""
    # If the loss or a gradient is non-finite too, the origin was found through that, and the buffer adds nothing.
    alone = bool(outcome.bad_buffers) and math.isfinite(outcome.loss) and not outcome.bad_parameters
    bad_buffer = f", so buffer {outcome.bad_buffers[0]} is no longer finite" if alone else ""
    return f"{describe_origin(outcome)} {outcome.effect or 'is not finite'}{bad_buffer}"


def explain_high_scale(scale: float, at_scale: TrialOutcome) -> str:
    """Return the sentence for a loss scale that is too high, with one that may fit."""
    sentence = f"gradients overflow at a loss scale of {scale:g} and fit without one"
    culprit = at_scale.culprit
    if culprit is None or culprit.in_fp32 is None or not math.isfinite(culprit.in_fp32):
        return sentence
    # A scale falls by powers of two: this many halvings bring the result below the limit.
    halvings = max(1, math.ceil(math.log2(max(culprit.in_fp32 / culprit.limit, 1.0))))
    return f"{sentence}; {describe_failure(at_scale)}, so {scale / 2**halvings:g} may fit"


def explain_precision_failure(precision: Precision, outcome: TrialOutcome, remedies: Sequence[ProposedRemedy]) -> str:
    """Return the sentence for a number that does not fit the precision, with the remedies that work."""
    works = [_name_remedy(remedy) for remedy in remedies if remedy.works and remedy.kind not in _OF_LOSS]
    too = [f"{works[0]} is finite", *(f"{name} is finite too" for name in works[1:])] if works else []
    happened = describe_failure(outcome)
    culprit = outcome.culprit
    # The words for the origin name the format that it computed in; those for undefined code do not.
    names_format = (
        culprit is not None and culprit.outside is None and not outcome.undefined and culprit.format == precision.name
    )
    if not names_format:
        happened += f" in {precision}"
    said = [happened, *([", ".join(too)] if too else []), *_advise_wrapping(outcome.culprit, remedies)]
    return f"precision: {'; '.join(said)}"


def list_useless_remedies(remedies: Sequence[ProposedRemedy]) -> tuple[str, ...]:
    """Return a line for each remedy that was tried and did not help."""
    return tuple(f"{_name_remedy(remedy)} is not finite either" for remedy in remedies if remedy.works is False)


def _advise_wrapping(culprit: Culprit | None, remedies: Sequence[ProposedRemedy]) -> list[str]:
    """Return what to change in a function, if no module contains the operation alone."""
    if culprit is None or culprit.outside is not None or culprit.module not in ("", OUTSIDE):
        return []
    tried = [remedy for remedy in remedies if remedy.kind in _OF_LOSS]
    for remedy in tried:
        if remedy.works:
            return [
                f"wrap it: halfstep.island({remedy.target})"
                if remedy.kind == "island_function"
                else f"{_name_remedy(remedy)} is finite"
            ]
    # The operation alone is finite in fp32, from the same inputs.
    return ["wrap it: halfstep.island(fn)"] if not tried and (culprit.backward or culprit.in_fp32 is not None) else []


_OF_LOSS: tuple[ProposedRemedyKind, ...] = ("island_function", "float_output")
"""The kinds of remedies that change the loss function."""


def _name_remedy(remedy: ProposedRemedy) -> str:
    if remedy.kind == "float_output":
        return f"the loss from {remedy.target}"
    return f"an island around {remedy.target}" if remedy.kind.startswith("island") else remedy.target


def explain_divergence(fp32: TrialOutcome, why: str, in_fp32: str) -> str:
    """Return the sentence for a divergence; `in_fp32` says that fp32 is no remedy."""
    return f"divergence: {describe_failure(fp32)}; {in_fp32}, and {why}"


def explain_intended_growth(grown: str, share: float) -> str:
    """Return that losses have grown without updates that would explain it."""
    return f"{grown}, but no update was large enough to be the cause: at most {share:.2g} of the weights' norm"


def explain_code_failure(fp32: TrialOutcome, in_fp32: str) -> str:
    """Return the sentence for code without a finite result; `in_fp32` says that fp32 is no remedy."""
    return f"code: {describe_failure(fp32)}; {in_fp32}"


def explain_gradient_hook(edited: TrialOutcome) -> str:
    """Return the sentence for an on_gradients that spoils finite gradients."""
    return f"code: gradients are finite before on_gradients and not after it: {describe_failure(edited)}"


def explain_bad_state(what: str, since: str) -> str:
    """Return the sentence for a bad weight or buffer."""
    return f"state: {what}{f'; {since}' if since else ''}"


def explain_left_state(culprit: Culprit, attempt: int) -> str:
    """Return the sentence for state that an earlier skipped attempt wrote and that a skip does not restore."""
    name = f"a tensor used at {culprit.line}" if culprit.outside == CONSTANT else culprit.outside
    kinds = " and ".join(culprit.kinds)
    return f"state: {name} contains {kinds}, which the skipped attempt {attempt} left: a skip does not restore it"


def describe_left_state(culprit: Culprit) -> str:
    """Return that the step has left bad values in state that a skip does not restore."""
    name = f"a tensor used at {culprit.line}" if culprit.outside == CONSTANT else culprit.outside
    return f"{name} contains {' and '.join(culprit.kinds)} now: a skip does not restore it"


def suggest_state_to_keep(name: str) -> str:
    """Return where to keep a tensor, so that a skip restores it."""
    what = "this tensor" if name == CONSTANT else name
    return (
        f"keep {what} as an attribute of a module (a tensor, or a list or dict of at most 64 members), "
        "or stepper.include() an object with state_dict(); reset it to finite values once"
    )


def explain_bad_update(what: str, applied: int, fault: str) -> str:
    """Return the sentence for a weight that an update has made non-finite from finite gradients."""
    good = f"step {applied}, the last that was applied, was finite"
    return f"state: {what}; {good}, and its update wrote it from finite gradients: {fault}"


def describe_ruinous_update(share: float) -> str:
    """Return that a step is finite with the weights from before the last update."""
    size = f", which changed them by {share:.2g} of their norm" if math.isfinite(share) else ""
    return f"with the weights from before the last update it is finite{size}"


def explain_outliers(found: BatchSpot, outcome: TrialOutcome) -> str:
    """Return the sentence for outliers in the batch: far from all other numbers, or from the usual range."""
    return f"data: {found} reaches {found.value}; {describe_failure(outcome)}"


def explain_outside_tensor(culprit: Culprit, rows: str) -> str:
    """Return the sentence for bad values in a tensor of neither the batch nor the model, such as a data set."""
    name = f"a tensor that came from outside, at {culprit.line}," if culprit.outside == CONSTANT else culprit.outside
    return f"data: {name} contains {' and '.join(culprit.kinds)}{f' in {rows}' if rows else ''}, and the step uses it"


def suggest_line_change(fp32: TrialOutcome) -> str:
    """Return which line to change, and why."""
    where = fp32.culprit.line if fp32.culprit is not None and fp32.culprit.line else describe_origin(fp32)
    return f"change {where}, which {fp32.effect or 'is not finite'}"


def suggest_gradient_hook_change(edited: TrialOutcome) -> str:
    """Return which line of on_gradients to change, if it is known."""
    return (
        suggest_line_change(edited)
        if edited.culprit is not None
        else f"change on_gradients: {describe_failure(edited)}"
    )


def describe_batch_spot(found: BatchSpot) -> str:
    """Return where a batch holds non-finite values."""
    many = f", one of {found.many:,} such numbers" if found.many > 1 else ""
    return f"{found} contains {found.value}{many}"


def explain_written_batch(found: BatchSpot) -> str:
    """Return the sentence for non-finite values in a batch that the step itself wrote to."""
    return f"data: {describe_batch_spot(found)}, and {BATCH_WRITTEN}, so its original values are unknown"


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


def describe_fp32_deviation(fp32: TrialOutcome, history: StepHistory) -> str:
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
            return (
                f"fp32 is finite, but its {what} is {format_number(now)}, and the median so far is "
                f"{format_number(usual)}"
            )
    return ""


def describe_growth(history: StepHistory) -> str:
    """Return how far the newest applied steps are from those before; empty if they are not far."""
    for what, before, enough, learnt in (
        ("loss", history.losses, 2, LEARNT),
        ("gradient norm", history.grad_norms, 5, math.sqrt(LEARNT)),
    ):
        usable = [abs(value) for value in before if math.isfinite(value)]
        if len(usable) >= enough and max(usable[-3:]) > FAR * max(usable[0], learnt):
            return (
                f"the {what} went from {format_number(usable[0])} to {format_number(max(usable[-3:]))} in "
                f"{len(usable)} steps"
            )
    return ""


def is_near_last_loss(fp32: TrialOutcome, history: StepHistory) -> bool:
    """Return whether the loss is near that of the step before, so that it did not jump."""
    newest = next((abs(loss) for loss in reversed(history.losses) if math.isfinite(loss)), math.inf)
    return abs(fp32.loss) <= FAR * max(newest, LEARNT)


def estimate_update_share(
    history: StepHistory,
    weights: Iterable[Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    clip_norm: float | None,
) -> float | None:
    """Return the largest of the newest updates as a part of the weights' norm; None if no learning rate is known.

    A loss that grows does so on purpose where a weight of it is raised, or because large updates ruin the weights.
    """
    parts = [part for part in map(extract_local_tensor, weights) if part.is_floating_point() and part.itemsize > 1]
    norm = math.hypot(*(compute_norm(torch.where(part.isfinite(), part, 0)) for part in parts))
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


def describe_large_values(model: nn.Module, largest_input: float, applied: int) -> str:
    """Return which weights or values are larger than in any healthy run; empty if none are."""
    largest, name = find_largest_weight(model)
    if largest > HUGE_WEIGHT:
        return f"the largest weight is {format_number(largest)}, in {name}"
    if applied and largest_input > HUGE:
        return f"numbers have grown to {format_number(largest_input)}, and earlier steps were finite"
    return ""


def find_largest_weight(model: nn.Module) -> tuple[float, str]:
    """Return the largest finite absolute value of all weights, and the name of its parameter."""
    sizes = ((find_largest_finite(weight), strip_compile_wrappers(path)) for path, weight in model.named_parameters())
    return max(sizes, default=(0.0, ""), key=lambda pair: pair[0])


def describe_weight_evidence(model: nn.Module) -> str:
    """Return the first non-finite weight, or the largest absolute value of all weights."""
    largest, name = 0.0, ""
    for path, weight in model.named_parameters():
        if not is_all_finite(weight):
            return f"weight {strip_compile_wrappers(path)} is not finite"
        if (size := find_largest_finite(weight)) > largest:
            largest, name = size, strip_compile_wrappers(path)
    return f"the largest weight is {format_number(largest)}, in {name}" if name else "all weights are 0"


def describe_rate_evidence(history: StepHistory) -> tuple[str, ...]:
    """Return the learning rate and the course of the loss, as evidence."""
    found = []
    if history.rates:
        found.append(f"the learning rate is {history.rates[-1]:.3g}")
    if len(history.losses) > 1:
        first, last = format_number(history.losses[0]), format_number(history.losses[-1])
        found.append(f"the loss went from {first} to {last} in {len(history.losses)} steps")
    return tuple(found)
