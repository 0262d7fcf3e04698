"""The audit: report the formats in which a model is stored, computed and saved, and the mistakes in its values."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, WrongUse
from halfstep.finding import Finding
from halfstep.formats import is_narrow
from halfstep.measure.audit.page import Audit
from halfstep.measure.audit.report import LEAST_HEADROOM, IslandVerdict, build_module_rows, judge_island
from halfstep.measure.audit.watched import Listeners, ObservedStep, run_watched_step
from halfstep.measure.case import SEED, Case, LossFunction, resolve_precision
from halfstep.measure.memory.devices import Target, device_named
from halfstep.measure.memory.estimate import clear_fake_constants, mock_gpu
from halfstep.measure.memory.fake_tensors import (
    FakeCandidate,
    build_fake_case,
    create_fake_mode,
    describe_error_with_line,
    refuse_number_reads,
    replace_torch_backward,
)
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Measurable, Settings, resolve_subject
from halfstep.measure.survival import survival
from halfstep.measure.survival_report import Survival, describe_overflow, name_module
from halfstep.numbers import format_number
from halfstep.observe.emulate import BACKWARD, OverflowEvent
from halfstep.observe.lint.calls import LossFunctionCalls
from halfstep.observe.lint.listener import PlacedFinding
from halfstep.observe.reachable import find_generators
from halfstep.observe.recorder import Recorder
from halfstep.precision.hardware import list_device_types
from halfstep.precision.island import find_islands
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.random_state import preserve_random_state, use_seeded_generators
from halfstep.status_line import OnProgress

_DEVICE = "cuda"
_WHY = "a device of another machine is traced without any"


def trace_fake_step(make_case: Callable[[], Case], precision: Precision) -> ObservedStep:
    """Return the formats chosen by CUDA's autocast, forward and backward. Nothing is computed."""
    mode = create_fake_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without storage and about the missing driver
        case = clear_fake_constants(build_fake_case(make_case, mode))
        drawn = use_seeded_generators(SEED, objects=find_generators(case.loss_fn, case.batch))
        with drawn, mode, mock_gpu(), replace_torch_backward(), refuse_number_reads(_WHY):
            calls: list[Any] = []

            def recorded(model: nn.Module, batch: Any) -> Any:
                with LossFunctionCalls(_DEVICE, lambda *words: calls.append(words)):
                    return case.loss_fn(model, batch)

            recording = replace(case, loss_fn=recorded)
            candidate = FakeCandidate(recording, StepSetting(), precision, torch.device(_DEVICE))
            listeners, stopped = Listeners(candidate.model, precision), None
            try:
                with Recorder(candidate.model, listeners) as recorder, listeners.works.keeping(lambda: recorder.module):
                    candidate.step()
            except Exception as error:
                # An error that a finding explains ends the step, but not the audit.
                if not calls:
                    raise
                stopped = describe_error_with_line(error)
            finally:
                # Cached casts are fake tensors, which must not be reused outside this mode.
                torch.clear_autocast_cache()
            for finding, module, line in calls:
                listeners.lint.emit(finding, module, line)
            return listeners.watched(stopped=stopped)


_TOLD_BY_LINT = ("mask-overflows", "reduction-overflows")
_NAMED = 3
_ON_PURPOSE = 0.999
"""Share of the format's maximum. Larger values are taken as deliberate: masks are filled with the maximum itself."""


def find_unreported_overflow(watched: ObservedStep) -> OverflowEvent | None:
    """Return the first value that does not fit; None if lint reports it already."""
    if watched.ranges is None or watched.stopped is not None:
        return None
    event = watched.ranges.first_on_the_way_forward
    # After a non-finite loss, every gradient is non-finite.
    if event is None and not watched.fits and math.isfinite(watched.loss):
        event = watched.ranges.first_overflow.get(BACKWARD)
    return None if event is not None and event.module in list_lint_overflow_modules(watched) else event


def list_lint_overflow_modules(watched: ObservedStep) -> set[str]:
    """Return the modules in which lint found an overflow."""
    return {module for one in watched.spotted if one.finding.id in _TOLD_BY_LINT for module in one.modules}


def list_step_findings(watched: ObservedStep, precision: Precision) -> list[PlacedFinding]:
    """Return the findings about work in other formats, idle islands and little headroom."""
    found = []
    seen = watched.observation
    if seen.share is not None and not seen.as_asked:
        total = sum(seen.flops.values())
        worst = [f"{place} {part / total:.0%}" for place, part in list(seen.strays.items())[:_NAMED]]
        found.append(
            Finding(
                "work-elsewhere",
                "warning",
                f"{1 - seen.share:.0%} of the work is not in {seen.expected}: {', '.join(worst)}",
                "remove casts and autocast(enabled=False) there, or declare it: island(model, ...)",
            )
        )
    if watched.stopped is None:
        found += [
            Finding(
                "island-idle",
                "warning",
                f"nothing ran in the island {name_module(path)}: its weights may be used without calling it",
                "call the module, or make an island of the one that uses its weights",
            )
            for path in seen.idle_islands
        ]
    return [*map(_build_unplaced_finding, found), *_find_little_headroom(watched, precision)]


def build_overflow_finding(event: OverflowEvent, survival: Survival, declared: tuple[str, ...]) -> PlacedFinding:
    """Return the finding for an overflow, with the remedies that were tried."""
    do = " or ".join(survival.do) or "find what makes it so large: no island and no format fixes it"
    evidence = f"{survival.format} overflows {describe_overflow(event)}"
    # An island's output is cast back to the format of its input; here the value overflows in that cast.
    if event.module in declared and event.operation == "aten._to_copy":
        evidence += ", because the island casts its result back to the format of its input"
        do = f"extend the island to where its numbers are small again, or {do}"
    finding = Finding("overflow", "error", evidence, do)
    return PlacedFinding(finding, event.module, None, (event.module,))


def build_narrow_nonfinite_finding(survival: Survival) -> PlacedFinding:
    """Return the finding for a non-finite loss or gradient where every value fits."""
    do = (
        " or ".join(survival.do)
        or "check the batch and the weights: fp32 fails too, or divides by a number that vanished"
    )
    return _build_unplaced_finding(Finding("not-finite", "error", survival.verdict, do))


def build_wide_nonfinite_finding(precision: Precision, watched: ObservedStep) -> PlacedFinding:
    """Return the finding for a non-finite loss or gradient in a format that is not narrow."""
    what = "a gradient" if math.isfinite(watched.loss) else f"the loss ({watched.loss})"
    return _build_unplaced_finding(
        Finding(
            "not-finite",
            "error",
            f"{what} is not finite in {precision.name}: no narrow format is at fault",
            "check the batch, the weights and the loss; in a loop halfstep.diagnose(stepper, report) names the line",
        )
    )


def list_island_findings(verdicts: Iterable[IslandVerdict]) -> list[PlacedFinding]:
    """Return a note for each island that is not needed."""
    return [
        PlacedFinding(
            Finding(
                "island-not-needed",
                "note",
                f"the island {name_module(one.path)} costs speed and saves nothing here: {one.why}",
                "remove it and audit again, also on a batch from later in training",
            ),
            one.path,
            None,
            (one.path,),
        )
        for one in verdicts
        if one.needed is False
    ]


def _find_little_headroom(watched: ObservedStep, precision: Precision) -> list[PlacedFinding]:
    if watched.ranges is None or find_unreported_overflow(watched) is not None:
        return []
    limit = precision.computes.largest
    near = {
        module: numbers
        for (module, part), numbers in watched.ranges.by_place.items()
        if part != BACKWARD and 0 <= numbers.headroom < LEAST_HEADROOM and numbers.largest < _ON_PURPOSE * limit
    }
    if not near:
        return []
    module, numbers = min(near.items(), key=lambda pair: pair[1].headroom)
    more = f", and {len(near) - 1} more modules" if len(near) > 1 else ""
    finding = Finding(
        "little-headroom",
        "warning",
        f"{format_number(numbers.largest)} in {name_module(module)} against {format_number(limit)}: "
        f"{numbers.headroom:.1f} bits from the "
        f"end of {precision.name}{more}",
        f'island(model, "{module}")' if module and not module.startswith("(") else "scale it down, or use bf16",
    )
    return [PlacedFinding(finding, module, None, tuple(near))]


def _build_unplaced_finding(finding: Finding) -> PlacedFinding:
    return PlacedFinding(finding, "", None, ("",))


_ORDER = {"error": 0, "warning": 1, "note": 2}
ONE_STEP = "one step on one batch: value ranges may differ in later steps"


def audit(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    settings: Settings = (),
    precision: str | None = None,
    device: str | None = None,
    progress: OnProgress | None = None,
) -> Audit:
    """Record the formats in which one step runs, and check its islands and its number range.

    The model, the batch and the random state stay unchanged. Ctrl-C returns the results so far.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, for a model.
        settings: Settings that change the recipe.
        precision: The precision of the step.
        device: The device; if it is absent from this machine ("a100-80gb"), formats follow CUDA's rules and no values
            are known.
        progress: A callback for the progress.

    Returns:
        The audit: a row per module, and the findings.

    Raises:
        WrongUse: A model has no loss function, an absent device does not follow CUDA's rules, or the model cannot be
            traced without a GPU.
    """
    measured = resolve_subject(subject, loss_fn, batch, settings)
    name, make_case = measured.name, measured.open
    target = device_named(device or "here")
    here = list_device_types()
    # A model may be built again when it is copied.
    with preserve_random_state():
        if device is None or (target.device.kind in here and torch.device(target.device.place).type in here):
            return _LocalAudit(name, make_case(), target, precision, progress).audit()
        return _audit_absent_device(name, make_case, target, precision)


class _LocalAudit:
    """An audit that runs here, stage by stage, so that Ctrl-C keeps the results so far."""

    def __init__(
        self, name: str, case: Case, target: Target, precision: str | None, progress: OnProgress | None
    ) -> None:
        self.name, self.case, self.target = name, case, target
        self.device = torch.device(target.device.place)
        self.precision = resolve_precision(precision or case.requested_precision, self.device)
        dtype = self.precision.computes.dtype
        self.narrow = dtype is not None and is_narrow(dtype)
        self.declared = tuple(find_islands(case.model))
        self._progress = progress or (lambda done, of: None)
        self.watched: ObservedStep | None = None
        self.verdicts: list[IslandVerdict] = []
        self.more: list[PlacedFinding] = []

    def audit(self) -> Audit:
        """Run all stages and return the audit, with partial results after Ctrl-C."""
        interrupted = False
        try:
            self._look()
        except KeyboardInterrupt:
            interrupted = True
        return _build_audit(
            self.name,
            self.case,
            self.precision,
            self.watched,
            device=self.target.device.name,
            run=True,
            islands=tuple(self.verdicts),
            more=self.more,
            notes=self._notes(),
            interrupted=interrupted,
        )

    def _look(self) -> None:
        stages = 2 + len(self.declared) if self.narrow else 1
        self._progress(0, stages)
        self.watched = self._step()
        self._progress(1, stages)
        if self.watched.stopped is not None:
            return
        # Islands have no effect without a narrow format.
        if not self.narrow:
            if not self.watched.fits:
                self.more.append(build_wide_nonfinite_finding(self.precision, self.watched))
            return
        event, by_lint = find_unreported_overflow(self.watched), list_lint_overflow_modules(self.watched)
        if event is not None or not (self.watched.fits or by_lint):
            found = survival(self.case, format_name=self.precision.computes.name, device=self.device)
            self.more.append(
                build_narrow_nonfinite_finding(found)
                if event is None
                else build_overflow_finding(event, found, self.declared)
            )
        self._progress(2, stages)
        self._judge_islands(stages)

    def _judge_islands(self, stages: int) -> None:
        assert self.watched is not None
        if not self.declared:
            return
        reference = run_watched_step(self.case, self.device, resolve_precision_name("fp32"))
        for done, path in enumerate(self.declared, 1):
            # An idle island changes nothing, and has a separate finding.
            if path not in self.watched.observation.idle_islands:
                name = self.precision.computes.name
                self.verdicts.append(judge_island(path, name, self.watched, reference, lambda path: self._step(path)))
            self._progress(2 + done, stages)

    def _step(self, *without: str) -> ObservedStep:
        return run_watched_step(self.case, self.device, self.precision, without)

    def _notes(self) -> list[str]:
        notes = [f"run on this machine, under the rules of {self.device.type.upper()} autocast", ONE_STEP]
        if self.narrow:
            notes.insert(1, "each result was computed in fp32 and rounded once, so that overflows are known")
        if self.declared and not self.narrow:
            notes.append(f"islands change nothing in {self.precision.name}")
        return notes


def _audit_absent_device(name: str, make_case: Callable[[], Case], target: Target, precision: str | None) -> Audit:
    if target.rules != "cuda":
        raise WrongUse(
            f"--device {target.id}, which is not on this machine",
            allowed="a device of this machine, or one that follows CUDA's rules, such as a100-80gb",
            do="leave --device out",
        )

    case = make_case()
    chosen = resolve_precision(precision or case.requested_precision, target.device)
    notes = ["by CUDA's rules, not run: formats as CUDA's autocast chooses them, without numbers"]
    watched, interrupted = None, False
    try:
        watched = trace_fake_step(lambda: case, chosen)
    except KeyboardInterrupt:
        interrupted = True
    except HalfstepError:
        raise
    except Exception as error:
        raise _untraceable_error(target, error) from error
    if find_islands(case.model):
        notes.append("islands were not judged: that needs numbers")
    return _build_audit(
        name, case, chosen, watched, device=target.device.name, run=False, islands=(), more=[], notes=notes,
        interrupted=interrupted,
    )  # fmt: skip


def _untraceable_error(target: Target, error: Exception) -> WrongUse:
    """Return the error for kernels that query the driver, such as cuDNN's recurrent layers or a custom extension."""
    reason = (str(error).splitlines() or [""])[0][:80] or type(error).__name__
    return WrongUse(
        f"CUDA's rules could not be followed for {target.id} without a GPU: {reason}",
        allowed="models whose operations can be described without a driver",
        do="leave --device out, for the CPU's rules",
    )


def _build_audit(
    name: str,
    case: Case,
    precision: Precision,
    watched: ObservedStep | None,
    *,
    device: str,
    run: bool,
    islands: tuple[IslandVerdict, ...],
    more: list[PlacedFinding],
    notes: list[str],
    interrupted: bool,
) -> Audit:
    flops: Counter[str] = Counter()
    for work in watched.works.values() if watched else ():
        flops.update(work.flops)
    seen = watched.observation if watched else None
    total = sum(flops.values())
    found = [*more, *(watched.spotted if watched else ())]
    found += [*(list_step_findings(watched, precision) if watched else ()), *list_island_findings(islands)]
    return Audit(
        subject=name,
        precision=precision.name,
        format=precision.computes.name,
        device=device,
        run=run,
        flops=dict(flops.most_common()),
        share=seen.share if seen else None,
        island_share=seen.island_flops / total if seen and total else 0.0,
        loss=watched.loss if watched and math.isfinite(watched.loss) else None,
        loss_scale=watched.scale if watched and precision.scaled and run and watched.gradients_finite else None,
        rows=build_module_rows(case.model, watched) if watched else (),
        islands=islands,
        spotted=tuple(sorted(found, key=lambda one: _ORDER[one.finding.severity])),
        notes=tuple(notes),
        interrupted=interrupted,
        stopped=watched.stopped if watched else None,
    )
