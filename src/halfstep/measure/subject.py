"""The subject of a command as text: a RECIPE, or `module:callable` in the user's own code."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfstep.errors import HalfstepError, WrongUse, missing_extra
from halfstep.measure.case import SEED, Case, case_of, trainable
from halfstep.user_code import NO_FILE, lines_outside, place

_OWN_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Subject:
    """The subject of a command as text, so that every process that opens it gets the same case."""

    text: str
    """A RECIPE, or `module:callable`."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe, as typed."""

    @property
    def is_own_code(self) -> bool:
        return _OWN_CODE.fullmatch(self.text) is not None

    def open(self) -> Case:
        """Return the case, with the same random weights each time; the caller's random state is restored.

        Raises `WrongUse` if settings are given with `module:callable`, or if the user's code does not return a case.
        """
        # devices=[]: models are built on the CPU; the default would fork the generators of all CUDA devices.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            if not self.is_own_code:
                # Imported here: a case of the user's own must not need the trainer's packages.
                from halfstep.measure.recipe_case import case_of_recipe

                return trainable(case_of_recipe(self.text, self.settings))
            if self.settings:
                raise WrongUse(
                    f"{' '.join(self.settings)} beside the case {self.text}",
                    allowed="settings change a RECIPE; a case is as its code says",
                    do="change the code, or leave them out",
                )
            return _called(self.text)


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
    """Re-raise an error of the user's code as `WrongUse` with its line; halfstep's own errors pass through."""
    try:
        yield
    except Exception as error:
        # A missing extra of halfstep passes, too: its message says what to install.
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
        # Only the named module and its parents: a failing import inside the user's module is the user's error.
        return isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")

    return is_missing


def _line_of(error: Exception) -> str:
    """Return file:line of the deepest frame outside torch, the standard library and halfstep."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = lines_outside(error, *installed, str(Path(__file__).parent), NO_FILE)
    return place((own or lines_outside(error))[-1])


def _imported(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # the current folder: a console script does not have it on its path
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
