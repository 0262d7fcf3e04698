"""Read weights from a folder of safetensors files: Hugging Face's sharded layout, or shards that torch's DCP wrote.

`torch.distributed.checkpoint` writes safetensors with its HuggingFaceStorageWriter: each rank's file says in its
metadata where its chunks lie. Its other format has a pickle in `.metadata`, which is never read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.chunks import build_block_index
from halfstep.checkpoint.sealed import LOOKED_AT, check_safetensors_header, describe_unsafe_file
from halfstep.errors import BadData, Unsafe
from halfstep.files import LARGEST_JSON, parse_strict_json

PICKLED, INFO, OFFSETS = ".metadata", "DCP_SHARDING_INFO", "saved_offsets"
MOST_FILES = 10_000
FOLDERS = "a folder of .safetensors files, as Hugging Face or torch's HuggingFaceStorageWriter writes them"


@dataclass(frozen=True)
class WeightPart:
    """A block of a tensor in one file."""

    file: Path
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the tensor."""
        return build_block_index(self.offsets, self.sizes)


def has_weights(folder: Path) -> bool:
    """Return whether a folder is one to be read, or to be refused with its reason."""
    return folder.is_dir() and ((folder / PICKLED).exists() or next(folder.glob("*.safetensors"), None) is not None)


def load_weight_folder(folder: Path, most: int) -> dict[str, Tensor]:
    """Return the tensors of all files by name, on the host, with their chunks joined.

    Raises Unsafe for a pickle, and BadData for files that cannot be read, are larger than `most` bytes together, or do
    not hold every part of a tensor exactly once.
    """
    if (folder / PICKLED).exists():
        raise Unsafe(
            f"{folder} is a checkpoint of torch.distributed.checkpoint with a pickle in {PICKLED}, which can run code",
            allowed=FOLDERS,
            do="if you know who wrote it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
            f"{folder} weights.pt, and give weights.pt",
        )
    files = sorted(islice(folder.glob("*.safetensors"), MOST_FILES))
    size = sum(file.stat().st_size for file in files)
    if size > most:
        raise BadData(f"{folder} has {size:,} bytes", allowed=f"at most {most:,}", do="use smaller weights")
    try:
        parts = _list_weight_parts(files)
        return {name: _join_parts(name, held) for name, held in parts.items()}
    except (BadData, Unsafe):
        raise
    except Exception as error:
        # A made-up file can cause any exception in the reader.
        raise _damaged_error(folder, str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def _list_weight_parts(files: list[Path]) -> dict[str, list[WeightPart]]:
    found: dict[str, list[WeightPart]] = defaultdict(list)
    for file in files:
        _refuse_code(file)
        check_safetensors_header(file)
        with _open_file(file) as stored:
            offsets = _parse_offsets(stored.metadata() or {})
            for name in stored.keys():  # noqa: SIM118 - not a mapping
                sizes = tuple(stored.get_slice(name).get_shape())
                found[name].append(WeightPart(file, offsets.get(name, (0,) * len(sizes)), sizes))
    return found


def _parse_offsets(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    text = metadata.get(INFO, "{}").encode()
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{INFO} of {len(text):,} bytes")
    table = parse_strict_json(text)
    found = {name: tuple(entry[OFFSETS]) for name, entry in table.items()}
    if any(type(at) is not int or not 0 <= at < 2**53 for offsets in found.values() for at in offsets):
        raise ValueError(f"{INFO} has offsets that are no counts")
    return found


def _join_parts(name: str, parts: list[WeightPart]) -> Tensor:
    ends = ([at + size for at, size in zip(part.offsets, part.sizes, strict=True)] for part in parts)
    shape = tuple(map(max, zip(*ends, strict=True)))
    held = sum(math.prod(part.sizes) for part in parts)
    # Before anything is allocated: a made-up offset can claim a tensor of any size.
    if held != math.prod(shape):
        raise _damaged_error(parts[0].file.parent, f"{name} has {held:,} of {math.prod(shape):,} numbers")
    if len(parts) == 1:
        with _open_file(parts[0].file) as stored:
            whole: Tensor = stored.get_tensor(name)
            return whole
    joined, seen = torch.empty(0), torch.zeros(shape, dtype=torch.bool)
    for part in parts:
        with _open_file(part.file) as stored:
            tensor = stored.get_tensor(name)
        joined = torch.empty(shape, dtype=tensor.dtype) if part is parts[0] else joined
        if tensor.dtype != joined.dtype:
            raise _damaged_error(part.file, f"{name} has two dtypes")
        joined[part.place], seen[part.place] = tensor, True
    # As many numbers as there should be, and one place without any: another has two.
    if not bool(seen.all()):
        raise _damaged_error(parts[0].file.parent, f"parts of {name} overlap")
    return joined


def _refuse_code(file: Path) -> None:
    with file.open("rb") as opened:
        kind = describe_unsafe_file(opened.read(LOOKED_AT))
    if kind is not None:
        raise Unsafe(
            f"{file} is named .safetensors, and is {kind}, which can run code when it is read",
            allowed=FOLDERS,
            do="do not use this folder unless you know who made it",
        )


def _open_file(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, "pt")


def _damaged_error(path: Path, reason: str) -> BadData:
    return BadData(
        f"{path} cannot be read as weights: {reason}",
        allowed=FOLDERS,
        do="copy the folder again, with the files of all ranks",
    )
