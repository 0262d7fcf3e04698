"""Which settings a plan looks at: what the device has, what the model can be laid out in, how a batch can be split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfstep.measure.batches import size_of
from halfstep.measure.case import Case
from halfstep.measure.plan.cell import BASELINE_PRECISION, SIMPLEST_FIRST
from halfstep.measure.setting import Setting
from halfstep.precision.abilities import Ability, Device, ability

SPLITS = 2
"""How often a micro-batch is halved or doubled, at most."""


@dataclass(frozen=True)
class Facts:
    """What has to be known of a case before anything is measured."""

    name: str
    now: Setting
    """As the person runs it, with its batch in numbers."""
    has_images: bool
    """Some weights have four dimensions, so that they can be laid out with channels last."""
    has_batch_norm: bool
    optimizer: str
    learning_rate: float

    @property
    def samples(self) -> int:
        """In one update: what a plan leaves as it is."""
        return (self.now.batch or 1) * self.now.microbatches


def facts_of(case: Case) -> Facts:
    optimizer = case.optimizer(case.model)
    return Facts(
        name=case.name,
        now=replace(case.setting, batch=case.setting.batch or size_of(case.batch)),
        has_images=any(parameter.dim() == 4 for parameter in case.model.parameters()),
        has_batch_norm=_has_batch_norm(case.model),
        optimizer=type(optimizer).__name__,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
    )


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def abilities(device: Device) -> dict[str, Ability]:
    """What the device has of the precisions that a run can be in, simplest first."""
    return {name: ability(device, name) for name in SIMPLEST_FIRST}


def baseline_of(now: Setting) -> Setting:
    """Strict fp32, eager and plainly laid out, with the batch as it is now."""
    return Setting(BASELINE_PRECISION, batch=now.batch, microbatches=now.microbatches, recompute=now.recompute)


def eager_settings(baseline: Setting, device: Device, has_images: bool) -> list[Setting]:
    """All but the baseline, the most promising first: whenever time is up, what is likely to win has been seen."""
    native = [name for name, can in abilities(device).items() if can.native]
    layouts = [True, False] if has_images else [False]
    narrow = [name for name in ("bf16", "fp16", "tf32") if name in native]
    found = [replace(baseline, precision=name, channels_last=layout) for layout in layouts for name in narrow]
    return found + ([replace(baseline, channels_last=True)] if has_images else [])


def halved(setting: Setting) -> Iterator[Setting]:
    """The same update in more and smaller micro-batches."""
    batch, pieces = setting.batch or 1, setting.microbatches
    while batch % 2 == 0:
        batch, pieces = batch // 2, pieces * 2
        yield replace(setting, batch=batch, microbatches=pieces)


def doubled(setting: Setting) -> Iterator[Setting]:
    """The same update in fewer and larger micro-batches."""
    batch, pieces = setting.batch or 1, setting.microbatches
    while pieces % 2 == 0:
        batch, pieces = batch * 2, pieces // 2
        yield replace(setting, batch=batch, microbatches=pieces)
