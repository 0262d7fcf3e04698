"""halfstep: mixed precision training for PyTorch that you can trust.

Every training step is a transaction: it happens completely, in the precision you asked for, or not at all, and it
says why.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.errors import HalfstepError as HalfstepError
    from halfstep.finding import Finding as Finding
    from halfstep.guard.guardian import Guardian as Guardian
    from halfstep.guard.last_step import diagnose as diagnose
    from halfstep.guard.limits import Limits as Limits
    from halfstep.guard.meters.meters import Meters as Meters
    from halfstep.measure.audit.audit import audit as audit
    from halfstep.measure.bench.bench import bench as bench
    from halfstep.measure.memory.estimate import estimate as estimate
    from halfstep.measure.plan.plan import plan as plan
    from halfstep.measure.profiling.profile import profile as profile
    from halfstep.measure.survival import survival as survival
    from halfstep.observe.watch import Observation as Observation
    from halfstep.precision.island import island as island
    from halfstep.precision.ladder import choose_precision as choose_precision
    from halfstep.precision.precision import Precision as Precision
    from halfstep.precision.precision import widen as widen
    from halfstep.step.loss_scale import DynamicScale as DynamicScale
    from halfstep.step.loss_scale import StaticScale as StaticScale
    from halfstep.step.report import Guard as Guard
    from halfstep.step.report import StepReport as StepReport
    from halfstep.step.riders import Ema as Ema
    from halfstep.step.transaction import Stepper as Stepper
    from halfstep.step.window import Window as Window
    from halfstep.step.window import windows as windows
    from halfstep.tasks._fit import fit as fit
    from halfstep.train.run import Run as Run
    from halfstep.train.task import Task as Task

__version__ = "0.1.0"

# Names are looked up when first used, so that `halfstep --help` does not wait for torch.
_HOMES = {
    "DynamicScale": "step.loss_scale",
    "Ema": "step.riders",
    "Finding": "finding",
    "Guard": "step.report",
    "Guardian": "guard.guardian",
    "HalfstepError": "errors",
    "Limits": "guard.limits",
    "Meters": "guard.meters.meters",
    "Observation": "observe.watch",
    "Precision": "precision.precision",
    "StaticScale": "step.loss_scale",
    "Run": "train.run",
    "StepReport": "step.report",
    "Stepper": "step.transaction",
    "Task": "train.task",
    "Window": "step.window",
    "audit": "measure.audit.audit",
    "bench": "measure.bench.bench",
    "choose_precision": "precision.ladder",
    "diagnose": "guard.last_step",
    "estimate": "measure.memory.estimate",
    "fit": "tasks._fit",
    "island": "precision.island",
    "plan": "measure.plan.plan",
    "profile": "measure.profiling.profile",
    "survival": "measure.survival",
    "widen": "precision.precision",
    "windows": "step.window",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"halfstep.{_HOMES[name]}"), name)
    except ImportError as error:
        from halfstep.errors import missing_extra

        raise missing_extra(error) or error from error


def __dir__() -> list[str]:
    return [*globals(), *__all__]
