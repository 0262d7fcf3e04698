"""One file of the data is another one when a run goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from faults import child, rig
from faults.bad_images import encoded, picture
from faults.outcome import Outcome
from halfstep.data.dataset import split_source
from halfstep.data.folders import ImageFolder
from halfstep.errors import HalfstepError
from halfstep.journal.jsonl import read_events
from halfstep.recipe.schema import LossOptions, Recipe
from halfstep.train.task import Task
from tests.support.tiny_task import Data, Model

ID = "F10"
WHAT = "a run resumes with its original data, even if it was moved, and with other data only if accepted"
FILES, UNCHANGED = 200, 4
FULL = 2000, 20
CLASSES = ("cat", "dog", "owl")
BEGUN, STEPS = 4, 6
"""The step at which the run is stopped, and all of them."""
Change = Callable[[Path], None]


class Where(Data):
    path: str = ""
    """The folder of folders."""


class Pictures(Task):
    """The mean color of a picture tells its class, more or less."""

    schema: ClassVar[Any] = Recipe[Model, Where, LossOptions]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    stop_at: ClassVar[int | None] = None

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.batches = 0

    def model(self) -> nn.Module:
        return nn.Linear(3, len(CLASSES))

    def source(self, part: Any) -> Any:
        return split_source(ImageFolder(Path(self.recipe.data.path)), 0.2)[part == "val"]

    def transform(self, part: Any, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "image": sample["image"].float().mean((1, 2)) / 255}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        self.batches += 1
        if self.batches == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(model(batch["image"]), batch["label"])


class Stopped(Pictures):
    stop_at = BEGUN


def run(full: bool) -> Outcome:
    files, unchanged = FULL if full else (FILES, UNCHANGED)
    wrong = []
    with rig.scratch() as folder:
        root, stump = folder / "set", folder / "stump"
        _write(root, files)
        code, said = _launched(stump, root, Stopped)
        assert code == 75, said
        wrong += [name for name, (change, told) in CHANGES.items() if not _held(change, told, stump, root)]
        wrong += [name for name, good in _unchanged(stump, root, unchanged) if not good]
    n = len(CHANGES) + unchanged
    return Outcome(n - len(wrong), n, f"wrong: {', '.join(sorted(set(wrong)))}" if wrong else "none")


def _launched(folder: Path, root: Path, task: type[Task] = Pictures, accept: bool = False) -> tuple[int, str]:
    """The code that the command would end with, and what it would say."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text("task: pictures\n")
    settings = {**child.RECIPE, "run.dir": str(folder), "data.path": str(root), "train.steps": STEPS}
    try:
        halfstep.fit(recipe, task=task, settings=settings | {"task": "pictures"}, quiet=True, accept_data_change=accept)
    except HalfstepError as error:
        return error.exit_code, str(error)
    return 0, ""


def _write(root: Path, count: int) -> None:
    for number in range(count):
        path = root / CLASSES[number % len(CLASSES)] / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))


def _add(file: Path) -> None:
    file.with_name("new.png").write_bytes(encoded(picture(2001)))


def _edit(file: Path) -> None:
    """One bit; the size and the time stay."""
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-30] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _rename(file: Path) -> None:
    file.rename(file.with_name("renamed.png"))


VICTIM = "dog/00040.png"
CHANGES: dict[str, tuple[Change, str]] = {
    "added": (_add, "dog/new.png"),
    "removed": (Path.unlink, VICTIM),
    "edited, same size": (_edit, VICTIM),
    "edited, other size": (_lengthen, VICTIM),
    "renamed": (_rename, "dog/renamed.png"),
}
"""What is done to a file, and the name that must be told."""


def _held(change: Change, told: str, stump: Path, root: Path) -> bool:
    """Refused with the name of the file; and gone on with where that is accepted, which the journal says."""
    place, data = _copied(stump), root.with_name("changed")
    shutil.copytree(root, data)
    change(data / VICTIM)
    code, said = _launched(place, data)
    accepted, _ = _launched(place, data, accept=True) if code == 79 else (code, "")
    start = _starts(place)[-1]
    shutil.rmtree(data)
    shutil.rmtree(place)
    named = told in said and any(told in line for line in start.get("changed", ()))
    return (code, accepted) == (79, 0) and named and start["exact"] is False


def _copied(stump: Path) -> Path:
    return Path(shutil.copytree(stump, stump.with_name("again")))


def _starts(place: Path) -> list[dict[str, Any]]:
    events = read_events(place / "journal.jsonl")
    return [event["resumed"] or {} for event in events if event["event"] == "start"]


def _unchanged(stump: Path, root: Path, times: int) -> Iterator[tuple[str, bool]]:
    """The same data: as it is, touched, moved, and copied in another order. None of it needs to be accepted."""
    for number in range(times // 4):
        yield "opened again", _goes_on(stump, root)
        for file in root.rglob("*.png"):
            os.utime(file, (number, number))
        yield "touched", _goes_on(stump, root)
        root = root.rename(root.with_name(f"moved {number}"))
        yield "moved", _goes_on(stump, root)
        copy = root.with_name(f"copied {number}")
        _copy_shuffled(root, copy, number)
        yield "copied", _goes_on(stump, copy)
        shutil.rmtree(copy)


def _goes_on(stump: Path, root: Path) -> bool:
    place = _copied(stump)
    good = _launched(place, root) == (0, "") and _starts(place)[-1]["exact"] is True
    shutil.rmtree(place)
    return good


def _copy_shuffled(source: Path, target: Path, seed: int) -> None:
    """Many disks list files in the order in which they were made."""
    files = sorted(source.rglob("*.png"))
    random.Random(seed).shuffle(files)
    for file in files:
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes())
