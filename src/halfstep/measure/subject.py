"""The subject of a command as text: a RECIPE, or `module:callable` in the user's own code."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import torch
from torch import nn

from halfstep.errors import HalfstepError, WrongUse, convert_import_error
from halfstep.measure.case import SEED, Case, LossFunction, build_case, check_case_trainable
from halfstep.measure.recipe_opener import find_recipe_opener
from halfstep.random_state import build_seeded_states, preserve_random_state, restore_random_states
from halfstep.user_code import NO_FILE, format_line_place, list_lines_outside

_OWN_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Subject:
    """The subject of a command as text, so that every process that opens it gets the same case."""

    text: str
    """A RECIPE, or `module:callable`."""
    settings: tuple[str, ...] = ()
    """Changes to the recipe, as typed."""

    @property
    def name(self) -> str:
        """Return the subject as typed."""
        return " ".join((self.text, *self.settings))

    @property
    def is_own_code(self) -> bool:
        return _OWN_CODE.fullmatch(self.text) is not None

    def describe(self) -> Case:
        """Return the case as `open` does; the data of a recipe need not be here."""
        if self.is_own_code:
            return self.open()
        with _use_own_random_numbers():
            return check_case_trainable(find_recipe_opener().describe_case(self.text, self.settings))

    def open(self) -> Case:
        """Return the case, with the same random weights and batch each time; the caller's random state is restored.

        Raises `WrongUse` if settings are given with `module:callable`, or if the user's code does not return a case.
        """
        with _use_own_random_numbers():
            if not self.is_own_code:
                return check_case_trainable(find_recipe_opener().open_case(self.text, self.settings))
            if self.settings:
                raise _settings_error(self.settings, self.text)
            return _make_case(_import_callable(self.text), self.text)


Measurable: TypeAlias = "nn.Module | Callable[[], Any] | str | PurePath | Subject | Case"
"""What every tool takes first: a model, a case as a function or as `module:callable`, or a recipe by name or path."""
Settings: TypeAlias = "Mapping[str, Any] | Sequence[str]"
"""`{"train.batch_size": 4}`, or as on the command line: `["train.batch_size=4", "--bf16"]`."""


def resolve_subject(
    given: Measurable, loss_fn: LossFunction | None = None, batch: Any = None, settings: Settings = ()
) -> Subject | Case:
    """Return the subject of a measurement: a `Case` of live objects, or a `Subject` that any process can open.

    `settings` change a recipe. Raises `WrongUse` for a model without loss function and batch, for anything else with
    them, and for objects that are neither a model, a case nor a recipe.
    """
    words = [f"{key}={dumps(value)}" for key, value in settings.items()] if isinstance(settings, Mapping) else settings
    if isinstance(given, nn.Module):
        if loss_fn is None or batch is None:
            missing = " and ".join(name for name, value in (("loss_fn", loss_fn), ("batch", batch)) if value is None)
            raise WrongUse(
                f"the model {type(given).__name__} without {missing}",
                allowed="a model, loss_fn(model, batch) and a batch or a DataLoader; or module:callable; or a recipe",
                do="give all three: (model, loss_fn, batch)",
            )
        return _refuse_settings(build_case(given, loss_fn, batch), words)
    if loss_fn is not None or batch is not None:
        raise WrongUse(
            f"a loss_fn or a batch together with {describe_given_object(given)}",
            allowed="both with a torch module; a case and a recipe have their own",
            do="leave them out, or give the model first",
        )
    if isinstance(given, Subject):
        return Subject(given.text, (*given.settings, *words))
    if isinstance(given, Case):
        return _refuse_settings(given, words)
    if isinstance(given, str | PurePath):
        return Subject(str(given), tuple(words))
    if callable(given):
        name = f"{given.__module__}:{getattr(given, '__qualname__', type(given).__name__)}"
        # It may seed generators, as a script does.
        with preserve_random_state():
            return _refuse_settings(_make_case(given, name), words)
    raise WrongUse(
        f"{describe_given_object(given)} as the subject of a measurement",
        allowed="a model with loss_fn and batch, a case (module:callable), or a recipe by name or path",
        do="write a recipe to a .yaml file, and give its path" if isinstance(given, Mapping) else "name one of them",
    )


@contextmanager
def _use_own_random_numbers() -> Iterator[None]:
    with preserve_random_state():
        restore_random_states(build_seeded_states(SEED))
        # A case may be built on any accelerator.
        torch.manual_seed(SEED)
        yield


def describe_given_object(given: object) -> str:
    """Return a name, or the kind of an object."""
    return repr(str(given)) if isinstance(given, str | PurePath) else f"a {type(given).__name__}"


def _refuse_settings(case: Case, settings: Sequence[str]) -> Case:
    if settings:
        raise _settings_error(settings, case.name)
    return case


def _settings_error(settings: Sequence[str], name: str) -> WrongUse:
    return WrongUse(
        f"{' '.join(settings)} together with the case {name}",
        allowed="settings change a RECIPE; a case is defined by its code",
        do="change the code, or leave them out",
    )


def _make_case(make: Callable[[], Any], text: str) -> Case:
    with _convert_user_errors(text):
        made = make()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        shape = (
            f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        )
        raise WrongUse(
            f"{text} returned {shape}",
            allowed="(model, loss_fn, batch): a torch module, a function of both, and tensors or a DataLoader",
            do=f"end {text.rpartition(':')[2]} with `return model, loss_fn, batch`",
        )
    return build_case(*made, name=text)


@contextmanager
def _convert_user_errors(text: str, passes: Callable[[BaseException], bool] = lambda _: False) -> Iterator[None]:
    """Re-raise an error of the user's code as `WrongUse` with its line; halfstep's own errors pass through."""
    try:
        yield
    except Exception as error:
        # A missing extra of halfstep passes, too: its message says what to install.
        is_ours = isinstance(error, HalfstepError) or (isinstance(error, ImportError) and convert_import_error(error))
        if is_ours or passes(error):
            raise
        words = str(error).strip().partition("\n")[0]
        module, _, name = text.partition(":")
        raise WrongUse(
            f"{text} raised {type(error).__name__}: {words} ({_find_error_line(error)})",
            allowed="a function without arguments that returns (model, loss_fn, batch)",
            do=f'fix it; the full error: python -c "import {module} as m; m.{name}()"',
        ) from error


def _find_error_line(error: Exception) -> str:
    """Return file:line of the deepest frame outside torch, the standard library and halfstep."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    own = list_lines_outside(error, *installed, str(Path(__file__).parent), NO_FILE)
    return format_line_place((own or list_lines_outside(error))[-1])


def _import_callable(text: str) -> Callable[[], Any]:
    module_name, _, path = text.partition(":")
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # the current folder: a console script does not have it on its path

    def is_missing(error: BaseException) -> bool:
        # Only the named module and its parents: a failing import inside the user's module is the user's error.
        return isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")

    try:
        with _convert_user_errors(text, passes=is_missing):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise WrongUse(
            f"there is no module {error.name!r} here, for the case {text}",
            allowed="module:callable, importable from this folder",
            do="go to the folder that contains it, or install its package; for a recipe see `halfstep recipes`",
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
