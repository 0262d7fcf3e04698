"""Export weights in Hugging Face's sharded layout, tensor by tensor: neither the model nor its state is held in memory.

A folder with `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`, or with `model.safetensors` alone
where everything fits one file. transformers, diffusers and huggingface_hub read it.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from halfstep import numbers
from halfstep._version import __version__
from halfstep.checkpoint.chunks import BY_NAME
from halfstep.checkpoint.packing import TENSOR
from halfstep.checkpoint.paths import CheckpointDir
from halfstep.checkpoint.reading import read_rank_json
from halfstep.checkpoint.sealed import check_safetensors_header, name_tensors_file, read_manifest
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData, WrongUse, choose_caller_wording, format_option_with_value
from halfstep.files import flush
from halfstep.page import Items, Page, Paragraph, Span
from halfstep.printable import escape_to_one_line
from halfstep.runs.export import CHECKPOINT, choose_export_weights, find_newest_checkpoint, name_weights_file
from halfstep.runs.finished import load_saved_task
from halfstep.safetensors_header import content, encode_header
from halfstep.train.state import check_state_components
from halfstep.train.task import Task

INDEX, WHOLE, SHARD = "model.safetensors.index.json", "model.safetensors", "model-{:05d}-of-{:05d}.safetensors"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def parse_byte_size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB; raise WrongUse for other words."""
    found = _SIZE.fullmatch(text.strip())
    count = 0
    if found:
        count = int(float(found[1]) * (1024 if found[3] else 1000) ** ("", "K", "M", "G", "T").index(found[2].upper()))
    if count < 1:
        given, right = (format_option_with_value("max_shard_size", size) for size in (text, "5GB"))
        raise WrongUse(given, allowed="a size, such as 5GB or 500MB", do=right)
    return count


@dataclass(frozen=True)
class StoredWeights:
    """Weights on the disk that are read one tensor at a time."""

    likes: Mapping[str, Tensor]
    """Shapes and dtypes by name, without values."""
    read: Callable[[str], Tensor]
    finite: Collection[str] = ()
    """The names of those that must be finite; others, as a mask, may hold infinities."""

    @property
    def bytes(self) -> int:
        """Return the size of all tensors."""
        return sum(like.nbytes for like in self.likes.values())


@contextmanager
def open_weight_file(path: Path) -> Iterator[StoredWeights]:
    """Yield the weights of a safetensors file."""
    with ExitStack() as opened:
        file = _open_file(path, opened)
        likes = {name: _create_meta_tensor(file, name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        yield StoredWeights(likes, file.get_tensor)


@contextmanager
def open_checkpoint_weights(generation: CheckpointDir, averaged: bool) -> Iterator[StoredWeights]:
    """Yield the weights of a checkpoint, without buffers that a model does not save; chunks are joined as one is read.

    Each file is opened once. The checkpoint must have been verified.
    """
    manifest, plain = read_manifest(generation), read_rank_json(generation, 0)
    check_state_components(plain, str(generation.path))
    try:
        # The names of a checkpoint's tensors by the names that the model's `state_dict` has.
        weights, ema = plain["weights"], (plain["ema"] if averaged else None) or {"averages": {}, "buffers": {}}
        kept = {**weights["parameters"], **ema["averages"], **weights["buffers"], **ema["buffers"]}
        unsaved = set(weights["non_persistent_buffers"])
        stored = {name: entry[f"${TENSOR}"] for name, entry in kept.items() if name not in unsaved}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged_error(generation.path, error) from error
    with ExitStack() as opened:
        files: dict[int, Any] = {}

        def file_of(rank: int) -> Any:
            if rank not in files:
                files[rank] = _open_file(generation.path / name_tensors_file(rank), opened)
            return files[rank]

        def like(name: str) -> Tensor:
            cut = manifest.chunks.get(name)
            return (
                _create_meta_tensor(file_of(0), name)
                if cut is None
                else torch.empty(cut.shape, dtype=cut.dtype, device=_NOWHERE)
            )

        def read(name: str) -> Tensor:
            cut = manifest.chunks.get(stored[name])
            if cut is None:
                whole: Tensor = file_of(0).get_tensor(stored[name])
                return whole
            joined = torch.empty(cut.shape, dtype=cut.dtype)
            for chunk in cut.chunks():
                part = file_of(chunk.rank).get_tensor(stored[name])
                # An assignment would spread a smaller one over its place, without a word.
                if tuple(part.shape) != chunk.sizes:
                    raise _damaged_error(
                        generation.path, f"{name} is {tuple(part.shape)} in the file of rank {chunk.rank}"
                    )
                joined[chunk.place] = part
            return joined

        likes = {name: like(inside) for name, inside in stored.items()}
        yield StoredWeights(likes, read, plain["weights"]["parameters"].keys())


_NOWHERE = torch.device("meta")


def _damaged_error(path: Path, reason: object) -> BadData:
    return BadData(
        f"{path} cannot be read as weights: {reason}",
        allowed="what halfstep wrote",
        do=choose_caller_wording("halfstep verify RUN", "halfstep.verify(RUN)"),
    )


def _open_file(path: Path, opened: ExitStack) -> Any:
    try:
        check_safetensors_header(path)
        return opened.enter_context(safe_open(path, "pt"))
    except Exception as error:
        # A made-up file can cause any exception in the reader.
        raise _damaged_error(path, error) from error


def _create_meta_tensor(file: Any, name: str) -> Tensor:
    part = file.get_slice(name)
    return torch.empty(part.get_shape(), dtype=BY_NAME[part.get_dtype()], device=_NOWHERE)


@dataclass(frozen=True)
class ShardedExport(PageResult):
    """A folder of weights in several files, and where they come from."""

    run: Path
    folder: Path
    source: str
    averaged: bool
    files: list[str]
    tensors: int
    bytes: int

    def page(self) -> Page:
        """Return the page about the folder and its content."""
        files = self.files
        size = f"{self.tensors} tensors, {numbers.format_bytes(self.bytes)}, in {len(files)} files"
        lines = (
            f"{self.source}{', averaged' if self.averaged else ''}",
            f"{files[0]} to {files[-1]}" if len(files) > 1 else files[0],
        )
        first = Paragraph((Span(escape_to_one_line(self.folder), strong=True), f": {size}"), wrap=False)
        return Page(f"export of {self.run}", (first, Items(tuple(map(escape_to_one_line, lines)))))


def export_layout(
    run: Path, folder: Path, most: int, which: str | None, average: bool | None, own: type[Task] | None
) -> ShardedExport:
    """Write a run's weights into a new folder, in files of up to `most` bytes, and return a report.

    The model is not built. Raises as `exported` and `write_layout` do.
    """
    task = load_saved_task(run, own)
    chosen, averaged = choose_export_weights(run, task, which, average)
    generation = find_newest_checkpoint(run) if chosen == CHECKPOINT else None
    path = run / name_weights_file(chosen, averaged)
    notes = {"averaged": str(averaged).lower(), "halfstep": __version__}
    with open_checkpoint_weights(generation, averaged) if generation else open_weight_file(path) as weights:
        files = write_layout(weights, folder, most, notes)
    source = generation.name if generation else path.name
    return ShardedExport(run, folder, source, averaged, files, len(weights.likes), weights.bytes)


def write_layout(weights: StoredWeights, folder: Path, most: int, notes: Mapping[str, str]) -> list[str]:
    """Write the layout into a new folder, files of up to `most` bytes of tensors; return the names of the files.

    One tensor is in memory at a time. Every file is read back and compared before the folder gets its name. Raises
    BadData for weights that are not finite, and FileExistsError where the folder exists.
    """
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "it exists already")
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    shards = split_into_shards(weights.likes, most)
    names = [WHOLE] if len(shards) == 1 else [SHARD.format(n + 1, len(shards)) for n in range(len(shards))]
    draft.mkdir()
    try:
        for name, tensors in zip(names, shards, strict=True):
            _write_shard(weights, tensors, draft / name, notes)
            _verify_shard(weights, tensors, draft / name)
        if len(shards) > 1:
            placed = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": weights.bytes}, "weight_map": dict(sorted(placed.items()))}
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            flush(draft / INDEX)
        flush(draft)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    flush(folder.parent)
    return names


def split_into_shards(likes: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Return the names for each file, in the model's order; a tensor larger than `most` gets a separate file."""
    shards: list[list[str]] = [[]]
    room = most
    for name, like in likes.items():
        if shards[-1] and like.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= like.nbytes
    return shards


def _write_shard(weights: StoredWeights, names: list[str], path: Path, notes: Mapping[str, str]) -> None:
    # Wider dtypes first: readers require each tensor to be aligned to its element size.
    names.sort(key=lambda name: -weights.likes[name].element_size())
    table = encode_header(
        {name: weights.likes[name] for name in names}, dict(sorted({"format": "pt", **notes}.items()))
    )
    with path.open("xb") as file:
        file.write(table)
        for name in names:
            tensor = weights.read(name)
            if bool(tensor.isnan().any()) or (name in weights.finite and not bool(torch.isfinite(tensor).all())):
                raise BadData(
                    f"{name} is not finite",
                    allowed="finite weights",
                    do=f"write {format_option_with_value('weights', 'best')}",
                )
            file.write(content(tensor))
    flush(path)


def _verify_shard(weights: StoredWeights, names: list[str], path: Path) -> None:
    with safe_open(path, "pt") as written:
        if sorted(written.keys()) != sorted(names) or not all(
            torch.equal(written.get_tensor(name), weights.read(name)) for name in names
        ):
            raise OSError(errno.EIO, "the data read back differ from the data written")
