"""Find tasks by name: files in `halfstep.tasks`, entry points of packages, or a file given on the command line."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import sys
import types
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from halfstep import tasks
from halfstep.errors import (
    Contradiction,
    HalfstepError,
    WrongUse,
    build_unknown_name_error,
    choose_caller_wording,
    convert_import_error,
)
from halfstep.tasks import options

if TYPE_CHECKING:
    from halfstep.train.task import Task

GROUP = "halfstep.tasks"
LARGEST_FILE = 2**20
"""The largest task file in bytes; a larger file is something else."""


def list_task_names() -> list[str]:
    """Return the names of all tasks a recipe may use."""
    return sorted({*_list_builtin_tasks(), *_list_installed_tasks()})


def find_task_class(name: str) -> type[Task]:
    """Return the task of this name. Raise `UnknownName`, or `Contradiction` where two packages define it."""
    own, installed = _list_builtin_tasks(), _list_installed_tasks()
    if name in own and name in installed:
        raise Contradiction(
            f"task {name!r} comes with halfstep, and with {_name_package(installed[name])}",
            allowed="one task per name",
            do=f"rename the entry point in {_name_package(installed[name])}, or uninstall it",
        )
    if name in own:
        return _import_task(name)
    if name in installed:
        return _check_task(installed[name].load(), f"the entry point {installed[name].value!r}")
    raise build_unknown_name_error("task", name, [*own, *installed])


def find_task_schema(name: str) -> Any:
    """Return the recipe schema of a task, without loading torch where its options have a file of their own."""
    module = import_task_options(name)
    return find_task_class(name).schema if module is None else module.SCHEMA


def build_task_schemas() -> dict[str, dict[str, object]]:
    """Return the JSON schema of every task, by its name."""
    from halfstep.recipe.explain import build_json_schema

    return {name: build_json_schema(find_task_schema(name)) for name in list_task_names()}


def import_task_options(name: str) -> Any:
    """Return the options module of a built-in task, which loads no torch; None for other tasks."""
    if (
        name in _list_builtin_tasks()
        and name not in _list_installed_tasks()
        and name in [m.name for m in pkgutil.iter_modules(options.__path__)]
    ):
        return importlib.import_module(f"{options.__name__}.{name}")
    return None


def load_task_file(path: str | Path) -> tuple[type[Task], str]:
    """Return the task in a user's file, and the SHA-256 of the source that was executed.

    Raise `WrongUse` if the file cannot be executed or does not define exactly one task.
    """
    path = Path(path)
    # Read once, so that the digest is that of the executed source even if the file changes meanwhile.
    text = _read_task_source(path)
    digest = hashlib.sha256(text).hexdigest()
    from halfstep.random_state import preserve_random_state

    # It may seed generators, as scripts do.
    with preserve_random_state():
        module = _execute_file(path, text, digest)
    return _find_module_task(module, str(path)), digest


def resolve_own_task(task: type[Task] | str | os.PathLike[str]) -> type[Task]:
    """Return a task of the user's own, given as its class or as the file that defines it."""
    return task if isinstance(task, type) else load_task_file(Path(task))[0]


def _find_module_task(module: types.ModuleType, where: str) -> type[Task]:
    """Return the one task a module defines; imported classes do not count."""
    found = [value for value in vars(module).values() if _is_task(value) and value.__module__ == module.__name__]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise WrongUse(
            f"{where} contains {len(found)} tasks ({names})",
            allowed="a file with exactly one class that derives from Task",
            do="write `class MyTask(Task)` in it, or leave one and move the others",
        )
    return _check_task(found[0], where)


def _list_builtin_tasks() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(tasks.__path__) if not m.ispkg and not m.name.startswith("_")]


def _list_installed_tasks() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in found and found[point.name].value != point.value:
            raise Contradiction(
                f"task {point.name!r} comes with {_name_package(found[point.name])}, and with {_name_package(point)}",
                allowed="one task per name",
                do="uninstall one of the two packages",
            )
        found[point.name] = point
    return found


def _name_package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def _import_task(name: str) -> type[Task]:
    try:
        module = importlib.import_module(f"{tasks.__name__}.{name}")
    except ImportError as error:
        # Only a missing package of an extra is the user's to install; any other ImportError is a bug.
        missing = convert_import_error(error)
        if missing is None:
            raise
        raise missing from error
    return _find_module_task(module, module.__name__)


def _is_task(value: object) -> TypeGuard[type[Task]]:
    from halfstep.train.task import Task

    return isinstance(value, type) and issubclass(value, Task)


def _check_task(found: object, where: str) -> type[Task]:
    if not _is_task(found):
        raise WrongUse(
            f"{where} gives {type(found).__name__}, not a task", allowed="a class that derives from Task", do="fix it"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if not missing and not hasattr(found, "metric"):
        missing = ["metric"]
    if missing:
        raise WrongUse(
            f"{found.__name__} in {where} lacks {', '.join(missing)}",
            allowed="a task with model, source, loss and metric",
            do="add the missing methods; docs/add-a-task.md has a complete example",
        )
    return found


def _read_task_source(path: Path) -> bytes:
    allowed = "a Python file of at most 1 MiB"
    if not path.is_file():
        raise WrongUse(
            f"no file at {path}",
            allowed=allowed,
            do=f"check the path given to {choose_caller_wording('--task', 'task=')}",
        )
    with path.open("rb") as file:
        # One byte more than allowed shows a larger file without reading all of it.
        text = file.read(LARGEST_FILE + 1)
    if path.suffix != ".py" or len(text) > LARGEST_FILE:
        raise WrongUse(f"{path} is not a task", allowed=allowed, do="give the .py file that contains your Task class")
    return text


def _execute_file(path: Path, text: bytes, digest: str) -> types.ModuleType:
    # Registered in sys.modules, where dataclasses and pickle look classes up; the digest separates files of one name.
    module = types.ModuleType(f"halfstep_task_{path.stem}_{digest[:12]}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))
    except HalfstepError:
        raise
    except Exception as error:
        del sys.modules[module.__name__]
        raise WrongUse(
            f"{path} stopped with {type(error).__name__}: {error}",
            allowed="a Python file that runs to its end when it is imported",
            do=f"python {path}  shows where",
        ) from error
    return module
