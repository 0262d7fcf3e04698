"""`audit`: which format each part of a model is stored, computed and kept in, and which mistakes its numbers show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, WrongUse
from halfstep.formats import is_narrow
from halfstep.measure.audit import findings
from halfstep.measure.audit.islands import IslandVerdict, judged
from halfstep.measure.audit.report import Audit
from halfstep.measure.audit.rows import rows_of
from halfstep.measure.audit.watched import Watched, watched_step
from halfstep.measure.case import Case, LossFunction, Subject, case_of
from halfstep.measure.memory.devices import Target, device_named
from halfstep.measure.survival import survival
from halfstep.observe.lint.listener import Spotted
from halfstep.precision.abilities import Device
from halfstep.precision.hardware import present
from halfstep.precision.island import islands
from halfstep.precision.ladder import choose_precision
from halfstep.precision.names import AUTO, precision_names, read_precision
from halfstep.precision.precision import Precision
from halfstep.precision.registry import precision_named

Progress = Callable[[int, int], None]
_ORDER = {"error": 0, "warning": 1, "note": 2}
ONE_STEP = "one step on one batch: numbers of later steps may lie elsewhere"


def audit(
    subject: Subject | Case | nn.Module,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    precision: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Audit one step of a subject, of a case, or of a model with its loss and a batch; nothing of it is changed.

    `device` may be one that is not here ("a100-80gb"): then the formats are those of CUDA's rules, and no number is
    known. Ctrl-C ends it with what there is.
    """
    name, make_case = _opening(subject, loss_fn, batch)
    target = device_named(device or "here")
    if _is_here(target, device):
        return _Audited(name, make_case(), target, precision, progress).audit()
    return _described(name, make_case, target, precision)


def _opening(
    subject: Subject | Case | nn.Module, loss_fn: LossFunction | None, batch: Any
) -> tuple[str, Callable[[], Case]]:
    if isinstance(subject, Subject):
        return " ".join((subject.text, *subject.settings)), subject.open
    if isinstance(subject, Case):
        return subject.name, lambda: subject
    if loss_fn is None:
        raise WrongUse(
            f"audit({type(subject).__name__}) without a loss_fn and a batch",
            allowed="a model, loss_fn(model, batch) and a batch or a DataLoader; or a Subject",
            do="audit(model, loss_fn, batch)",
        )
    case = case_of(subject, loss_fn, batch)
    return case.name, lambda: case


def _is_here(target: Target, asked: str | None) -> bool:
    return asked is None or (target.device.kind in present() and torch.device(target.device.place).type in present())


def _precision(asked: str | None, case: Case, device: Device | torch.device) -> Precision:
    """The one asked for, else the recipe's own, else what a run would take on this device."""
    own = case.setting.precision if case.setting.precision != "fp32" or case.data is not None else AUTO
    name = read_precision(asked or own).name
    return precision_named(name) if name in precision_names() else choose_precision(name, device=device).precision


class _Audited:
    """A case that really runs here, stage by stage, so that Ctrl-C leaves what is known."""

    def __init__(self, name: str, case: Case, target: Target, precision: str | None, progress: Progress | None) -> None:
        self.name, self.case, self.target = name, case, target
        self.device = torch.device(target.device.place)
        self.precision = _precision(precision, case, self.device)
        dtype = self.precision.computes.dtype
        self.narrow = dtype is not None and is_narrow(dtype)
        self.declared = tuple(islands(case.model))
        self._progress = progress or (lambda done, of: None)
        self.watched: Watched | None = None
        self.verdicts: list[IslandVerdict] = []
        self.more: list[Spotted] = []

    def audit(self) -> Audit:
        interrupted = False
        try:
            self._look()
        except KeyboardInterrupt:
            interrupted = True
        return _audit(
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
        if not self.narrow or self.watched.stopped is not None:
            return
        event, told = findings.overflow(self.watched), findings.told_by_lint(self.watched)
        if event is not None or not (self.watched.fits or told):
            found = survival(self.case, format_name=self.precision.computes.name, device=self.device)
            self.more.append(
                findings.of_spoiled(found) if event is None else findings.of_overflow(event, found, self.declared)
            )
        self._progress(2, stages)
        self._judge_islands(stages)

    def _judge_islands(self, stages: int) -> None:
        assert self.watched is not None
        if not self.declared:
            return
        reference = watched_step(self.case, self.device, precision_named("fp32"))
        for done, path in enumerate(self.declared, 1):
            if path not in self.watched.observation.idle_islands:
                name = self.precision.computes.name
                self.verdicts.append(judged(path, name, self.watched, reference, lambda path: self._step(path)))
            self._progress(2 + done, stages)

    def _step(self, *without: str) -> Watched:
        return watched_step(self.case, self.device, self.precision, without)

    def _notes(self) -> list[str]:
        notes = [f"rules: {self.device.type.upper()} autocast, run here", ONE_STEP]
        if self.narrow:
            notes.insert(1, "each result was computed in fp32 and rounded once, so that what does not fit is known")
        if self.declared and not self.narrow:
            notes.append(f"islands change nothing in {self.precision.name}")
        return notes


def _described(name: str, make_case: Callable[[], Case], target: Target, precision: str | None) -> Audit:
    if target.rules != "cuda":
        raise WrongUse(
            f"--device {target.id}, which is not on this machine",
            allowed="a device that is here, or one that follows CUDA's rules, such as a100-80gb",
            do="leave --device out",
        )
    from halfstep.measure.audit.described import described_step

    case = make_case()
    chosen = _precision(precision, case, target.device)
    notes = ["by CUDA's rules, not run: formats are as its autocast decides them, and no number is known"]
    watched, interrupted = None, False
    try:
        watched = described_step(lambda: case, chosen)
    except KeyboardInterrupt:
        interrupted = True
    except HalfstepError:
        raise
    except Exception as error:
        raise _not_followed(target, error) from error
    if islands(case.model):
        notes.append("whether islands are needed was not judged: that takes numbers")
    return _audit(
        name, case, chosen, watched, device=target.device.name, run=False, islands=(), more=[], notes=notes,
        interrupted=interrupted,
    )  # fmt: skip


def _not_followed(target: Target, error: Exception) -> WrongUse:
    """Kernels that ask the driver before they run: a recurrent layer of cuDNN, an extension of someone's own."""
    reason = (str(error).splitlines() or [""])[0][:80] or type(error).__name__
    return WrongUse(
        f"CUDA's rules could not be followed for {target.id} without a GPU: {reason}",
        allowed="models whose operations can be described without a driver",
        do="leave --device out, for the CPU's rules",
    )


def _audit(
    name: str,
    case: Case,
    precision: Precision,
    watched: Watched | None,
    *,
    device: str,
    run: bool,
    islands: tuple[IslandVerdict, ...],
    more: list[Spotted],
    notes: list[str],
    interrupted: bool,
) -> Audit:
    flops: Counter[str] = Counter()
    for work in watched.works.values() if watched else ():
        flops.update(work.flops)
    seen = watched.observation if watched else None
    total = sum(flops.values())
    found = [*more, *(watched.spotted if watched else ())]
    found += [*(findings.of_the_step(watched, precision) if watched else ()), *findings.of_islands(islands)]
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
        rows=rows_of(case.model, watched) if watched else (),
        islands=islands,
        spotted=tuple(sorted(found, key=lambda one: _ORDER[one.finding.severity])),
        notes=tuple(notes),
        interrupted=interrupted,
        stopped=watched.stopped if watched else None,
    )
