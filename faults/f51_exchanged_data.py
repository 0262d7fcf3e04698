"""Data is exchanged while a run trains on it: images in folders, and shards."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor, nn

import halfstep
from faults import child, rig
from faults.f10_changed_data import CLASSES, Pictures
from faults.f50_cached_labels import write_shard
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.data.dataset import Subset
from halfstep.data.folders import ImageFolder
from halfstep.data.shards import Shards
from halfstep.errors import HalfstepError
from halfstep.journal.jsonl import read_events

ID = "F51"
WHAT = "an image or a shard exchanged during a run is reported by name and not used; one that was only touched is used"
SAMPLES, STEPS, AT = 24, 12, 4
"""Six steps an epoch: every sample is read before and after the exchange."""
COLOR = 255
"""The red of what is put in the place of others; none of the set has it."""
Change = Callable[[Path], None]


class Exchanged(Pictures):
    """A run that exchanges its data after some batches, and sees the colors of all of them."""

    change: ClassVar[Change]
    victim: ClassVar[Path]
    seen: ClassVar[list[float]]

    def source(self, part: Any) -> Any:
        place = Path(self.recipe.data.path)
        whole = Shards(place, parts=("label",)) if (place / "a.tar").exists() else ImageFolder(place)
        return Subset(whole, range(len(whole)))

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        found = super().loss(model, batch, metrics)
        self.seen.append(float(batch["image"].max()))
        if self.batches == AT:
            self.change(self.victim)
        return found


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    with rig.scratch() as folder:
        for workers in (0, 2) if full else (0,):
            for kind, write in (("image", _write_folder), ("shard", _write_shards)):
                for name, (change, is_reported) in CHANGES.items():
                    said = f"{kind} {name}, {workers} workers"
                    trials[said] = _held(folder, write, change, is_reported, workers)
    return outcome(trials, "none used, none refused that is the same")


def _held(folder: Path, write: Callable[[Path], Path], change: Change, is_reported: bool, workers: int) -> str | None:
    place, data = folder / "run", folder / "set"
    victim = write(data)
    task = type("Exchanging", (Exchanged,), {"change": staticmethod(change), "victim": victim, "seen": []})
    code = _launched(place, data, task, workers)
    reports = [one for one in read_events(place / "journal.jsonl") if one["event"] == "bad_sample"]
    shutil.rmtree(place)
    shutil.rmtree(data)
    return first_wrong(
        (f"exit code {code}", lambda: code == 0),
        ("the exchange took place", lambda: len(task.seen) > AT),
        ("none of the others is used", lambda: not is_reported or max(task.seen) < 1.0),
        (f"{len(reports)} reports", lambda: bool(reports) == is_reported),
        ("the file is named", lambda: all(str(victim) in one["name"] for one in reports)),
        ("with the reason", lambda: all("since the run began" in one["reason"] for one in reports)),
    )


def _launched(folder: Path, data: Path, task: Any, workers: int) -> int:
    recipe = folder.with_suffix(".yaml")
    recipe.write_text("task: pictures\n")
    settings = {**child.RECIPE, "task": "pictures", "run.dir": str(folder), "data.path": str(data)}
    settings |= {"train.steps": STEPS, "train.batch_size": 4, "train.num_workers": workers, "data.bad_samples": SAMPLES}
    try:
        halfstep.fit(recipe, task=task, settings=settings, quiet=True)
    except HalfstepError as error:
        return error.exit_code
    return 0


def _bitmap(red: int, number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (red, number, 0)).save(file, "BMP")
    return file.getvalue()


def _write_folder(root: Path) -> Path:
    for number in range(SAMPLES):
        path = root / CLASSES[number % len(CLASSES)] / f"{number:05d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bitmap(0, number))
    return root / CLASSES[0] / "00000.bmp"


def _write_shards(root: Path) -> Path:
    root.mkdir(parents=True)
    each = SAMPLES // len(CLASSES)
    for name in "abc":
        write_shard(root / f"{name}.tar", [number % len(CLASSES) for number in range(each)])
    return root / "a.tar"


def _other(victim: Path) -> Path:
    """Return a file of the same size beside the victim's folder, with other colors."""
    place = victim.parent.parent / "other"
    if victim.suffix == ".tar":
        return write_shard(place, [number % len(CLASSES) for number in range(SAMPLES // len(CLASSES))], COLOR)
    place.write_bytes(_bitmap(COLOR, 0))
    return place


def _replace(victim: Path) -> None:
    _other(victim).replace(victim)


def _replace_with_old_times(victim: Path) -> None:
    status, other = victim.stat(), _other(victim)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(victim)


def _write_over(victim: Path) -> None:
    status, other = victim.stat(), _other(victim)
    with open(victim, "r+b") as file:
        file.write(other.read_bytes())
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _lengthen(victim: Path) -> None:
    victim.write_bytes(_other(victim).read_bytes() + bytes(512))


def _touch(victim: Path) -> None:
    os.utime(victim, (5, 5))


def _permit(victim: Path) -> None:
    victim.chmod(0o600)


def _copy_over(victim: Path) -> None:
    copy = victim.parent.parent / "copy"
    shutil.copy(victim, copy)
    copy.replace(victim)


CHANGES: dict[str, tuple[Change, bool]] = {
    "replaced": (_replace, True),
    "replaced, with the old times": (_replace_with_old_times, True),
    "written in place": (_write_over, True),
    "of another size": (_lengthen, True),
    "touched": (_touch, False),
    "with other permissions": (_permit, False),
    "copied over itself": (_copy_over, False),
}
"""What is done to a file, and whether it is another one then."""
