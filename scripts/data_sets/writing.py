"""Shards and pictures, the same bytes each time they are made."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

from PIL import Image

Bar = Callable[[int], None]
"""Told how many samples are done since the last time."""
PER_SHARD = 5000


def png(array: Any) -> bytes:
    into = io.BytesIO()
    Image.fromarray(array).save(into, "PNG", compress_level=6)
    return into.getvalue()


def write_shards(folder: Path, samples: Iterable[tuple[Any, int]], bar: Bar) -> None:
    """Images and labels as WebDataset has them, `PER_SHARD` in a file."""
    folder.mkdir(parents=True)
    numbered = enumerate(samples)
    for shard in count():
        some = list(islice(numbered, PER_SHARD))
        if not some:
            return
        with tarfile.open(folder / f"{shard:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, (image, label) in some:
                _add(archive, f"{number:06d}.png", png(image))
                _add(archive, f"{number:06d}.cls", str(label).encode())
                bar(1)


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
