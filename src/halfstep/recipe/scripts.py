"""Find the example scripts: inside the installed package, or in the repository. Imports no torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import build_unknown_name_error

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PREFIX = "train_"
"""Most scripts train one recipe, and are known by its name: `train_unet.py` is `unet`."""


def list_script_names() -> list[str]:
    """Return the names of the example scripts."""
    return sorted(_find_scripts())


def read_script(name: str) -> tuple[str, str]:
    """Return the file name of an example script and its text; raise `UnknownName` if there is none."""
    found = _find_scripts()
    if name not in found:
        raise build_unknown_name_error("script", name, sorted(found))
    return found[name].name, found[name].read_text(encoding="utf-8")


def _find_scripts() -> dict[str, Traversable]:
    installed = resources.files("halfstep") / "examples"
    # Only a wheel has them inside the package; a checkout has them next to `src`.
    folder = installed if installed.is_dir() else Path(__file__).parents[3] / "examples"
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name.removesuffix(".py").removeprefix(PREFIX): file for file in files if file.name.endswith(".py")}
