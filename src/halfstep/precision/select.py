"""Choose the precision of a run: the named one or a refusal; where the caller allows it, a fallback with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep import distributed
from halfstep.draw.notebook import PageResult
from halfstep.errors import HalfstepError, PrecisionRefused
from halfstep.finding import Finding
from halfstep.page import Items, Page, Paragraph, build_finding_box
from halfstep.precision.hardware import Device, describe_device, find_format_support
from halfstep.precision.names import (
    AMP,
    AUTO,
    DEFAULT,
    FP8_KINDS,
    FP64,
    NamedPrecision,
    PolicyRule,
    is_policy,
    list_precision_names,
    parse_policy_name,
    parse_step_precision,
)
from halfstep.precision.precision import Precision, add_policy_rules, resolve_precision_name

if TYPE_CHECKING:
    from halfstep.precision.probe import Measurements

# -- decision ---------------------------------------------------------------------------------------------------------
# A decision is plain data, so that rank 0 can make it for all ranks.


class ConsideredPrecision(NamedTuple):
    """One candidate of the fallback order: a precision, whether it was chosen, and why or why not."""

    name: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class PrecisionDecision:
    """The candidates that were tried, and findings about the chosen one."""

    rungs: tuple[ConsideredPrecision, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """The chosen precision."""
        return next(rung.name for rung in self.rungs if rung.accepted)


def decide_on_rank_zero(decide: Callable[[], PrecisionDecision]) -> PrecisionDecision:
    """Return rank 0's decision on every rank; a refusal is sent as one, so that all ranks raise the same error."""
    if distributed.count_ranks() == 1:
        return decide()
    decided = distributed.run_on_rank_zero(lambda: _decide_as_data(decide))
    if "given" in decided:
        raise PrecisionRefused(decided["given"], allowed=decided["allowed"], do=decided["do"])
    rungs = tuple(ConsideredPrecision(*rung) for rung in decided["rungs"])
    return PrecisionDecision(rungs, tuple(Finding(**finding) for finding in decided["findings"]))


def _decide_as_data(decide: Callable[[], PrecisionDecision]) -> dict[str, Any]:
    try:
        decision = decide()
    except HalfstepError as error:
        return {"given": error.given, "allowed": error.allowed, "do": error.do}
    # Any error: raised before the broadcast, it would leave the other ranks waiting in it.
    except Exception as error:
        _log.exception("rank 0 could not choose a precision")
        return {"given": f"rank 0 could not choose: {error!r}", "allowed": "", "do": "see rank 0's log"}
    return {"rungs": decision.rungs, "findings": [finding.as_dict() for finding in decision.findings]}


# -- choice -----------------------------------------------------------------------------------------------------------


WORTH_IT = 1.1
"""A narrow format that is less than this many times as fast as strict fp32 is not worth its rounding errors."""
AS_GOOD = 0.9
"""bf16 needs no loss scale, so it is preferred to fp16 from this share of its speed on."""

_PREFERRED = ("bf16", "fp16", "tf32")
_SIXTEEN_BITS = ("bf16", "fp16")
_FLOOR = "fp32"
_SLOW, _SUBSTITUTED = "precision.slow", "precision.substituted"
_log = logging.getLogger("halfstep")


@dataclass(frozen=True)
class Choice(PageResult):
    """The precision of a run, with the reasons that led to it."""

    precision: Precision
    asked: str
    took: str
    rungs: tuple[ConsideredPrecision, ...]
    findings: tuple[Finding, ...]
    device: Device

    def __str__(self) -> str:
        return "\n".join([f"{self.precision.name} on {self.device.name}", *self.reasons])

    def page(self) -> Page:
        """Return the page about it: the precision, the reasons, and the findings."""
        found = (build_finding_box(one.id, one.severity, one.evidence, one.fix) for one in self.findings)
        first = Paragraph(f"{self.precision.name} on {self.device.name}")
        return Page("precision", (first, Items(self.reasons), *found))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The tried candidates in words."""
        return tuple(f"{name} {'chosen' if accepted else 'rejected'}: {why}" for name, accepted, why in self.rungs)


def choose_precision(
    asked: object = AUTO,
    *,
    device: torch.device | str | Device | None = None,
    fallback: bool = False,
    measured: Measurements | None = None,
    fresh: bool = False,
) -> Choice:
    """Choose the precision for a run; under a process group every rank calls this, and rank 0 decides.

    A precision given by name runs, with the finding `precision.slow` if the device emulates it. `amp` is bf16 if that
    is native, otherwise fp16. `auto` measures a present device once, for about a second; a `Device` description is
    judged by its facts.

    Args:
        asked: A precision by name, `auto`, or a `Choice`, which is returned unchanged.
        device: The device; by default the best of this machine.
        fallback: Run in the next format that the device supports, with the finding `precision.substituted`, instead
            of refusing; recipes do so.
        measured: Measurements to use instead of new ones.
        fresh: Ignore the cache of measurements.

    Returns:
        The chosen precision, with the reasons.

    Raises:
        PrecisionRefused: The precision cannot run, would run as another format, or is known to give wrong numbers.
    """
    if isinstance(asked, Choice):
        return asked
    here = device if isinstance(device, Device) else describe_device(device)
    if here.kind == "tpu":
        raise _build_refusal(str(asked), here, find_format_support(here, _FLOOR).reason)
    if isinstance(asked, Precision):
        named = NamedPrecision(asked.name)
        return Choice(
            asked, named.name, named.took, (ConsideredPrecision(asked.name, True, "given as an object"),), (), here
        )
    named = parse_step_precision(asked)
    if is_policy(named.name):
        return _choose_by_policy(named, here, fallback=fallback, measured=measured, fresh=fresh)

    def decide() -> PrecisionDecision:
        if named.name == AMP:
            return _decide_sixteen_bits(here, fallback)
        if named.name != AUTO:
            return _decide_by_name(named.name, here, fallback)
        known = measured
        if not measured and not isinstance(device, Device):
            from halfstep.precision.probe import measure_speedups  # a precision by name needs no measurement

            known = measure_speedups(here, fresh=fresh)
        return _decide_by_speed(here, known) if known else _decide_by_table(here, _PREFERRED)

    decision = decide_on_rank_zero(decide)
    return _build_choice(decision, named, here, resolve_precision_name(decision.name))


def _choose_by_policy(
    named: NamedPrecision, here: Device, *, fallback: bool, measured: Measurements | None, fresh: bool
) -> Choice:
    """Choose the default of a policy, and the kinds of fp8 of its rules; without one, a rule means the default."""
    default, rules = parse_policy_name(named.name)
    choice = choose_precision(default, device=here, fallback=fallback, measured=measured, fresh=fresh)
    kept, findings, rungs = list[PolicyRule](), choice.findings, choice.rungs
    for rule in rules:
        name = rule.name
        if name in FP8_KINDS:
            decision = decide_on_rank_zero(lambda name=name: _decide_by_name(name, here, fallback))  # type: ignore[misc]
            findings += tuple(finding for finding in decision.findings if finding not in findings)
            rungs += decision.rungs
            name = decision.name if decision.name in FP8_KINDS else DEFAULT
        kept.append(PolicyRule(rule.pattern, name))
    precision = add_policy_rules(choice.precision, tuple(kept))
    return replace(choice, precision=precision, asked=named.name, took=named.took, rungs=rungs, findings=findings)


def _build_choice(decision: PrecisionDecision, named: NamedPrecision, here: Device, precision: Precision) -> Choice:
    findings = decision.findings
    can = find_format_support(here, precision.needs)
    # Rank 0 decided from its own device; this one may be of another kind.
    if distributed.rank() > 0 and not can.native and not any(finding.id == _SLOW for finding in decision.findings):
        evidence = f"rank 0 chose {precision}, and rank {distributed.rank()} has {here.name}: {can.reason}"
        findings += (Finding("precision.uneven", "warning", evidence, "train on devices of one kind"),)
    for finding in findings if distributed.rank() == 0 else findings[len(decision.findings) :]:
        _log.warning("%s", finding)
    return Choice(precision, named.name, named.took, decision.rungs, findings, here)


def report_precision_findings(name: str, device: torch.device | str) -> tuple[Finding, ...]:
    """Return and log the findings on a precision that a loop computes in by itself; raise PrecisionRefused like
    `choose_precision`. Only this rank decides.
    """
    findings = _decide_by_name(name, describe_device(device), fallback=False).findings
    for finding in findings:
        _log.warning("%s", finding)
    return findings


def _decide_by_name(asked: str, device: Device, fallback: bool) -> PrecisionDecision:
    """Try the requested precision and, with `fallback`, the next ones, until the device supports one."""
    rungs: list[ConsideredPrecision] = []
    name: str | None = asked
    while name is not None:
        rungs.append(_consider_precision(name, asked, device, fallback))
        if rungs[-1].accepted:
            return PrecisionDecision(tuple(rungs), _build_findings(asked, rungs, device))
        if not fallback:
            break
        name = resolve_precision_name(name).falls_to
    raise _build_refusal(asked, device, rungs[0].reason)


def _consider_precision(name: str, asked: str, device: Device, fallback: bool) -> ConsideredPrecision:
    can = find_format_support(device, resolve_precision_name(name).needs)
    # A recipe in bf16 is for many devices and takes what each has; fp16 on a CPU is requested to study fp16.
    emulated = name == asked and can.emulated and (not fallback or (name == "fp16" and device.kind == "cpu"))
    return ConsideredPrecision(
        name, can.native or emulated, f"requested by name, but slow here: {can.reason}" if emulated else can.reason
    )


def _build_findings(asked: str, rungs: list[ConsideredPrecision], device: Device) -> tuple[Finding, ...]:
    took = rungs[-1].name
    if took != asked:
        evidence = f"{took} is used instead of {asked} on {device.name}: {rungs[0].reason}"
        fix = f"request {took}; or, for an error instead, set train.strict=true (in Python: omit fallback=True)"
        return (Finding(_SUBSTITUTED, "warning", evidence, fix),)
    can = find_format_support(device, resolve_precision_name(took).needs)
    if not can.native:
        native = " or ".join(["auto", *_list_native(device)])
        fix = f"request {native}, unless you study the numerics of {took}"
        return (Finding(_SLOW, "warning", f"{took} is slow on {device.name}: {can.reason}", fix),)
    return ()


def _decide_sixteen_bits(device: Device, fallback: bool) -> PrecisionDecision:
    """Choose the 16-bit format that the device has, bf16 first; without any, fp32 with a finding, or a refusal."""
    decision = _decide_by_table(device, _SIXTEEN_BITS)
    if decision.name != _FLOOR:
        return decision
    why = "; ".join(rung.reason for rung in decision.rungs if not rung.accepted)
    if not fallback:
        raise _build_refusal(AMP, device, why)
    evidence = f"{_FLOOR} is used instead of {AMP} on {device.name}: {why}"
    return PrecisionDecision(decision.rungs, (Finding(_SUBSTITUTED, "warning", evidence, f"write precision={_FLOOR}"),))


def _decide_by_table(device: Device, preferred: tuple[str, ...]) -> PrecisionDecision:
    """Choose the first preferred format that the device supports, where nothing was measured, or fp32."""
    rungs: list[ConsideredPrecision] = []
    for name in (*preferred, _FLOOR):
        can = find_format_support(device, name)
        rungs.append(ConsideredPrecision(name, can.native, can.reason))
        if can.native:
            break
    return PrecisionDecision(tuple(rungs))


def _decide_by_speed(device: Device, measured: Measurements) -> PrecisionDecision:
    """Choose the fastest native format that is worth it; a tie goes to bf16."""
    native = {name: find_format_support(device, name) for name in _PREFERRED}
    speeds = {name: measured.combined(name) or 0.0 for name, can in native.items() if can.native}
    winner = _select_fastest({name: speed for name, speed in speeds.items() if speed >= WORTH_IT})
    rungs = [
        ConsideredPrecision(
            name, name == winner, _describe_worth(name, winner, speeds, measured) if can.native else can.reason
        )
        for name, can in native.items()
    ]
    if winner == _FLOOR:
        rungs.append(ConsideredPrecision(_FLOOR, True, f"no narrower native format is at least {WORTH_IT}x as fast"))
    return PrecisionDecision(tuple(rungs))


def _select_fastest(speeds: Mapping[str, float]) -> str:
    if not speeds:
        return _FLOOR
    fastest = max(speeds, key=lambda name: speeds[name])
    if fastest == "fp16" and speeds.get("bf16", 0.0) >= AS_GOOD * speeds[fastest]:
        return "bf16"
    return fastest


def _describe_worth(name: str, winner: str, speeds: Mapping[str, float], measured: Measurements) -> str:
    if not speeds[name]:
        return measured.failures.get(name) or "it was not measured"
    parts = ", ".join(f"{op} {ratio:.2f}x" for op, ratio in measured.speedups[name].items())
    words = f"measured {speeds[name]:.2f}x strict fp32 ({parts})"
    if name == winner:
        return words
    if speeds[name] < WORTH_IT:
        return f"{words}, under {WORTH_IT}x"
    behind = speeds[winner] > speeds[name]
    return f"{words}, {winner} is faster" if behind else f"{words}, but {winner} is near and needs no loss scale"


def _list_native(device: Device) -> list[str]:
    return [
        name
        for name in list_precision_names()
        if find_format_support(device, resolve_precision_name(name).computes.name).native
    ]


def _build_refusal(asked: str, device: Device, reason: str) -> PrecisionRefused:
    can = _list_native(device)
    if asked == FP64 and can:
        do = "model.float() and one of these, or train on the CPU"
    elif can:
        do = f"request one of these, or auto, which chooses: precision={can[0]!r} or precision='auto'"
    else:
        do = "choose another device"
    return PrecisionRefused(
        f"{asked} on {device.name} is refused: {reason}",
        allowed=f"{', '.join(can)} on this device" if can else "a GPU or a CPU",
        do=do,
    )
