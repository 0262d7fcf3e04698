"""The report of an emulated step, and its page: whether a model survives a format, where it does not, the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.numbers import format_number
from halfstep.observe.emulate import BACKWARD, FORWARD, WEIGHTS, ModuleRanges, OverflowEvent, ValueRange
from halfstep.observe.recorder import OUTSIDE
from halfstep.page import Block, Column, Heading, Page, Pairs, Paragraph, Span, Style, Table

THE_MODEL_ITSELF = "(the model itself)"


@dataclass(frozen=True)
class ModuleRange:
    """The range of one module's values relative to the format."""

    module: str
    largest: float
    """The largest absolute value of its weights, inputs and results in forward."""
    headroom_bits: float | None
    """Powers of two between `largest` and the format's maximum; negative on overflow, None without values."""
    overflows: int
    underflow_forward: float
    """Share of the non-zero values that became zero."""
    underflow_backward: float
    """The same share for gradients, at the loss scale that survives."""
    subnormal_forward: float
    """Share of the values that are subnormal in the format, with fewer significant bits."""


@dataclass(frozen=True)
class LostGradient:
    """A parameter with gradients that became zero but are non-zero in fp32."""

    parameter: str
    share: float
    """Vanished gradients as a share of those that are non-zero in fp32."""
    largest: float
    """The largest vanished gradient, as in fp32."""


@dataclass(frozen=True, kw_only=True)
class Survival(JsonResult, PageResult):
    """Whether one forward and backward step of a model survives a format."""

    format: str
    survives: bool
    verdict: str
    first_overflow: OverflowEvent | None
    """The first overflow in forward; the first in backward if only gradients overflow."""
    loss: float | None
    """None if non-finite."""
    loss_fp32: float | None
    loss_scale: float | None
    """The first scale from 65536 downwards at which all gradients are finite; None if there is none or none is needed.
    """
    gradient_underflow: float
    """Share of the gradient values in backward that vanish at that loss scale."""
    gradient_underflow_unscaled: float | None
    """The same without a loss scale; None for formats that need none."""
    gradient_lost: float | None
    """Norm of the vanished parameter gradients over the norm of all of them, as in fp32."""
    gradient_error: float | None
    """Norm of the difference from fp32's gradients, over their norm."""
    lost: tuple[LostGradient, ...]
    """The largest vanished gradients."""
    modules: tuple[ModuleRange, ...]
    """The module ranges, worst first."""
    do: tuple[str, ...]
    """Remedies as code to type, best first; empty if nothing is needed."""
    notes: tuple[str, ...]
    scaled: Survival | None = None
    """For fp8: the result with a scale for each tensor, which fp8 training always uses."""

    def page(self) -> Page:
        """Return the page about it."""
        return build_survival_page([self])


def build_module_ranges(ranges: ModuleRanges) -> tuple[ModuleRange, ...]:
    """Return the ranges by module, worst first: overflows, then least headroom, then underflow."""
    names = dict.fromkeys(module for module, _ in ranges.by_place)
    return tuple(sorted((_build_module_range(ranges, name) for name in names), key=_rank_module_range))


def name_module(module: str) -> str:
    """Return the module's path, or a placeholder for the root module."""
    return module or THE_MODEL_ITSELF


def name_event_module(event: OverflowEvent) -> OverflowEvent:
    """Return the event with a readable module name."""
    return OverflowEvent(name_module(event.module), event.operation, event.value, event.largest)


def describe_overflow(event: OverflowEvent) -> str:
    """Return the part of the verdict that names the module, operation, value and limit."""
    place = "outside the model" if event.module == OUTSIDE else f"in {name_module(event.module)}"
    return f"{place} ({event.operation}): {format_number(event.value)} against {format_number(event.largest)}"


def suggest_survival_remedies(
    event: OverflowEvent | None, islands: Sequence[str], bf16_survives: bool
) -> tuple[str, ...]:
    """Return remedies as code to type; the islands given here have already been tried."""
    do = [f'island(model, "{path}")' for path in islands]
    # In the root module's own code, or outside the model, there is no submodule to make an island of.
    if event is not None and not islands and event.module in ("", OUTSIDE):
        do.append(f"halfstep.widen(...) the inputs of {event.operation}{' in the model' if not event.module else ''}")
    if bf16_survives:
        do.append('precision="bf16"')
    return tuple(line.strip() for line in do)


def _build_module_range(ranges: ModuleRanges, module: str) -> ModuleRange:
    parts = {part: ranges.by_place.get((module, part), ValueRange()) for part in (WEIGHTS, FORWARD, BACKWARD)}
    forward = ValueRange()
    forward.add(parts[WEIGHTS])
    forward.add(parts[FORWARD])
    return ModuleRange(
        module=name_module(module),
        largest=forward.largest,
        # Infinite if there is no value, and JSON has no infinity.
        headroom_bits=forward.headroom if math.isfinite(forward.headroom) else None,
        overflows=forward.overflows,
        underflow_forward=forward.underflow_share,
        underflow_backward=parts[BACKWARD].underflow_share,
        subnormal_forward=forward.subnormal_share,
    )


def _rank_module_range(found: ModuleRange) -> tuple[float, float, float]:
    # Modules without values sort last.
    headroom = math.inf if found.headroom_bits is None else found.headroom_bits
    return (-found.overflows, headroom, -found.underflow_backward)


_MOST_MODULES = 10
_WORTH_A_LINE = 0.01


def build_survival_page(found: Sequence[Survival], subject: str = "CASE") -> Page:
    """Return the page of some formats, the verdicts first; the advice at its end is that of the formats that fail."""
    blocks: list[Block] = [_build_survival_verdict(survival, gap=number == 0) for number, survival in enumerate(found)]
    for survival in found:
        blocks += _build_evidence_blocks(survival)
    if not found:
        blocks.append(Paragraph("No format was tested completely.", gap=True))
    notes = dict.fromkeys(note for survival in found for note in survival.notes)
    blocks += [Paragraph(Span(note, "dim"), gap=number == 0) for number, note in enumerate(notes)]
    advice = dict.fromkeys(line for survival in found if not survival.survives for line in survival.do)
    if found and all(survival.survives for survival in found):
        advice = {f"halfstep plan {subject}    measures which of them is the fastest here": None}
    if advice:
        blocks += [Heading("Do"), *(Paragraph(Span(line, strong=True), indent=True) for line in advice)]
    return Page(f"{', '.join(survival.format for survival in found) or 'no format'}, emulated", tuple(blocks))


def _build_survival_verdict(survival: Survival, *, gap: bool) -> Paragraph:
    # Doubtful: it survives with a scale per tensor, as fp8 is used in practice.
    scaled = survival.scaled is not None and survival.scaled.survives
    tone: Style = "good" if survival.survives else "warn" if scaled else "bad"
    return Paragraph(
        (Span(survival.format, tone, strong=True), survival.verdict.removeprefix(survival.format)), gap=gap
    )


def _build_evidence_blocks(survival: Survival) -> Iterator[Block]:
    count = len(survival.modules)
    few = f"the {_MOST_MODULES} modules nearest to its limit, of {count}"
    yield Heading(survival.format, few if count > _MOST_MODULES else "modules, those nearest to its limit first")
    titles = ("largest", "headroom", "overflows", "vanish", "gradients\nvanish")
    columns = (Column("module", wrap="fold"), *(Column(title, "right", "never") for title in titles))
    rows = [
        (
            row.module,
            f"{row.largest:.3g}",
            "-" if row.headroom_bits is None else f"{row.headroom_bits + 0.0:.1f} bits",
            Span(f"{row.overflows}", "bad") if row.overflows else "-",
            _format_share(row.underflow_forward),
            _format_share(row.underflow_backward),
        )
        for row in survival.modules[:_MOST_MODULES]
    ]
    yield Table(columns, tuple(rows))
    yield Pairs(tuple(_list_step_facts(survival)), gap=True)


def _list_step_facts(survival: Survival) -> Iterator[tuple[str, str]]:
    yield "loss", f"{_format_step_loss(survival.loss)}, in fp32 {_format_step_loss(survival.loss_fp32)}"
    unscaled = ""
    if survival.format == "fp16":
        yield "loss scale", _format_loss_scale(survival)
        unscaled = f", without a loss scale {_format_share(survival.gradient_underflow_unscaled)}"
    yield "gradients vanish", f"{_format_share(survival.gradient_underflow)}{unscaled}"
    yield "gradient error", _format_gradient_error(survival)
    if survival.scaled is not None:
        yield "with a scale for each tensor", f"gradient error {_format_gradient_error(survival.scaled)}"
    # A few zeros come from units that rounding switched off; these are not worth a line.
    for lost in [lost for lost in survival.lost if lost.share >= _WORTH_A_LINE][:3]:
        yield f"lost in {lost.parameter}", f"{_format_share(lost.share)} of its gradients, up to {lost.largest:.2g}"


def _format_loss_scale(survival: Survival) -> str:
    if survival.loss_scale is not None:
        return f"{survival.loss_scale:.0f}"
    return "none helps: the loss itself is not finite" if survival.loss is None else "gradients overflow at any"


def _format_gradient_error(survival: Survival) -> str:
    error = survival.gradient_error
    return "not finite" if error is None else f"{error:.2%} of their norm in fp32"


def _format_step_loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _format_share(value: float | None) -> str:
    return numbers.format_percent(value) if value else "-"
