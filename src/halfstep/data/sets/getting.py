"""Get a data set by name: download, verify, convert and count it, whole or not at all.

The download is kept until the set is complete, so that an interrupted conversion does not download it again.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from halfstep.data.sets import NAMES
from halfstep.errors import BadData, StorageFailed, build_unknown_name_error
from halfstep.files import find_cache_folder
from halfstep.terminal import display_progress

DOWNLOADS = ".downloads"


def import_known_sets() -> dict[str, ModuleType]:
    """Return the modules of the sets by name."""
    return {name: importlib.import_module(f"halfstep.data.sets.{name}") for name in NAMES}


def is_set_cached(name: str) -> bool:
    """Return whether the set is in the cache."""
    return (_resolve_data_folder() / name).is_dir()


def fetch_dataset(name: str, known: Mapping[str, ModuleType] | None = None) -> tuple[Path, dict[str, int]]:
    """Return the folder of a set, made where it is missing, and the number of samples in each split.

    `known` are the sets to choose from, those of `import_known_sets` by default. Raises UnknownName, StorageFailed,
    BadData for wrong counts, and what the set's `fetch` and `make` raise.
    """
    known = import_known_sets() if known is None else known
    if name not in known:
        raise build_unknown_name_error("data set", name, known)
    final = _resolve_data_folder() / name
    if not final.is_dir():
        with _replace_storage_errors(final):
            _make_dataset(name, known[name], final)
    return final, _count_samples(name, known[name], final)


def _make_dataset(name: str, module: ModuleType, final: Path) -> None:
    place = final.parent
    downloads = place / DOWNLOADS / name
    downloads.mkdir(parents=True, exist_ok=True)
    with display_progress(f"{name}: download", "bytes") as on_progress:
        module.fetch(downloads, on_progress)
    with tempfile.TemporaryDirectory(dir=place, prefix=f".{name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        total, done = sum(module.COUNTS.values()), 0
        with display_progress(name, "samples") as on_progress:

            def on_sample() -> None:
                nonlocal done
                done += 1
                on_progress(done, total)

            module.make(downloads, made, on_sample)
        _count_samples(name, module, made)
        # Counted before the rename: a set in its place is always complete.
        _move_into_place(made, final)
    shutil.rmtree(downloads, ignore_errors=True)


def _count_samples(name: str, module: ModuleType, folder: Path) -> dict[str, int]:
    counts: dict[str, int] = module.count(folder)
    if counts != module.COUNTS:
        raise BadData(
            f"{folder} has {counts}", allowed=f"{module.COUNTS}", do=f"rm -r {folder}; halfstep data get {name}"
        )
    return counts


def _move_into_place(made: Path, final: Path) -> None:
    """Rename the made folder into place; of two processes that make the same set, one wins."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)


@contextmanager
def _replace_storage_errors(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{final} cannot be made: {error.strerror or error}",
            allowed="room for the set in the cache",
            do="free some, or set XDG_CACHE_HOME to another place",
        ) from None


def _resolve_data_folder() -> Path:
    return find_cache_folder() / "data"
