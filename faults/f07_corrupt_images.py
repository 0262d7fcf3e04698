"""One image in a hundred is damaged."""

from __future__ import annotations

import tempfile
from itertools import chain, cycle, islice
from pathlib import Path

import torch

from faults.bad_images import DAMAGED, encoded, picture
from faults.outcome import Outcome
from halfstep.data.dataset import BadSampleBudget, Batch, Order, ReplacedSample, Sample, Samples
from halfstep.data.folders import ImageFolder
from halfstep.data.loader import TrainLoader
from halfstep.errors import BadData

ID = "F07"
WHAT = "damaged images are reported and replaced, by the same samples in every run; too many of them end the run"
FILES, BAD, LIMIT, BATCH = 2000, 20, 10, 25
SEEDS = {False: 1, True: 5}


def run(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bad = _write(root)
        held, n = 0, 0
        for seed in range(SEEDS[full]):
            checks = _checked(root, bad, seed)
            held, n = held + sum(checks), n + len(checks)
    return Outcome(held, n, f"{n - held} checks failed" if held < n else "none")


def _write(root: Path) -> set[str]:
    (root / "things").mkdir()
    good = encoded(picture())
    for number in range(FILES - BAD):
        (root / "things" / f"{number:05d}.png").write_bytes(good)
    bad = set()
    for number, (name, make) in enumerate(islice(cycle(DAMAGED.items()), BAD)):
        path = root / "things" / f"{number * 97:05d}_{name}"
        path.write_bytes(make())
        bad.add(str(path))
    return bad


def _checked(root: Path, bad: set[str], seed: int) -> list[bool]:
    """One check for each bad file, then: no other file, steps, shapes, a second run, the budget."""
    ranks = [_epoch(root, rank, seed) for rank in range(2)]
    again = [_epoch(root, rank, seed) for rank in range(2)]
    replaced = [one for batches in ranks for batch in batches for one in batch.replaced]
    named = {one.name for one in replaced if one.reason}
    return [
        *(path in named for path in bad),
        named <= bad,
        len(ranks[0]) == len(ranks[1]) == FILES // (2 * BATCH),
        all(batch.tensors["image"].shape == (BATCH, 3, 16, 16) for batch in chain(*ranks)),
        [_ids(batches) for batches in ranks] == [_ids(batches) for batches in again],
        _spent(replaced) == LIMIT + 1,
    ]


def _epoch(root: Path, rank: int, seed: int) -> list[Batch]:
    samples = Samples(ImageFolder(root), _prepared, seed)
    loader = TrainLoader(
        samples,
        Order(len(samples), seed),
        batch_size=BATCH,
        collate=torch.utils.data.default_collate,
        workers=2,
        device=torch.empty(0).device,
        rank=rank,
        size=2,
    )
    return [batch for window in loader.windows(epoch=0) for batch in window]


def _prepared(sample: Sample) -> Sample:
    return {**sample, "image": sample["image"][:, :16, :16] / 255.0}


def _ids(batches: list[Batch]) -> list[tuple[list[int], list[ReplacedSample]]]:
    return [(batch.ids, batch.replaced) for batch in batches]


def _spent(replaced: list[ReplacedSample]) -> int:
    """Distinct bad samples when the budget said no, with the exit code of bad data; -1 if it never did."""
    budget = BadSampleBudget(LIMIT)
    for one in replaced:
        try:
            budget.spend([one])
        except BadData as error:
            return len(budget.bad) if error.exit_code == 65 and one.name in str(error) else -1
    return -1
