"""A task on shards that trains in milliseconds, and a launch of it that reports the samples of each step."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from faults import child
from faults.bad_images import encoded, picture
from halfstep.data.dataset import split_source
from halfstep.data.parquet_shards import open_shards
from halfstep.errors import HalfstepError
from halfstep.recipe.schema import LossOptions, Recipe
from halfstep.runs import fit
from halfstep.train.loop import Loop
from halfstep.train.task import Task
from tests.support.tiny_task import Data, Model

GLOBAL, STEPS = 8, 50
SETTINGS: dict[str, Any] = {
    **child.RECIPE,
    "task": "indexed",
    "train.steps": STEPS,
    "train.batch_size": GLOBAL,
    "checkpoint.every_steps": 5,
    "checkpoint.keep": 20,
    "run.log_every": 100,
}


def write_shards(root: Path, shards: int, each: int, images: dict[int, bytes] | None = None) -> Path:
    """Write a set of small pictures; `images` has others for some numbers."""
    root.mkdir(parents=True)
    some = [encoded(picture(number)) for number in range(50)]
    for shard in range(shards):
        with tarfile.open(root / f"s-{shard:02d}.tar", "w") as archive:
            for number in range(shard * each, (shard + 1) * each):
                image = (images or {}).get(number, some[number % 50])
                for kind, content in (("png", image), ("cls", b"%d" % (number % 3))):
                    member = tarfile.TarInfo(f"{number:06d}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return root


class Where(Data):
    path: str = ""
    """The folder of shards."""


class Indexed(Task):
    """The mean color of a picture tells its class, more or less."""

    schema: ClassVar[Any] = Recipe[Model, Where, LossOptions]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    _sources: Any = None

    def model(self) -> nn.Module:
        return nn.Linear(3, 3)

    def source(self, part: Any) -> Any:
        if self._sources is None:
            data = self.recipe.data
            self._sources = split_source(open_shards(data.path, verify=data.verify, store=self.recipe.store), 0.2)
        return self._sources[part == "val"]

    def transform(self, part: Any, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "image": sample["image"].float().mean((1, 2)) / 255}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        return F.cross_entropy(model(batch["image"]), batch["label"])


def launched(
    rank: int, folder: str, settings: dict[str, Any], accept: bool = False, kill_at: int | None = None
) -> dict[str, Any]:
    """One launch on one rank: its exit code, what it said, and the samples of each step.

    With `kill_at`, it ends by SIGKILL within that step; its samples are in a file, a line for each step.
    """
    seen: dict[str, Any] = {"code": 0, "ids": [], "said": "", "log": f"{folder}-{rank}.ids", "kill_at": kill_at}
    make_loop = fit.make_loop
    fit.make_loop = lambda *given, **more: _watched(make_loop(*given, **more), seen)
    recipe = Path(f"{folder}-{rank}.yaml")
    recipe.write_text("task: indexed\n")
    try:
        asked = {**SETTINGS, **settings, "run.dir": folder}
        fit.fit(recipe, task=Indexed, settings=asked, quiet=True, accept_data_change=accept)
    except HalfstepError as error:
        seen["code"], seen["said"] = error.exit_code, str(error)
    finally:
        fit.make_loop = make_loop
    return seen


def _watched(loop: Loop, seen: dict[str, Any]) -> Loop:
    windows = loop.train.windows

    def counted(epoch: int, first: int = 0) -> Any:
        for step, window in enumerate(windows(epoch, first), epoch * loop.train.steps_per_epoch + first):
            seen["ids"].append([number for batch in window for number in batch.ids])
            with open(seen["log"], "a") as log:
                log.write(json.dumps([step, seen["ids"][-1]]) + "\n")
            if step == seen["kill_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield window

    loop.train.windows = counted  # type: ignore[method-assign]
    seen["order"] = loop.live.auto_choices.order.name
    return loop
