"""The result of a profile, and its page: the cause and the command to type, then where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.draw.notebook import PageResult
from halfstep.json_data import JsonResult
from halfstep.measure.conditions import Conditions, describe_conditions, describe_load_problem
from halfstep.measure.profile.causes import Cause
from halfstep.measure.profile.facts import PARTS, ProfileFacts
from halfstep.measure.profile.next_command import format_layer_names
from halfstep.numbers import format_counted_noun, format_duration
from halfstep.page import Bar, BarPiece, Bars, Block, Charts, Heading, Instruction, Page, Pairs, Paragraph, Span

_FINE = "already-fast"
_NAME_WIDTH = 34
_SHOWN = 6


@dataclass(frozen=True)
class Profile(JsonResult, PageResult):
    """The parts of a step's time, the cause of a missing speed-up, and its remedy."""

    facts: ProfileFacts
    cause: Cause
    others: tuple[Cause, ...]
    """Causes that explain less."""
    conditions: Conditions
    interrupted: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Stages that could not be measured, and why."""
    json_keys = ("subject", "cause", "others", "facts", "skipped", "conditions", "interrupted")

    @property
    def subject(self) -> str:
        """Return the arguments of the command; empty for objects in Python."""
        return " ".join(self.facts.subject)

    def page(self) -> Page:
        """Return the page about it."""
        facts, cause = self.facts, self.cause
        blocks: list[Block] = []
        if self.interrupted:
            blocks.append(Paragraph(Span("interrupted: measurements so far", "warn")))
        verdict = Span(cause.id, "good" if cause.id == _FINE else "warn", strong=True)
        blocks += [Paragraph((verdict, f": {cause.sentence}")), Paragraph(f"do: {cause.do}", indent=True)]
        blocks.append(Instruction(cause.command))
        if cause.evidence:
            blocks += [Heading("Evidence"), Paragraph(cause.evidence, indent=True)]
        blocks += [*_build_speed_blocks(facts), *_build_share_blocks(facts), *_build_layer_blocks(facts)]
        also = {cause.id: cause.sentence for cause in self.others}
        also |= {f"not measured: {name}": why for name, why in self.skipped.items()}
        if also:
            blocks += [Heading("Other findings"), _build_pairs(also)]
        if self.conditions:
            blocks += [Heading("Conditions"), Paragraph(Span(describe_conditions(self.conditions), "dim"), indent=True)]
            if warning := describe_load_problem(self.conditions):
                blocks.append(Paragraph(Span(warning, "warn"), indent=True))
        return Page(f"profile of {self.subject or 'a step'}", tuple(blocks))


def _build_pairs(rows: Mapping[str, str]) -> Pairs:
    return Pairs(tuple(rows.items()), widest=_NAME_WIDTH)


def _build_speed_blocks(facts: ProfileFacts) -> Iterator[Block]:
    race = facts.race
    if race is None:
        return
    rows = {"strict fp32": format_duration(race.fp32)}
    if race.own_fp32 is not None:
        rows[f"fp32 as set here ({facts.fp32_means})"] = format_duration(race.own_fp32)
    if facts.asked != "fp32":
        pairs = format_counted_noun(race.pairs, "pair")
        gain = f"{race.speedup:.2f}x of strict fp32 ({race.low:.2f}-{race.high:.2f}x over {pairs})"
        # Fewer pairs have no confidence interval.
        if race.pairs < FEWEST_FOR_INTERVAL:
            gain = f"not measured well enough: {pairs}"
        rows[facts.asked] = f"{format_duration(race.asked)}, {gain}"
    feeding = facts.feeding
    if feeding is not None:
        rows["with data loading"] = (
            f"{format_duration(feeding.step)}, of which {format_duration(feeding.wait)} waiting for data"
        )
        if facts.with_data is not None:
            rows["speed-up with data loading"] = f"{facts.with_data:.2f}x of strict fp32"
    if facts.ceiling is not None:
        rows["largest possible speed-up"] = f"{facts.ceiling:.2f}x if matrix work took no time"
    yield Heading("Time of a step", "on a fixed batch, unless noted")
    yield _build_pairs(rows)


def _build_share_blocks(facts: ProfileFacts) -> Iterator[Block]:
    if not facts.shares:
        return
    bars = []
    for part, words in PARTS.items():
        share = facts.shares.get(part, 0.0)
        if part == "narrow" and facts.format in ("bf16", "fp16"):
            words = f"matrix work in {facts.format}"
        bars.append(Bar(words, f"{share:.0%}", (BarPiece("share", share),)))
    yield Heading("Where a step's time goes", f"in {facts.asked}")
    yield Charts((Bars("share of a step", tuple(bars), whole=1.0),), terminal=True)


def _build_layer_blocks(facts: ProfileFacts) -> Iterator[Block]:
    work = facts.work
    if facts.format not in ("fp32", "tf32") and work and work.total:
        shares = {name: flops / work.total for name, flops in list(work.wide.items())[:_SHOWN]}
        shown = {name: f"{share:.0%}" for name, share in shares.items() if share >= 0.01}
        if shown:
            yield Heading("Modules that still compute in fp32", "share of FLOPs")
            yield _build_pairs(shown)
    if facts.misaligned:
        yield Heading("Channels that are no multiple of 8", "forward and backward, as is and padded")
        yield _build_pairs(
            {
                format_layer_names(row.names, row.kind): (
                    f"{row.channels} {format_duration(row.seconds)}, {row.padded} "
                    f"{format_duration(row.padded_seconds)}: "
                    f"{row.low:.2f}-{row.high:.2f}x; {row.flops_share:.0%} of the FLOPs"
                )
                for row in facts.misaligned
            }
        )
