"""A case: the model, loss function and batch to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from halfstep.errors import WrongUse
from halfstep.measure.assumption import Assumption
from halfstep.measure.setting import StepSetting
from halfstep.observe.reachable import find_generators
from halfstep.precision.hardware import Device
from halfstep.precision.names import AMP, AUTO, parse_policy_name, parse_precision
from halfstep.precision.precision import PRECISIONS, Precision, resolve_precision_name
from halfstep.precision.select import choose_precision
from halfstep.random_state import preserve_random_state

LossFunction = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
SEED = 0


@dataclass(frozen=True)
class CaseData:
    """The source of batches, used where the cost of reading data is measured."""

    batches: Callable[[], Iterator[Any]]
    """Return an iterator over batches as training reads them, with its workers; each call starts a new pass."""
    read_batch: Callable[[], Any]
    """Read one batch in this process."""
    workers: int


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the default optimizer of a case: AdamW over the trainable parameters, fused unless one is complex."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, fused=all(p.is_floating_point() for p in trained) or None)


@dataclass(frozen=True)
class Case:
    """A model in host memory, its loss function, one batch, and the user's current setting."""

    name: str
    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    optimizer: MakeOptimizer = adamw
    data: Callable[[], CaseData] | None = None
    """Opens the full data source; None if this batch is all there is. Called only where reading is measured."""
    setting: StepSetting = field(default_factory=StepSetting)
    average: bool = False
    """Whether an average of the weights is kept in memory too."""
    compiled: bool = False
    """Whether a part of the model, or the loss function, was given to torch.compile before it was described."""
    assumptions: tuple[Assumption, ...] = ()
    """The assumptions behind the case."""
    is_recipe: bool = False
    """Whether a recipe chose the setting; in a case of the user's own it is the default, and nobody's choice."""

    def open(self) -> Case:
        """Return the case itself, as a `Subject` returns its case."""
        return self

    @property
    def requested_precision(self) -> str:
        """The recipe's precision; `auto` for a case of the user's own."""
        return self.setting.precision if self.is_recipe else AUTO


def build_case(model: nn.Module, loss_fn: LossFunction, batch: Any, *, name: str = "model") -> Case:
    """Return a case made of the user's own objects.

    With a DataLoader as `batch`, the first batch is measured and the loader is the data source. Raises `WrongUse` if
    the loader yields no batch, or if the model has no trainable parameter.
    """
    if isinstance(batch, DataLoader):
        # A DataLoader draws a base seed from torch's generator when its iterator is created, its sampler draws from its
        # own, and a data set from any.
        with preserve_random_state(objects=find_generators(batch)):
            first = next(iter(batch), None)
        if first is None:
            raise WrongUse(
                f"{name} has a DataLoader that yields no batch",
                allowed="one batch or more",
                do="check its dataset, its batch_size and its drop_last",
            )
        return check_case_trainable(Case(name, model, loss_fn, first, data=partial(_build_loader_data, batch)))
    return check_case_trainable(Case(name, model, loss_fn, batch))


def check_case_trainable(case: Case) -> Case:
    """Return the case; raise `WrongUse` if none of its parameters requires a gradient."""
    if not any(parameter.requires_grad for parameter in case.model.parameters()):
        raise WrongUse(
            f"{case.name} has no trainable parameter",
            allowed="a model with at least one parameter that requires a gradient",
            do="leave some of it unfrozen: parameter.requires_grad_(True), or less in model.freeze",
        )
    return case


def resolve_precision(name: str, device: Device | torch.device) -> Precision:
    """Return the precision of a name; `auto` and `amp` are those that a run would use on the device.

    Others are returned whether or not the device has them natively.
    """
    known = parse_precision(name).name
    if parse_policy_name(known)[0] in PRECISIONS:
        return resolve_precision_name(known)
    return choose_precision(known, device=device, fallback=known == AMP).precision


def _build_loader_data(loader: DataLoader[Any]) -> CaseData:
    # Read through the dataset directly: iterating the loader would start its workers and measure them too.
    def read_batch() -> Any:
        numbers, collate, dataset = loader.batch_sampler, cast("Any", loader.collate_fn), cast("Any", loader.dataset)
        if isinstance(dataset, IterableDataset):
            stream = iter(dataset)
            return collate(next(stream) if loader.batch_size is None else list(islice(stream, loader.batch_size)))
        if numbers is None:  # batch_size=None: each sample is a batch
            return collate(dataset[next(iter(loader.sampler))])
        wanted: list[int] = list(next(iter(numbers)))
        together = getattr(dataset, "__getitems__", None)
        return collate(together(wanted) if together else [dataset[number] for number in wanted])

    return CaseData(lambda: iter(loader), read_batch, loader.num_workers)
