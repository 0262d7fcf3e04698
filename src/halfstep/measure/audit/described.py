"""The same step by CUDA's rules without a GPU: on tensors that are only described, so that no number is known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep.measure.audit.watched import Listeners, Watched
from halfstep.measure.case import Case
from halfstep.measure.memory.accelerator_rules import gpu_pretended, without_values
from halfstep.measure.memory.backward import walked
from halfstep.measure.memory.building import built, fake_mode
from halfstep.measure.memory.persons_error import in_one_line
from halfstep.measure.memory.refusal import numbers_refused
from halfstep.measure.memory.updates import FakeArm
from halfstep.measure.setting import Setting
from halfstep.observe.lint.calls import Calls
from halfstep.observe.recorder import Recorder
from halfstep.precision.precision import Precision

_DEVICE = "cuda"
_WHY = "a device that is not here is followed without computing any"


def described_step(make_case: Callable[[], Case], precision: Precision) -> Watched:
    """Formats as CUDA's autocast decides them, forward and backward. Nothing is computed."""
    mode = fake_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without memory, and a driver that is not here
        case = without_values(built(make_case, mode))
        with mode, gpu_pretended(), walked(), numbers_refused(_WHY):
            told: list[Any] = []
            arm = FakeArm(replace(case, loss_fn=_overheard(case.loss_fn, told)), Setting(), precision, _device())
            listeners, stopped = Listeners(arm.model, precision), None
            try:
                with Recorder(arm.model, listeners) as recorder, listeners.works.keeping(lambda: recorder.module):
                    arm.step()
            except Exception as error:
                if not told:
                    raise
                stopped = in_one_line(error)
            finally:
                torch.clear_autocast_cache()
            for finding, module, line in told:
                listeners.lint.tell(finding, module, line)
            return listeners.watched(stopped=stopped)


def _overheard(loss_fn: Callable[[nn.Module, Any], Any], told: list[Any]) -> Callable[[nn.Module, Any], Any]:
    def overheard(model: nn.Module, batch: Any) -> Any:
        with Calls(_DEVICE, lambda *words: told.append(words)):
            return loss_fn(model, batch)

    return overheard


def _device() -> torch.device:
    return torch.device(_DEVICE)
