"""halfstep: mixed precision training for PyTorch that you can trust.

Every training step is a transaction: it happens completely, in the precision you asked for, or not at all, and it
says why.
"""

from __future__ import annotations

# With underscores: completion by reading the source offers every other name of this file.
import importlib as _importlib
import importlib.util as _importlib_util
import typing as _typing
import warnings as _warnings

from halfstep._version import __version__ as __version__
from halfstep.measure.recipe_opener import RecipeOpener as _RecipeOpener
from halfstep.measure.recipe_opener import register_recipe_opener as _register_recipe_opener

if _importlib_util.find_spec("numpy") is None:
    # torch reports this when it is imported; the core needs no NumPy.
    _warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

if _typing.TYPE_CHECKING:
    from halfstep.adapters.accelerate import from_accelerate as from_accelerate
    from halfstep.adapters.grad_scaler import GradScaler as GradScaler
    from halfstep.adapters.watch import watch as watch
    from halfstep.doctor.report import doctor as doctor
    from halfstep.errors import HalfstepError as HalfstepError
    from halfstep.finding import Finding as Finding
    from halfstep.guard.diagnosis.diagnoser import diagnose as diagnose
    from halfstep.guard.guardian import Guardian as Guardian
    from halfstep.guard.monitors.monitors import Meters as Meters
    from halfstep.guard.streak import Limits as Limits
    from halfstep.measure.audit.audit import audit as audit
    from halfstep.measure.bench.bench import bench as bench
    from halfstep.measure.memory.estimate import estimate as estimate
    from halfstep.measure.plan.plan import plan as plan
    from halfstep.measure.profile.profile import profile as profile
    from halfstep.measure.survival import survival as survival
    from halfstep.observe.flops import Observation as Observation
    from halfstep.precision.island import island as island
    from halfstep.precision.precision import Precision as Precision
    from halfstep.precision.precision import widen as widen
    from halfstep.precision.select import choose_precision as choose_precision
    from halfstep.report.written import report as report
    from halfstep.runs.evaluate_run import evaluate as evaluate
    from halfstep.runs.export_run import export as export
    from halfstep.runs.export_run import export_sharded as export_sharded
    from halfstep.runs.fit import fit as fit
    from halfstep.runs.listing import runs as runs
    from halfstep.runs.load import load as load
    from halfstep.runs.replay import failed_steps as failed_steps
    from halfstep.runs.replay import replay as replay
    from halfstep.runs.verify import verify as verify
    from halfstep.step.ema import Ema as Ema
    from halfstep.step.loss import Counted as Counted
    from halfstep.step.loss import DynamicScale as DynamicScale
    from halfstep.step.loss import Out as Out
    from halfstep.step.loss import StaticScale as StaticScale
    from halfstep.step.report import Guard as Guard
    from halfstep.step.report import StepReport as StepReport
    from halfstep.step.stepper import Stepper as Stepper
    from halfstep.step.window import Window as Window
    from halfstep.step.window import windows as windows
    from halfstep.train.run import Run as Run
    from halfstep.train.task import Task as Task


# Names are looked up when first used, so that `halfstep --help` does not wait for torch.
_HOMES = {
    "Counted": "step.loss",
    "DynamicScale": "step.loss",
    "Ema": "step.ema",
    "Finding": "finding",
    "GradScaler": "adapters.grad_scaler",
    "Guard": "step.report",
    "Guardian": "guard.guardian",
    "HalfstepError": "errors",
    "Limits": "guard.streak",
    "Meters": "guard.monitors.monitors",
    "Observation": "observe.flops",
    "Out": "step.loss",
    "Precision": "precision.precision",
    "StaticScale": "step.loss",
    "Run": "train.run",
    "StepReport": "step.report",
    "Stepper": "step.stepper",
    "Task": "train.task",
    "Window": "step.window",
    "audit": "measure.audit.audit",
    "bench": "measure.bench.bench",
    "choose_precision": "precision.select",
    "diagnose": "guard.diagnosis.diagnoser",
    "doctor": "doctor.report",
    "estimate": "measure.memory.estimate",
    "evaluate": "runs.evaluate_run",
    "export": "runs.export_run",
    "export_sharded": "runs.export_run",
    "failed_steps": "runs.replay",
    "fit": "runs.fit",
    "from_accelerate": "adapters.accelerate",
    "island": "precision.island",
    "load": "runs.load",
    "plan": "measure.plan.plan",
    "profile": "measure.profile.profile",
    "replay": "runs.replay",
    "report": "report.written",
    "runs": "runs.listing",
    "survival": "measure.survival",
    "verify": "runs.verify",
    "watch": "adapters.watch",
    "widen": "precision.precision",
    "windows": "step.window",
}

__all__ = sorted(_HOMES)


def _load_recipe_opener() -> _RecipeOpener:
    from halfstep.runs.recipe_opener import TrainerRecipes

    return TrainerRecipes()


# The trainer stands on the library; only here, where every process starts, may the library learn of it.
_register_recipe_opener(_load_recipe_opener)


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    try:
        return getattr(_importlib.import_module(f"halfstep.{_HOMES[name]}"), name)
    except ImportError as error:
        from halfstep.errors import convert_import_error

        raise convert_import_error(error) or error from error


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
