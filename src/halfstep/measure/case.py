"""What is measured: a model, its loss and a batch. A person's own code, or what a recipe says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from halfstep.errors import WrongUse
from halfstep.measure.setting import Setting

LossFunction = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_OWN_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
SEED = 0


@dataclass(frozen=True)
class Data:
    """Where batches come from, for those who measure what reading them costs."""

    batches: Callable[[], Iterator[Any]]
    """Batches as training reads them, with its workers; a new pass at each call."""
    read_batch: Callable[[], Any]
    """One batch, read in this process."""
    workers: int


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a case that brings none."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


@dataclass(frozen=True)
class Case:
    """A model in the main memory, its loss, one batch, and how the person runs it now."""

    name: str
    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    optimizer: MakeOptimizer = adamw
    data: Callable[[], Data] | None = None
    """Where there is more data than this batch; opened only by those who need it."""
    setting: Setting = field(default_factory=Setting)
    average: bool = False
    """An average of the weights is kept beside them."""


@dataclass(frozen=True)
class Subject:
    """What a command was given, as words: whatever process opens it gets the same case."""

    text: str
    """RECIPE, or `module:callable`."""
    settings: tuple[str, ...] = ()
    """Changes of the recipe, as they were typed."""

    @property
    def is_own_code(self) -> bool:
        return _OWN_CODE.fullmatch(self.text) is not None

    def open(self) -> Case:
        """The case, with the same random weights each time. Random numbers of the caller are not touched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            if not self.is_own_code:
                from halfstep.measure.recipe_case import case_of_recipe

                return case_of_recipe(self.text, self.settings)
            if self.settings:
                raise WrongUse(
                    f"{' '.join(self.settings)} beside the case {self.text}",
                    allowed="settings change a RECIPE; a case is as its code says",
                    do="change the code, or leave them out",
                )
            return _called(self.text)


def case_of(model: nn.Module, loss_fn: LossFunction, batch: Any, *, name: str = "model") -> Case:
    """A case from a person's own objects; a DataLoader as the batch is data to be read, too."""
    if isinstance(batch, DataLoader):
        return Case(name, model, loss_fn, next(iter(batch)), data=partial(_data_of, batch))
    return Case(name, model, loss_fn, batch)


def _called(text: str) -> Case:
    make = _imported(text)
    made = make()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        shape = (
            f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        )
        raise WrongUse(
            f"{text} returned {shape}",
            allowed="(model, loss_fn, batch): a torch module, a function of both, and tensors or a DataLoader",
            do=f"end {text.split(':')[1]} with `return model, loss_fn, batch`",
        )
    return case_of(*made, name=text)


def _imported(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # code beside which the command was typed
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise WrongUse(
            f"there is no module {error.name!r} here, for the case {text}",
            allowed="module:callable, importable from this folder",
            do="go to the folder that holds it, or install its package; for a recipe see `halfstep recipes`",
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            names = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise WrongUse(
                f"{module_name} has no {name!r}",
                allowed=", ".join(names[:10]) or "a function without arguments",
                do=f"halfstep ... {module_name}:{names[0]}" if names else f"define {name}() in {module_name}",
            )
        found = getattr(found, name)
    if not callable(found):
        raise WrongUse(f"{text} is a {type(found).__name__}", allowed="a function without arguments", do="name one")
    return found  # type: ignore[no-any-return]


def _data_of(loader: DataLoader[Any]) -> Data:
    def read_batch() -> Any:
        sampler: Iterable[Sequence[int]] | None = loader.batch_sampler
        if sampler is None:  # samples come as batches, or from a stream
            return next(iter(loader))
        collate: Any = loader.collate_fn
        return collate([loader.dataset[number] for number in next(iter(sampler))])

    return Data(lambda: iter(loader), read_batch, loader.num_workers)
