"""What pages take for granted: a model with its optimizer, loss and batches; folders of images; a case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep

CASE = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch


case = make_case = my_case = make
"""

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
loader = [(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(6)]
batch = loader[0]
criterion = nn.CrossEntropyLoss()


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def stepper(precision: str = "fp16") -> halfstep.Stepper:
    """Return a Stepper of the model above."""
    return halfstep.Stepper(model, optimizer, precision=precision)


def images(folder: str, count: int = 6, size: int = 48) -> None:
    """Draw pictures of colored squares."""
    for index, rng in enumerate(map(np.random.default_rng, range(count))):
        picture = rng.integers(0, 60, (size, size, 3), dtype=np.uint8)
        picture[index : index + size // 2, 4 : size // 2] += 150
        _save(picture, Path(folder) / f"{index}.png")


def film(path: str, frames: int, size: int) -> None:
    """Write a video of noise."""
    import av

    with av.open(path, "w") as file:
        stream = file.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        for rng in map(np.random.default_rng, range(frames)):
            picture = rng.integers(0, 255, (size, size, 3), dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())


def pairs(folder: str, count: int = 12, size: int = 48) -> None:
    """Draw pictures and the masks of what they show."""
    images(f"{folder}/images", count, size)
    for index in range(count):
        mask = np.zeros((size, size), dtype=np.uint8)
        mask[index : index + size // 2, 4 : size // 2] = 1
        _save(mask, Path(folder) / "masks" / f"{index}.png")


def case(name: str) -> None:
    """Write a module with a case in it."""
    Path(f"{name}.py").write_text(CASE, encoding="utf-8")


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
