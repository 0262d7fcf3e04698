"""How much memory a step will take, without taking it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.measure.batches import bytes_of, size_of, tensors
from halfstep.measure.case import Case, LossFunction, MakeOptimizer, case_of
from halfstep.measure.memory.building import built, fake_mode
from halfstep.measure.memory.covered import not_covered
from halfstep.measure.memory.ledger import Ledger, Note
from halfstep.measure.memory.notes import notes_of
from halfstep.measure.memory.reading import by_format, by_module, read
from halfstep.measure.memory.refusal import numbers_refused
from halfstep.measure.memory.updates import FakeArm
from halfstep.measure.setting import Setting
from halfstep.precision.ladder import choose_precision
from halfstep.precision.names import precision_names, read_precision
from halfstep.precision.precision import Precision
from halfstep.precision.registry import precision_named

_VERIFIED = ("fp32", "bf16")
"""Held against real runs on a CPU by benchmarks/estimate_accuracy.py, which leaves all else in a setting plain."""


def estimate(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    precision: str = "bf16",
    batch_size: int | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    recompute: bool = False,
    channels_last: bool = False,
    microbatches: int = 1,
    device: str | None = None,
) -> Ledger:
    """The ledger of one update of your model; nothing of it is run, touched or copied.

    `optimizer` is yours, or a function that makes one from a model; without it, fused AdamW. `device` is one that need
    not be here ("a100-80gb", "rtx4090", "24GB"); without it, this machine's CPU.
    """
    if microbatches < 1 or (batch_size is not None and batch_size < 1):
        given = f"batch_size={batch_size}, microbatches={microbatches}"
        raise WrongUse(given, allowed="1 or more of each", do="leave them out to take the batch as it is")
    case = case_of(model, loss_fn, batch)
    if optimizer is not None:
        case = replace(case, optimizer=_like(optimizer, model))
    setting = Setting(precision, channels_last, False, batch_size, microbatches, recompute)
    if device is None:
        return ledger_of(lambda: case, setting)
    from halfstep.measure.memory.accelerator_rules import ledger_on
    from halfstep.measure.memory.devices import device_named

    return ledger_on(lambda: case, setting, device_named(device))


def ledger_of(make_case: Callable[[], Case], setting: Setting, device: torch.device | str = "cpu") -> Ledger:
    """The ledger of an update after the first one, when the optimizer has its state. Two are run, on fake tensors."""
    device, mode = torch.device(device), fake_mode()
    precision = _precision(setting.precision, device)
    case = built(make_case, mode)
    with mode, numbers_refused():
        arm = FakeArm(case, setting, precision, device)
        with arm.recorder():
            arm.step()
            since = arm.timeline.now
            arm.step()
        beside = _beside(arm, case)
    reading = read(arm.timeline, since)
    at_peak = _more(reading.at_peak, beside)
    remarks = notes_of(setting, precision, device, at_peak, _more(reading.wide, beside))
    if arm.timeline.not_covered and _could_be_verified(setting, precision, device):
        remarks = (*remarks, Note(not_covered(arm.timeline.not_covered), only_here=True))
    return Ledger(
        setting=setting,
        device=str(device),
        samples=size_of(arm.batch),
        at_peak=at_peak,
        whole=_more(reading.whole, beside),
        by_format=by_format(arm.timeline.kept),
        by_module=by_module(arm.timeline.kept),
        moment=str(reading.moment),
        verified=_could_be_verified(setting, precision, device) and not arm.timeline.not_covered,
        remarks=remarks,
    )


def _precision(asked: str, device: torch.device) -> Precision:
    """The one that was asked for, whether or not the device has it natively."""
    name = read_precision(asked).name
    return precision_named(name) if name in precision_names() else choose_precision(name, device=device).precision


def _could_be_verified(setting: Setting, precision: Precision, device: torch.device) -> bool:
    plain = setting == Setting(precision.name, batch=setting.batch)
    return device.type == "cpu" and plain and precision.name in _VERIFIED


def _beside(arm: FakeArm, case: Case) -> dict[str, int]:
    """What a run keeps beside an update's own: an average, copies of buffers to take it back, the window's batches."""
    model = arm.model
    average = [*model.parameters(), *model.buffers()] if case.average else []
    return {
        "average": bytes_of(average),
        "buffers": bytes_of(model.buffers()),
        "batch": bytes_of(tensors(arm.batch)) * (arm.microbatches - 1),
    }


def _more(sizes: Mapping[str, int], beside: Mapping[str, int]) -> dict[str, int]:
    return {part: sizes.get(part, 0) + beside.get(part, 0) for part in (*sizes, *(set(beside) - set(sizes)))}


def _like(optimizer: MakeOptimizer | torch.optim.Optimizer, model: nn.Module) -> MakeOptimizer:
    """A function that makes a fake model's optimizer: like this one, with its groups and options, without state."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def make(fake: nn.Module) -> torch.optim.Optimizer:
        fakes = dict(fake.named_parameters())
        # What deepcopy finds in its memo it does not copy. Parameters that are not the model's get no gradient here.
        memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter))
            memo[id(parameter)] = torch.empty_like(parameter) if name is None else fakes[name]
        twin = copy.deepcopy(optimizer, memo)
        # Copies lose what a class keeps beside groups and state. A step that a schedule put there is the real one's.
        for name, value in vars(optimizer).items():
            if name not in vars(twin) and name != "step":
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    return make
