"""Read a plan again, and say what its choice means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from halfstep import numbers
from halfstep.errors import BadData
from halfstep.measure.conditions import Conditions
from halfstep.measure.plan.not_measured import NotMeasuredReason
from halfstep.measure.plan.page import Plan, build_plan_blocks
from halfstep.page import Heading, Page, Pairs, Paragraph
from halfstep.printable import escape_to_one_line
from halfstep.report.json_fields import coerce_mapping, coerce_text, format_typed_setting
from halfstep.report.outlook import HIGH, LOW, WATCH, Outlook, Risk, describe_memory_saving
from halfstep.report.run_page import build_outlook_blocks


@dataclass(frozen=True)
class PlanFacts:
    """A plan as `halfstep plan --json` printed it."""

    json_keys: ClassVar = ("kind", "file", "verdict", "outlook", "plan=plain")
    kind: ClassVar = "plan"

    file: Path
    plan: Plan
    plain: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"plan for {self.plan.name}"

    @property
    def verdict(self) -> str:
        """Return the choice in one sentence."""
        plan, name = self.plan, self.plan.choice.name
        if not plan.stay:
            return f"Take {name} on {plan.device.name}: {_describe_plan_speed(plan)}."
        why = plan.reasons.get("precision")
        how = "" if name == "fp32" else f" ({name})"
        return f"Stay in fp32{how} on {plan.device.name}: {why or 'nothing else was measured'}."

    @property
    def outlook(self) -> Outlook:
        return build_plan_outlook(self.plan)

    def page(self) -> Page:
        """Return the page of the plan, with what its choice means."""
        changes = tuple((key, format_typed_setting(value)) for key, value in self.plan.changes.items())
        settings = (Heading("Settings of the plan"), Pairs(changes))
        blocks = (
            Paragraph(self.verdict),
            *build_plan_blocks(self.plan),
            *build_outlook_blocks(self.outlook),
            *settings,
        )
        return Page(self.label, blocks, str(self.file))


def parse_plan(plain: Mapping[str, Any], file: Path) -> PlanFacts:
    """Return the plan from its JSON; raise BadData if that is not one that `halfstep plan` printed."""
    try:
        # The JSON has a device's name and place; its formats have their own key.
        plan = TypeAdapter(Plan).validate_python(
            {**plain, "device": {**coerce_mapping(plain.get("device")), "kind": "other"}}
        )
        # `precision` is of benches only.
        missing = Conditions.__annotations__.keys() - {"precision"} - plan.conditions.keys()
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))} in its conditions")
    except ValueError as error:
        raise BadData(
            f"{file} is not the result of a plan: {escape_to_one_line(coerce_text(error, 300))}",
            allowed="the output of `halfstep plan --json`",
            do="halfstep plan segmentation_tiny --json > plan.json",
        ) from error
    return PlanFacts(file, plan, plain)


def build_plan_outlook(plan: Plan) -> Outlook:
    """Return what the choice of a plan means, from what the plan measured and predicted."""
    wide = next((cell.peak for cell in plan.ladder if cell.setting == plan.baseline), None)
    return Outlook(
        [("Speed", _describe_plan_speed(plan)), ("Memory", _describe_plan_memory(plan, wide))],
        list(_list_plan_benefits(plan, wide)),
        list(_list_plan_risks(plan)),
        list(_list_plan_expectations(plan)),
    )


def _describe_plan_speed(plan: Plan) -> str:
    if plan.choice.setting == plan.baseline:
        return "that of strict fp32, which is the choice"
    return plan.speed_in_words or plan.choice.cut or "not measured"


def _describe_plan_memory(plan: Plan, wide: int | None) -> str:
    peak = plan.choice.peak
    if peak is None:
        return "not predicted"
    if not wide or plan.choice.setting == plan.baseline:
        return f"{numbers.format_bytes(peak)} at the peak of an update, predicted"
    return describe_memory_saving(peak, wide, plan.choice.name)


def _list_plan_benefits(plan: Plan, wide: int | None) -> Iterator[str]:
    speed, peak = plan.choice.speed, plan.choice.peak
    if plan.choice.setting == plan.baseline:
        yield "None over strict fp32, which is the choice: nothing else was measured to be worth it."
    elif speed is not None and speed.speedup > 1:
        yield f"Faster: {_describe_plan_speed(plan)}."
    if peak is not None and wide is not None and peak < wide:
        yield (
            f"Less memory: {numbers.format_bytes(wide - peak)} of {numbers.format_bytes(wide)} are free for a larger "
            "batch."
        )
    if plan.growth:
        yield f"A larger batch: {plan.growth.words}."


def _list_plan_risks(plan: Plan) -> Iterator[Risk]:
    chosen, parity = plan.choice.setting, plan.parity
    level = {"holds": LOW, "fails": HIGH}.get(parity.verdict, WATCH)
    yield Risk("A result that differs from fp32's", level, f"{parity.verdict}: {parity.why}")
    ability = plan.formats.get(chosen.precision)
    if ability is not None and not ability.native:
        yield Risk(f"{chosen.precision} is not native here", WATCH, ability.reason)
    if chosen.compile:
        yield Risk("Compiling", WATCH, "another input shape is recompiled, and takes as long as the first step")
    for cell in plan.ladder:
        if cell.cut and cell.cut not in list(NotMeasuredReason):
            yield Risk(f"{cell.name}, rejected", LOW, cell.cut)


def _list_plan_expectations(plan: Plan) -> Iterator[tuple[str, str]]:
    choice = plan.choice
    if choice.speed is not None:
        yield "An update", f"about {numbers.format_duration(choice.speed.seconds)}"
    if choice.first_step is not None:
        yield "The first update", f"{numbers.format_duration(choice.first_step)}, including preparation and compilation"
    if choice.peak is not None:
        yield "Memory of an update", f"{numbers.format_bytes(choice.peak)} of tensors, predicted"
    yield "Loss", f"compared with fp32: {plan.parity.why}"
