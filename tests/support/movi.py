"""Drawn clips in the layout that MOVi's recordings have on disk."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.data.dataset import Source

IN_A_SHARD = 2


def packed(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_movi(root: Path, splits: Mapping[str, range], source: Source, only_video: bool = False) -> None:
    """`movi_e-SPLIT-000000.tar` and so on, of these numbers of a source of clips."""
    for split, numbers in splits.items():
        for shard, first in enumerate(range(numbers.start, numbers.stop, IN_A_SHARD)):
            with tarfile.open(root / f"movi_e-{split}-{shard:06d}.tar", "w") as archive:
                for number in range(first, min(first + IN_A_SHARD, numbers.stop)):
                    for name, array in _arrays(source, number, only_video).items():
                        content = packed(array)
                        member = tarfile.TarInfo(f"{number}.{name}.npy")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))


def _arrays(source: Source, number: int, only_video: bool) -> dict[str, Any]:
    clip = source.read(number)
    arrays = {"video": np.ascontiguousarray(clip["image"].permute(0, 2, 3, 1).numpy())}
    if not only_video:
        arrays["segmentations"] = clip["mask"].to(int).numpy().astype(np.uint8)[..., None]
        arrays["forward_flow"] = np.zeros((*arrays["video"].shape[:3], 2), np.float32)
    return arrays
