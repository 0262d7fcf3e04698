"""How a recipe ends when it is only read and checked: in this process, or as a person would, by a command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import HalfstepError


class Ending(NamedTuple):
    code: int
    said: str
    """Everything that a person, or a log, would see."""
    seconds: float
    recipe: Any = None
    """The resolved recipe, where there is one in this process."""
    peak: int = 0
    """Bytes in memory at most, of a command."""


def in_process(recipe: str, folder: Path, words: Sequence[str] = ()) -> Ending:
    """The same check, with `folder` as the place where it would make files."""
    from halfstep.host_memory import pause_gc
    from halfstep.recipe.names import parse_typed_settings
    from halfstep.recipe.resolve import resolve_recipe
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import find_task_class

    # Processor time: other work on the machine is not the check's.
    began = time.process_time()
    try:
        # A collection of everything that a test process has ever made is not the check's either.
        with _inside(folder), pause_gc():
            found = read_recipe(recipe)
            schema = find_task_class(str(found.raw.get("task"))).schema
            resolved = resolve_recipe(found.raw, schema, parse_typed_settings(words, schema), found.label)
    except HalfstepError as error:
        return Ending(error.exit_code, str(error), time.process_time() - began)
    return Ending(0, "\n".join(resolved.notes), time.process_time() - began, resolved.recipe)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def through_the_command(recipe: str, folder: Path, words: Sequence[str] = ()) -> Ending:
    """`halfstep train RECIPE --show`, with `folder` as the place where it would make files."""
    log = folder.parent / f"{folder.name}.said"
    began = time.perf_counter()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "halfstep", "train", recipe, "--show", *words]
        child = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace")
    log.unlink()
    # Linux counts in kilobytes, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Ending(child.returncode, said, time.perf_counter() - began, peak=usage.ru_maxrss * unit)
