"""What a checkpoint costs the training: the stand-still of a background save next to that of a synchronous one.

    python benchmarks/save_stall.py [--pairs 12] [--folder .] [--model resnet50] [--json]

A run of the trainer's own, with everything it does: a ResNet-50 of timm with AdamW on small drawn images, a step of
which takes about half a second. Synchronous and background saves of it alternate, and so does which of them comes
first in a pair. Blocked is the time from the call to its return, with everything in between. While a background save
is written the training goes on, more slowly: lost is the blocked time and what the steps meanwhile took longer than
the median of the steps right before. The first background save allocates the buffers, and stands apart. At the end
`halfstep verify` reads the checkpoints, from the system's cache and from the disk. `--json` keeps the figures next to
this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep import distributed
from halfstep.checkpoint.commit import CheckpointSaver, SaveResult
from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.host_memory import keep_freed_memory
from halfstep.journal.events import Journal
from halfstep.json_data import convert_to_json_data
from halfstep.precision.hardware import describe_device
from halfstep.recipe.names import parse_typed_settings as read_settings
from halfstep.recipe.resolve import resolve_recipe
from halfstep.recipe.sources import read_recipe
from halfstep.recipe.strict_yaml import dump_recipe_yaml
from halfstep.runs.registry import find_task_class
from halfstep.runs.verify import verify
from halfstep.step.report import StepReport
from halfstep.train.checkpointing import Checkpoints
from halfstep.train.loop import Loop
from halfstep.train.run import make_loop

HERE = Path(__file__).parent
GOAL = 0.15
BEFORE = 3
"""Steps without a save, to compare with those next to one."""
WARM = 3
SETTINGS = ["data.samples=40000", "data.size=96", "train.steps=7000", "train.batch_size=4", "precision=fp32"]
SETTINGS += ["checkpoint.every_steps=1000000", "run.log_every=1000000", "train.num_workers=0"]


@dataclass(frozen=True)
class Save:
    """One save, as the training saw it."""

    blocked: float
    committed: float
    """Seconds from the call to the commit."""
    lost: float
    """Blocked, and what the steps next to it took longer."""
    steps: int
    """That were trained while it was written."""
    step: float
    """The median step right before it."""


class Arms:
    """One run that is saved in two ways, into two folders on one disk."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folders = {name: folder / name for name in ("synchronous", "background")}
        self.loop = _prepared(self.folders["background"], model)
        self.folders["synchronous"].mkdir()
        saver = CheckpointSaver(
            self.folders["synchronous"] / CHECKPOINTS, keep=2, party=distributed.RankGroup(), background=False
        )
        self._synchronous = Checkpoints(self.loop.live, saver, Journal())
        self._attempts = self.loop.attempts()
        self.size = 0
        for _ in range(WARM):
            self._step()

    def save(self, name: str) -> Save:
        step = statistics.median(self._step() for _ in range(BEFORE))
        return self.synchronous(step) if name == "synchronous" else self.background(step)

    def synchronous(self, step: float) -> Save:
        began = time.perf_counter()
        self._synchronous.save()
        blocked = time.perf_counter() - began
        self._synchronous.finish()
        saved = _committed(self._synchronous.last)
        return Save(blocked, saved.seconds, blocked, 0, step)

    def background(self, step: float) -> Save:
        """The loop itself hears, between two steps, that the save is done."""
        earlier, beside = self.loop.checkpoints.last, []
        began = time.perf_counter()
        self.loop.checkpoints.save()
        blocked = time.perf_counter() - began
        while self.loop.checkpoints.last is earlier:
            beside.append(self._step())
        saved = _committed(self.loop.checkpoints.last)
        self.size = saved.bytes
        return Save(blocked, saved.seconds, blocked + sum(beside) - step * len(beside), len(beside), step)

    def _step(self) -> float:
        began = time.perf_counter()
        report: StepReport | None = next(self._attempts, None)
        assert report is not None, "the run is too short for so many pairs"
        return time.perf_counter() - began

    def close(self) -> None:
        self._attempts.close()  # type: ignore[attr-defined]
        self.loop.checkpoints.close()
        self._synchronous.close()


def _prepared(folder: Path, model: str) -> Loop:
    found = read_recipe("classification_tiny")
    kind = find_task_class(found.raw["task"])
    changes = [*SETTINGS, f"model.name={model}", f"run.dir={folder}"]
    recipe = resolve_recipe(found.raw, kind.schema, read_settings(changes, kind.schema), found.label).recipe
    folder.mkdir()
    (folder / "recipe.yaml").write_text(dump_recipe_yaml(recipe))
    return make_loop(kind(recipe), recipe, folder, Journal())


def _committed(saved: SaveResult | None) -> SaveResult:
    assert saved is not None
    assert saved.generation is not None, "a save that failed measures nothing"
    return saved


def alternated(arms: Arms, pairs: int) -> Iterator[tuple[str, Save]]:
    for number in range(pairs + 1):
        order = ("synchronous", "background") if number % 2 == 0 else ("background", "synchronous")
        for name in order:
            yield name, arms.save(name)
        print(f"pair {number} of {pairs}", file=sys.stderr)


def summary(saves: list[Save]) -> dict[str, Any]:
    """Medians of all but the first, with the middle eight tenths."""
    following = saves[1:]
    spread = {}
    for key in ("blocked", "committed", "lost", "step"):
        values = sorted(getattr(one, key) for one in following)
        tail = len(values) // 10
        spread[key] = {"median": statistics.median(values), "low": values[tail], "high": values[-1 - tail]}
    first = {"blocked": saves[0].blocked, "committed": saves[0].committed, "lost": saves[0].lost}
    return {"first": first, **spread, "steps_beside": statistics.median(one.steps for one in following)}


def throughput(folder: Path, from_disk: bool) -> dict[str, Any]:
    if from_disk:
        for file in (folder / CHECKPOINTS).rglob("*.safetensors"):
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    speed = verify(folder).speed
    return {"words": str(speed), **convert_to_json_data(speed)}


def disk_of(folder: Path) -> str:
    """The file system and the device below a folder."""
    place, best = str(folder.resolve()), ("", "unknown", "")
    for line in Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else ():
        device, mounted, kind = line.split()[:3]
        inside = mounted == "/" or place == mounted or place.startswith(f"{mounted}/")
        if inside and len(mounted) >= len(best[2]):
            best = (device, kind, mounted)
    if best[1] in ("tmpfs", "ramfs"):
        sys.exit(f"{folder} lies in the main memory; give --folder on a disk")
    return f"{best[1]} on {best[0]}"


def told(result: dict[str, Any]) -> str:
    """All figures in one line."""
    sync, back = result["synchronous"], result["background"]
    parts = [
        f"save stall {result['ratio']:.1%} (goal: at most {GOAL:.0%}): blocked {_median(back, 'blocked'):.3f} s in the "
        f"background, {_median(sync, 'blocked'):.3f} s synchronous",
        f"first {back['first']['blocked']:.3f} s",
        f"committed after {_median(back, 'committed'):.2f} s",
        f"lost {_median(back, 'lost'):.2f} s a save in the background, {_median(sync, 'lost'):.2f} s synchronous",
        f"a step takes {_median(back, 'step'):.2f} s",
        f"{result['bytes'] / 1e6:.1f} MB, {result['pairs']} pairs",
        result["verify"]["cached"]["words"],
    ]
    return "; ".join(parts)


def _median(arm: dict[str, Any], key: str) -> float:
    return float(arm[key]["median"])


def table(result: dict[str, Any]) -> str:
    lines = ["| save | blocked, s | of a synchronous one | committed after, s | training lost, s | first: blocked, s |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    base = result["synchronous"]["blocked"]["median"]
    for name in ("synchronous", "background"):
        one = result[name]
        blocked = f"{one['blocked']['median']:.3f} ({one['blocked']['low']:.3f} - {one['blocked']['high']:.3f})"
        lines.append(
            f"| {name} | {blocked} | {one['blocked']['median'] / base:.1%} | {one['committed']['median']:.2f} "
            f"| {one['lost']['median']:.2f} | {one['first']['blocked']:.3f} |"
        )
    lines += ["", f"`halfstep verify`, read from the system's cache: {result['verify']['cached']['words']}."]
    return "\n".join([*lines, f"Read from the disk: {result['verify']['disk']['words']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured")
    parser.add_argument("--model", default="resnet50", help="a model of timm")
    parser.add_argument("--json", action="store_true", help="keep the figures as save_stall.json and save_stall.md")
    given = parser.parse_args()
    disk = disk_of(given.folder)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix=".save_stall-") as place:
        arms = Arms(Path(place), given.model)
        saves: dict[str, list[Save]] = {"synchronous": [], "background": []}
        for name, save in alternated(arms, given.pairs):
            saves[name].append(save)
        arms.close()
        folder = arms.folders["background"]
        verify = {"cached": throughput(folder, False), "disk": throughput(folder, True)}
    found = {name: summary(ones) for name, ones in saves.items()}
    conditions = {
        "command": " ".join(["python benchmarks/save_stall.py", *sys.argv[1:]]),
        "model": given.model,
        "device": describe_device().name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "disk": disk,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    ratio = found["background"]["blocked"]["median"] / found["synchronous"]["blocked"]["median"]
    result = {**conditions, "pairs": given.pairs, "bytes": arms.size, "ratio": ratio, **found, "verify": verify}
    words = ", ".join(f"{key}: {value}" for key, value in conditions.items())
    print(f"{words}\n\n{table(result)}\n\n{told(result)}")
    if given.json:
        (HERE / "save_stall.json").write_text(json.dumps(result, indent=1) + "\n")
        (HERE / "save_stall.md").write_text(f"{words}\n\n{table(result)}\n\n{told(result)}\n")


if __name__ == "__main__":
    main()
