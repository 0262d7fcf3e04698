"""What is measured: a model, its loss and a batch. A person's own code, or what a recipe says."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from halfstep.errors import HalfstepError, WrongUse, missing_extra
from halfstep.measure.code_lines import NO_FILE, lines_outside, place
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

                return _trainable(case_of_recipe(self.text, self.settings))
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
        with torch.random.fork_rng(devices=[]):
            first = next(iter(batch), None)
        if first is None:
            raise WrongUse(
                f"{name} has a DataLoader that gives no batch",
                allowed="one batch or more",
                do="look at its dataset, its batch_size and its drop_last",
            )
        return _trainable(Case(name, model, loss_fn, first, data=partial(_data_of, batch)))
    return _trainable(Case(name, model, loss_fn, batch))


def _trainable(case: Case) -> Case:
    if not any(parameter.requires_grad for parameter in case.model.parameters()):
        raise WrongUse(
            f"{case.name} has no parameter that is trained",
            allowed="a model with at least one parameter that requires a gradient",
            do="leave some of it unfrozen: parameter.requires_grad_(True), or less in model.freeze",
        )
    return case


def _called(text: str) -> Case:
    make = _imported(text)
    with _own_code(text):
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


@contextmanager
def _own_code(text: str, passes: Callable[[BaseException], bool] = lambda _: False) -> Iterator[None]:
    """What a person's code raises is told with the line that it comes from; what is halfstep's own passes."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, HalfstepError) or (isinstance(error, ImportError) and missing_extra(error))
        if is_ours or passes(error):
            raise
        words = str(error).strip().partition("\n")[0]
        module, _, name = text.partition(":")
        raise WrongUse(
            f"{text} raised {type(error).__name__}: {words} ({_line_of(error)})",
            allowed="a function without arguments that returns (model, loss_fn, batch)",
            do=f'mend it; all of the error: python -c "import {module} as m; m.{name}()"',
        ) from error


def _is_missing(module_name: str) -> Callable[[BaseException], bool]:
    def is_missing(error: BaseException) -> bool:
        return isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")

    return is_missing


def _line_of(error: Exception) -> str:
    """The deepest line that is neither torch's, nor Python's, nor ours: file:line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = lines_outside(error, *installed, str(Path(__file__).parent), NO_FILE)
    return place((own or lines_outside(error))[-1])


def _imported(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # code beside which the command was typed
    try:
        with _own_code(text, passes=_is_missing(module_name)):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WrongUse(
            f"there is no module {error.name!r} here, for the case {text}",
            allowed="module:callable, importable from this folder",
            do="go to the folder that holds it, or install its package; for a recipe see `halfstep recipes`",
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            names = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == module_name]
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
        numbers, collate, dataset = loader.batch_sampler, cast("Any", loader.collate_fn), cast("Any", loader.dataset)
        if isinstance(dataset, IterableDataset):
            stream = iter(dataset)
            return collate(next(stream) if loader.batch_size is None else list(islice(stream, loader.batch_size)))
        if numbers is None:  # each sample is a batch
            return collate(dataset[next(iter(loader.sampler))])
        wanted: list[int] = list(next(iter(numbers)))
        together = getattr(dataset, "__getitems__", None)
        return collate(together(wanted) if together else [dataset[number] for number in wanted])

    return Data(lambda: iter(loader), read_batch, loader.num_workers)
