"""Fashion-MNIST latent diffusion from nothing to samples: autoencoder, denoiser, sampling; judged by a classifier.

    python benchmarks/fashion_diffusion.py [--precision bf16] [--samples 500] [--out runs/fashion] [--record]

Needs `halfstep data get fashion_mnist` once. The two runs are `halfstep train fashion_autoencoder` and `halfstep train
fashion_diffusion`, as they ship. The samples ask for the ten classes in turn; a small convolutional network, trained
here on the real images and on nothing else, says how many of them show what was asked for. Its own training is not
part of the time, which is that from the first run's folder to the second's result, encoding between them included, and
that of sampling. Runs that are finished in `--out` are reused. `--record` keeps the result next to this file,
and a grid of samples in docs/fashion_samples.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.draw.images import enlarge_picture, join_picture_grid, write_png
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.runs.finished import FinishedRun, open_finished
from halfstep.terminal import display_progress
from halfstep.train.run_folder import RECIPE, RESULT
from halfstep.train.task import Picture, Task

RECORD = Path(__file__).with_suffix(".json")
SHOWN = Path(__file__).parents[1] / "docs" / "fashion_samples.png"
CLASSES, ROWS = 10, 4
EPOCHS = 4


def trained(out: Path, precision: str) -> tuple[dict[str, Any], float]:
    """What both runs came to, and the seconds from the beginning of the first to the end of the second."""
    first, second = out / "autoencoder", out / "denoiser"
    for recipe, folder, settings in (
        ("fashion_autoencoder", first, []),
        ("fashion_diffusion", second, [f"model.autoencoder={first}"]),
    ):
        if not (folder / RESULT).exists():
            halfstep.fit(recipe, precision=precision, settings=[f"run.dir={folder}", *settings])
    results = {folder.name: json.loads((folder / RESULT).read_text()) for folder in (first, second)}
    return results, (second / RESULT).stat().st_mtime - (first / RECIPE).stat().st_mtime


def sampled(finished: FinishedRun, count: int) -> list[Picture]:
    torch.manual_seed(0)
    with display_progress("sampling", "steps") as on_progress, finished.choice.precision.inference(finished.device):
        return finished.task.sample(finished.model, count, on_progress)


# -- the judge ----------------------------------------------------------------------------------------------------


def real_images(task: Task, split: str) -> tuple[Tensor, Tensor]:
    """As the autoencoder sees them, with their classes."""
    source = task.source(split)
    samples = [task.transform("val", source.read(number)) for number in range(len(source))]
    return torch.stack([s["image"] for s in samples]), torch.stack([torch.as_tensor(s["label"]) for s in samples])


def judge_of(images: Tensor, labels: Tensor) -> nn.Module:
    """A classifier that has seen real images only."""
    torch.manual_seed(0)
    widths = (images.shape[1], 32, 64, 128)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
    steps = EPOCHS * (len(images) // 256)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    with display_progress("the judge learns", "steps") as on_progress:
        for step in range(steps):
            chosen = torch.randint(len(images), (256,))
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            on_progress(step + 1, steps)
    return model.eval()


@torch.no_grad()
def accuracy(judge: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, list[float]]:
    """Over all, and of each class."""
    right = torch.cat([judge(part).argmax(1) for part in images.split(500)]) == labels
    return right.double().mean().item(), [right[labels == c].double().mean().item() for c in range(CLASSES)]


def as_images(pictures: list[Picture]) -> Tensor:
    """Samples as the judge sees images: one channel, between -1 and 1."""
    grey = torch.from_numpy(np.stack(pictures)[..., :1]).permute(0, 3, 1, 2)
    return grey.float() / 127.5 - 1


# -- in all -------------------------------------------------------------------------------------------------------


def measure(out: Path, precision: str, count: int) -> tuple[dict[str, Any], list[Picture]]:
    runs, seconds = trained(out, precision)
    finished = open_finished(out / "denoiser", weights="best", precision=None, own=None)
    at = time.perf_counter()
    pictures = sampled(finished, count)
    sampling = time.perf_counter() - at
    judge = judge_of(*real_images(finished.task, "train"))
    known, _ = accuracy(judge, *real_images(finished.task, "val"))
    share, each = accuracy(judge, as_images(pictures), torch.arange(count) % CLASSES)
    return {
        "precision": precision,
        "seconds": seconds + sampling,
        "seconds_of": {**{name: run["seconds"] for name, run in runs.items()}, "sampling": sampling},
        "metrics": {name: run["metrics"] for name, run in runs.items()},
        "skipped": {name: run["skipped"] for name, run in runs.items()},
        "samples": count,
        "accuracy": share,
        "accuracy_of_each_class": each,
        "judge_on_real_images": known,
    }, pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("runs/fashion"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and docs/{SHOWN.name}")
    given = parser.parse_args()
    here = collect_conditions("cpu")
    found, pictures = measure(given.out, given.precision, given.samples)
    command = " ".join(["python", "benchmarks/fashion_diffusion.py", *sys.argv[1:]])
    found = {"command": command, "conditions": here, **found}
    rows = [pictures[row * CLASSES : (row + 1) * CLASSES] for row in range(ROWS)]
    shown = join_picture_grid([[enlarge_picture(picture, 64) for picture in row] for row in rows])
    write_png(given.out / "samples.png", shown)
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        write_png(SHOWN, shown)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    print(describe_conditions(here))
    if describe_load_problem(here):
        print("the machine was busy: take the time with care")
    print(" ".join(f"{name} {seconds:.0f} s" for name, seconds in found["seconds_of"].items()))
    print(f"of each class: {' '.join(f'{share:.2f}' for share in found['accuracy_of_each_class'])}")
    print(
        f"fashion {given.precision} minutes={found['seconds'] / 60:.1f} accuracy={found['accuracy']:.3f} "
        f"judge_on_real_images={found['judge_on_real_images']:.3f}"
    )


if __name__ == "__main__":
    main()
