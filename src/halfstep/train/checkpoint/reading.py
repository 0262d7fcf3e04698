"""Checkpoints from the disk: nothing is used before every byte of it was compared with what was written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from halfstep.errors import BadData, HalfstepError, NoCheckpoint, StateMismatch, StorageFailed
from halfstep.files import LARGEST_JSON, strict_json
from halfstep.train.checkpoint.generation import Generation, generations
from halfstep.train.checkpoint.manifest import Manifest, NewerFormat, read_manifest, state_of, tensors_of
from halfstep.train.checkpoint.sealed import is_passing, problem_with, read_bounded, refuse_code, regular
from halfstep.train.foreign import LOOKED_AT

MOST_TENSORS, MOST_SIDES = 100_000, 64
"""In one file; and in the shape of one tensor, which is as many as torch can compute with."""
MOST_STRANGERS = 1000
"""Files in a checkpoint's folder that are looked at, whether they belong there or not."""
Progress = Callable[[int], None]
"""Told how many bytes were read since it was last told."""


@dataclass(frozen=True)
class Verdict:
    """What a look at every byte of a checkpoint found."""

    generation: Generation
    manifest: Manifest | None
    problem: str | None
    """The first thing that is wrong, or None."""
    unread: bool = False
    """Whether it could not be looked at: it may be whole."""


def verified(generation: Generation, progress: Progress = lambda count: None) -> Verdict:
    """Whether a checkpoint is as it was written. Unsafe where somebody put something else in its place."""
    try:
        refuse_strangers(generation.path)
    except OSError as error:
        return Verdict(generation, None, _in_words(error), is_passing(error))
    try:
        manifest = read_manifest(generation)
    except NewerFormat as error:
        raise StateMismatch(
            f"{generation.path} was {error}",
            allowed="checkpoints of this version, and older ones",
            do="pip install --upgrade halfstep",
        ) from None
    except (OSError, ValueError) as error:
        return Verdict(generation, None, f"its manifest: {_in_words(error)}", is_passing(error))
    for sealed in manifest.files:
        try:
            problem = problem_with(generation.path, sealed)
        except OSError as error:
            return Verdict(generation, manifest, f"{sealed.name}: {_in_words(error)}", unread=True)
        if problem is not None:
            return Verdict(generation, manifest, problem)
        progress(sealed.size)
    return Verdict(generation, manifest, None)


def refuse_strangers(folder: Path) -> None:
    """OSError for a link, which may lead anywhere; Unsafe for code that lies beside the files of a checkpoint."""
    if folder.is_symlink():
        raise OSError("a link, where a folder was made")
    for path in sorted(islice(folder.iterdir(), MOST_STRANGERS)):
        with contextlib.suppress(OSError), regular(path) as file:
            refuse_code(path, os.pread(file, LOOKED_AT, 0))


def newest_whole(folder: Path) -> tuple[Verdict | None, list[Verdict]]:
    """The newest checkpoint that is whole, and the damaged ones that are newer. NoCheckpoint where all are damaged.

    StorageFailed where one cannot be read now: to go back to an older one would throw away what may be whole.
    """
    damaged: list[Verdict] = []
    try:
        found = generations(folder)
    except OSError as error:
        raise _not_now(folder, _in_words(error)) from error
    for generation in found:
        verdict = verified(generation)
        if verdict.problem is None:
            return verdict, damaged
        if verdict.unread:
            raise _not_now(generation.path, verdict.problem)
        damaged.append(verdict)
    if damaged:
        raise none_whole(folder, [f"{one.generation.name}: {one.problem}" for one in damaged])
    return None, []


def none_whole(folder: Path, lines: list[str]) -> NoCheckpoint:
    shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
    return NoCheckpoint(
        "\n    ".join([f"{folder} held checkpoints, and none of them is whole:", *shown]),
        allowed="at least one checkpoint as it was written; a run is never begun anew in silence",
        do="bring back the folder from a copy, or add --new to begin again in a folder of its own",
    )


def _not_now(path: Path, problem: str) -> StorageFailed:
    return StorageFailed(
        f"{path} cannot be read now: {problem}",
        allowed="a disk that can be read; whether the checkpoint is whole is not known",
        do=f"try again; where it stays so, rename {path.name} to go on from the checkpoint before it",
    )


def read_state(generation: Generation, rank: int) -> tuple[Any, dict[str, Tensor]]:
    """What one process saved: its JSON, and its tensors over those of rank 0, which writes what all have in common."""
    plain = _json(generation.path / state_of(rank))
    tensors = _tensors(generation.path / tensors_of(0))
    return plain, tensors if rank == 0 else {**tensors, **_tensors(generation.path / tensors_of(rank))}


def _json(path: Path) -> Any:
    try:
        return strict_json(read_bounded(path, LARGEST_JSON))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)
    except Exception as error:
        # A file that was made up ends in whatever the reader stumbles over: TypeError, OverflowError, RuntimeError, ...
        raise _damaged(path, error) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or any error where it was made up."""
    _check_header(path)
    return load_file(path)


def _check_header(path: Path) -> None:
    """What safetensors' own reader takes, and nobody writes: bounds for its time and memory."""
    with regular(path) as file:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if length > LARGEST_JSON:
            raise ValueError(f"a header of {length:,} bytes")
        table = strict_json(os.pread(file, length, 8))
    if not isinstance(table, dict) or len(table) > MOST_TENSORS:
        raise ValueError("no table of tensors, or one of too many")
    for name, entry in table.items():
        shape = [] if name == "__metadata__" else entry["shape"]
        if len(shape) > MOST_SIDES or any(not 0 <= side < 2**53 for side in shape):
            raise ValueError(f"a tensor with the shape {str(shape)[:80]}")


def _damaged(path: Path, error: Exception) -> HalfstepError:
    if is_passing(error):
        return _not_now(path.parent, f"{path.name}: {_in_words(error)}")
    return BadData(
        f"{path} cannot be read: {_in_words(error)}",
        allowed="a checkpoint as halfstep wrote it",
        do=f"halfstep verify {path.parent.parent.parent}",
    )


def _in_words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
