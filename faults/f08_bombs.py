"""Images that are small on disk and would fill the memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from faults.bad_images import BOMBS, encoded, picture
from faults.memory import highest, in_a_new_process
from faults.outcome import Outcome
from halfstep.data.dataset import BadSample, Order, Sample, Samples
from halfstep.data.folders import ImageFolder
from halfstep.data.image_io import read_image
from halfstep.data.loader import TrainLoader

ID = "F08"
WHAT = "an image that would fill the memory is rejected before decoding, and the worker survives"
SLOWEST, MOST_MEGABYTES = 1.0, 50.0
GOOD = {False: 26, True: 506}


def run(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        things = Path(folder) / "things"
        things.mkdir()
        for name, make in BOMBS.items():
            (things / name).write_bytes(make())
        rejected, slowest, growth = in_a_new_process(_offered, [str(things / name) for name in BOMBS])
        for number in range(GOOD[full]):
            (things / f"good_{number}.png").write_bytes(encoded(picture(number)))
        lives = _worker_lives(Path(folder), len(BOMBS) + GOOD[full])
    held = rejected + (slowest <= SLOWEST) + (growth <= MOST_MEGABYTES) + lives
    return Outcome(held, len(BOMBS) + 3, f"{slowest * 1e3:.0f}ms,+{growth:.0f}MB")


def _offered(paths: list[str]) -> tuple[int, float, float]:
    """How many were rejected, the slowest time, and the growth of the memory at its highest, in megabytes."""
    read_image(encoded(picture()))
    before, slowest, rejected = highest(), 0.0, 0
    for path in paths:
        begin = time.perf_counter()
        try:
            read_image(path)
        except BadSample:
            rejected += 1
        slowest = max(slowest, time.perf_counter() - begin)
    return rejected, slowest, (highest() - before) / 2**20


def _worker_lives(root: Path, files: int) -> bool:
    """One worker reads an epoch with all the bombs in it."""
    samples = Samples(ImageFolder(root), _small, seed=0)
    loader = TrainLoader(
        samples,
        Order(len(samples), seed=0),
        batch_size=8,
        collate=torch.utils.data.default_collate,
        workers=1,
        device=torch.empty(0).device,
    )
    batches = [batch for window in loader.windows(epoch=0) for batch in window]
    replaced = {one.name for batch in batches for one in batch.replaced}
    return len(batches) * 8 >= files and {Path(name).name for name in replaced} == set(BOMBS)


def _small(sample: Sample) -> Sample:
    return {"image": sample["image"][:, :16, :16] / 255.0}
