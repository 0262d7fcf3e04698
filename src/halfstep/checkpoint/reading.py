"""Read checkpoints; nothing is used before every byte has been compared with the digests in the manifest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from halfstep.checkpoint.chunks import BY_NAME, ChunkedTensor
from halfstep.checkpoint.paths import CheckpointDir, list_generations
from halfstep.checkpoint.sealed import (
    LOOKED_AT,
    Manifest,
    check_safetensors_header,
    find_file_defect,
    is_temporary_error,
    name_state_file,
    name_tensors_file,
    open_regular,
    read_bounded,
    read_manifest,
    refuse_code,
)
from halfstep.errors import (
    BadData,
    HalfstepError,
    NoCheckpoint,
    OtherForm,
    StorageFailed,
    advise_new_run,
    choose_caller_wording,
)
from halfstep.files import LARGEST_JSON, parse_strict_json

MOST_STRANGERS = 1000
"""The number of files in a checkpoint's folder that are inspected, whether they belong there or not."""
Progress = Callable[[int], None]
"""A callback that receives the number of bytes read since the last call."""


@dataclass(frozen=True)
class CheckpointVerdict:
    """The result of verifying one checkpoint."""

    generation: CheckpointDir
    manifest: Manifest | None
    problem: str | None
    """The first problem that was found, or None."""
    unread: bool = False
    """Whether the checkpoint could not be read at present; it may be intact."""


def verify_checkpoint(generation: CheckpointDir, progress: Progress = lambda count: None) -> CheckpointVerdict:
    """Verify the size and SHA-256 of every file of a checkpoint.

    Raises Unsafe if a file could run code, and OtherForm for a checkpoint of an earlier or a later version.
    """
    try:
        # Before the manifest is trusted: otherwise a foreign file that it does not list would never be inspected.
        refuse_unsafe_files(generation.path)
    except OSError as error:
        return CheckpointVerdict(generation, None, _describe_error(error), is_temporary_error(error))
    try:
        manifest = read_manifest(generation)
    except OtherForm:
        # Not a damaged checkpoint: setting it aside would lose the work of another version.
        raise
    except (OSError, ValueError) as error:
        return CheckpointVerdict(generation, None, f"its manifest: {_describe_error(error)}", is_temporary_error(error))
    for sealed in manifest.files:
        try:
            problem = find_file_defect(generation.path, sealed)
        except OSError as error:
            return CheckpointVerdict(generation, manifest, f"{sealed.name}: {_describe_error(error)}", unread=True)
        if problem is not None:
            return CheckpointVerdict(generation, manifest, problem)
        progress(sealed.size)
    return CheckpointVerdict(generation, manifest, None)


def refuse_unsafe_files(folder: Path) -> None:
    """Raise OSError if the folder is a link, and Unsafe if any file in it could run code."""
    # A link may lead out of the run's folder, and what it leads to can be exchanged after the check.
    if folder.is_symlink():
        raise OSError("a link instead of a folder")
    for path in sorted(islice(folder.iterdir(), MOST_STRANGERS)):
        with contextlib.suppress(OSError), open_regular(path) as file:
            refuse_code(path, os.pread(file, LOOKED_AT, 0))


def find_newest_intact(folder: Path) -> tuple[CheckpointVerdict | None, list[CheckpointVerdict]]:
    """Return the newest intact checkpoint, and the damaged ones that are newer; None if there is none at all.

    Raises NoCheckpoint if all are damaged, and StorageFailed if one cannot be read at present.
    """
    damaged: list[CheckpointVerdict] = []
    try:
        found = list_generations(folder)
    except OSError as error:
        raise _build_checkpoint_read_error(folder, _describe_error(error)) from error
    for generation in found:
        verdict = verify_checkpoint(generation)
        if verdict.problem is None:
            return verdict, damaged
        # An unreadable one may be intact. Falling back to an older one would discard its steps for a temporary failure.
        if verdict.unread:
            raise _build_checkpoint_read_error(generation.path, verdict.problem)
        damaged.append(verdict)
    # Never start over silently when there was a checkpoint once.
    if damaged:
        raise build_none_intact_error(folder, [f"{one.generation.name}: {one.problem}" for one in damaged])
    return None, []


def build_none_intact_error(folder: Path, lines: list[str]) -> NoCheckpoint:
    """Return the error for a folder in which every checkpoint is damaged; `lines` has one reason for each."""
    shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
    return NoCheckpoint(
        "\n    ".join([f"{folder} has no intact checkpoint:", *shown]),
        allowed="at least one intact checkpoint; a run is never restarted silently",
        do=f"restore the folder from a copy, or {advise_new_run()}",
    )


def _build_checkpoint_read_error(path: Path, problem: str) -> StorageFailed:
    return StorageFailed(
        f"{path} cannot be read now: {problem}",
        allowed="a readable disk; whether the checkpoint is intact is unknown",
        do=f"try again; if the error persists, rename {path.name} to continue from the previous checkpoint",
    )


Like = Callable[[str, Sequence[int], torch.dtype], Tensor | None]
"""Returns the tensor to read a saved one into, by its name, shape and dtype; None to read it whole, on the host."""


def read_rank_state(generation: CheckpointDir, rank: int) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON and the whole tensors of a rank; raise as `read_rank_json` and `load_rank_tensors` do."""
    return read_rank_json(generation, rank), load_rank_tensors(generation, rank)


def read_rank_json(generation: CheckpointDir, rank: int) -> Any:
    """Return the JSON that a rank saved.

    Raises BadData if the file cannot be parsed, and StorageFailed if it cannot be read at present.
    """
    path = generation.path / name_state_file(rank)
    try:
        return parse_strict_json(read_bounded(path, LARGEST_JSON))
    except (OSError, ValueError) as error:
        raise _build_damaged_error(path, error) from error


def load_rank_tensors(generation: CheckpointDir, rank: int, like: Like = lambda *_: None) -> dict[str, Tensor]:
    """Return a rank's own tensors merged over rank 0's, which include the shared ones; chunks are joined.

    Only the parts that the tensors of `like` need are read. Raises BadData and StorageFailed as `read_rank_json` does.
    """
    path = generation.path
    try:
        table = dict(read_manifest(generation).chunks)
        found: dict[str, Tensor] = {}
        targets: dict[str, Tensor] = {}
        for name, cut in table.items():
            target = like(name, cut.shape, cut.dtype)
            targets[name] = torch.empty(cut.shape, dtype=cut.dtype) if target is None else target
        for one in dict.fromkeys((0, rank)):
            whole, elsewhere = _load_whole_tensors(path / name_tensors_file(one), table, like)
            found |= whole
            targets |= elsewhere
            table |= {
                name: ChunkedTensor(tuple(tensor.shape), tensor.dtype, 0, max(1, tensor.shape[0]), (one,))
                for name, tensor in elsewhere.items()
            }
        if targets:
            # The import takes most of a second, and only shards need it.
            from halfstep.checkpoint.resharding import load_into_tensors

            load_into_tensors(path, {name: table[name] for name in targets}, targets)
        return found | targets
    except Exception as error:
        # A made-up file can cause any exception in the reader: TypeError, OverflowError, RuntimeError and others.
        raise _build_damaged_error(path / name_tensors_file(rank), error) from error


def _load_whole_tensors(
    path: Path, chunks: Mapping[str, object], like: Like
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a file that are no chunks: those read, and those to be read into a tensor of `like`."""
    check_safetensors_header(path)
    whole: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in chunks:
                continue
            part = file.get_slice(name)
            target = like(name, part.get_shape(), BY_NAME[part.get_dtype()])
            if target is None:
                whole[name] = file.get_tensor(name)
            else:
                targets[name] = target
    return whole, targets


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; any exception may be raised for a made-up file."""
    check_safetensors_header(path)
    return load_file(path)


def _build_damaged_error(path: Path, error: Exception) -> HalfstepError:
    if is_temporary_error(error):
        return _build_checkpoint_read_error(path.parent, f"{path.name}: {_describe_error(error)}")
    run = path.parent.parent.parent
    return BadData(
        f"{path} cannot be read: {_describe_error(error)}",
        allowed="a checkpoint written by halfstep",
        do=choose_caller_wording(f"halfstep verify {run}", f'halfstep.verify("{run}")'),
    )


def _describe_error(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
