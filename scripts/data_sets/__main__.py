"""`scripts/data NAME`: downloads, checks, converts, counts; whole or not at all."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halfstep.errors import HalfstepError
from halfstep.files import cache_folder
from scripts import data_sets
from scripts.data_sets.packages import Failed


def known() -> dict[str, ModuleType]:
    """The sets of this folder: the files that say what they are about."""
    names = [module.name for module in pkgutil.iter_modules(data_sets.__path__) if module.name != "__main__"]
    modules = {name: importlib.import_module(f"scripts.data_sets.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "ABOUT")}


def main() -> int:
    sets = known()
    parser = argparse.ArgumentParser("scripts/data", description="Gets a real data set into the cache.")
    parser.add_argument("name", nargs="?", choices=sorted(sets), help="the data set")
    parser.add_argument("--list", action="store_true", help="what there is, and what is here already")
    given = parser.parse_args()
    place = cache_folder() / "data"
    if given.list or given.name is None:
        return _show(sets, place)
    try:
        _get(given.name, sets[given.name], place)
    except (Failed, HalfstepError) as error:
        print(f"scripts/data {given.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"scripts/data {given.name}: stopped; nothing was kept", file=sys.stderr)
        return 130
    return 0


def _show(sets: dict[str, ModuleType], place: Path) -> int:
    for name, module in sorted(sets.items()):
        there = "here" if (place / name).is_dir() else "    "
        print(f"{name:18}{there}  {module.ABOUT}")
    return 0


def _get(name: str, module: ModuleType, place: Path) -> None:
    final = place / name
    if not final.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=f".{name}.") as temporary:
            _make(name, module, Path(temporary))
            _put(Path(temporary) / "made", final)
    counts = _counted(name, module, final)
    print(f"{name} ok: {', '.join(f'{n} {split}' for split, n in counts.items())} in {final}")


def _make(name: str, module: ModuleType, temporary: Path) -> None:
    download, made = temporary / "download", temporary / "made"
    download.mkdir()
    made.mkdir()
    console = Console(stderr=True)
    with console.status(f"{name}: {module.PACKAGE.tool} gets the package {module.PACKAGE.name}"):
        archive = module.PACKAGE.fetch(download)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=sum(module.COUNTS.values()))
        module.make(archive, made, lambda n: progress.advance(task, n))
    _counted(name, module, made)


def _counted(name: str, module: ModuleType, folder: Path) -> dict[str, int]:
    counts: dict[str, int] = module.count(folder)
    if counts != module.COUNTS:
        raise Failed(f"{folder} has {counts}, not {module.COUNTS}: remove it and run scripts/data {name} again")
    return counts


def _put(made: Path, final: Path) -> None:
    """Two that make the same set at once end with one of them."""
    try:
        made.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(made)


if __name__ == "__main__":
    sys.exit(main())
