"""A checkpoint that is written over the last one, and a job that is killed in the middle of it."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from zoo.outcome import Outcome


def state(step: int) -> dict[str, Tensor]:
    return {"weight": torch.full((256, 256), float(step))}


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        torch.save(state(1), path)
        cut_off(path, state(2))
        try:
            seen = f"step {torch.load(path)['weight'][0, 0].item():.0f}"
        except RuntimeError as error:
            seen = str(error).split(":")[0]
    return Outcome(good=seen.startswith("step"), seen=f"loading {path.name}: {seen}; the one before is gone too")


def cut_off(path: Path, content: dict[str, Tensor]) -> None:
    """Leave what a kill leaves in the middle of `torch.save(content, path)`: the first half."""
    file = io.BytesIO()
    torch.save(content, file)
    path.write_bytes(file.getvalue()[: file.tell() // 2])
