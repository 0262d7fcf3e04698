"""Read precomputed embeddings from a file, matched to their images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halfstep.checkpoint.reading import load_tensors
from halfstep.checkpoint.sealed import MOST_TENSORS
from halfstep.data.dataset import BadSample, Files, Sample, Source, WrappedSource
from halfstep.data.folders import format_name_examples
from halfstep.errors import BadData, format_error_line
from halfstep.numbers import format_shape

ALLOWED = f"a .safetensors file with a tensor for each image by its name, at most {MOST_TENSORS:,} of them"
SHAPES = "tokens × width or width, floating numbers, the same for all images"


class EmbeddingSource(WrappedSource):
    """A source that adds `embedding` in fp32: the tensor with the sample's name, after the prefix `under`.

    Missing names, duplicate names and different shapes raise BadData at once. The values are read on demand: a
    non-finite embedding is a bad sample.
    """

    def __init__(self, source: Source, file: str | Path, under: str = "") -> None:
        super().__init__(source)
        self.file, self.under = Path(file), under
        self._tensors: dict[str, Tensor] | None = None
        names = [self._named(index) for index in range(len(source))]
        # At once: a name that is missing would otherwise end the run hours later.
        _require_unique_names(names)
        _require_all_names(names, self._opened(), self.file)
        _require_equal_shapes(names, self._opened(), self.file)

    def __getstate__(self) -> dict[str, object]:
        # A worker opens the file by itself, instead of being sent its whole content.
        return {**self.__dict__, "_tensors": None}

    def read(self, index: int) -> Sample:
        """Return the sample with its embedding; raise BadSample if one cannot be read."""
        return {**self.source.read(index), "embedding": self._embedding(index)}

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image."""
        return {**self.source.without_image(index), "embedding": self._embedding(index)}

    def files_of(self, index: int) -> Files:
        """Return the files of the sample, and the file of embeddings."""
        return [*super().files_of(index), (f"embeddings/{self.file.name}", self.file)]

    @property
    def chosen(self) -> None:
        """None: the index of the images does not stand for the embeddings."""
        return None

    def _embedding(self, index: int) -> Tensor:
        # A copy: the tensor is a view of the file, and must not be changed for the next epoch.
        embedding = self._opened()[self._named(index)].to(torch.float32, copy=True)
        if not torch.isfinite(embedding).all():
            raise BadSample(self.name(index), f"its embedding in {self.file} is not finite")
        return embedding

    def _named(self, index: int) -> str:
        return self.under + self.key(index)

    def _opened(self) -> dict[str, Tensor]:
        """Return the tensors as views of the file: their values are loaded when they are read."""
        if self._tensors is None:
            self._tensors = _load_embeddings(self.file)
        return self._tensors


def _load_embeddings(file: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(file.resolve())  # the user's own link is followed
    except Exception as error:
        # A forged file may raise anything: KeyError, TypeError, OverflowError, ...
        raise BadData(
            f"the embeddings {file} cannot be read: {format_error_line(error)[:200]}",
            allowed=ALLOWED,
            do="check data.embeddings, or write the file again",
        ) from error


def _require_unique_names(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BadData(
            f"{len(twice)} names belong to several samples: {format_name_examples(twice)}",
            allowed="a name for each sample: one embedding cannot belong to two",
            do="rename shards that have the same name in different folders",
        )


def _require_all_names(names: list[str], tensors: Mapping[str, Tensor], file: Path) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        has = next(iter(tensors), None)
        raise BadData(
            f"{file} has no embedding for {len(missing)} of {len(names)} images: {format_name_examples(missing)}",
            allowed=ALLOWED + ("; it contains nothing" if has is None else f"; it contains {has[:200]!r}, for example"),
            do="name each tensor as the image is named below data.path, or remove these images",
        )


def _require_equal_shapes(names: list[str], tensors: Mapping[str, Tensor], file: Path) -> None:
    for name in names:
        tensor, first = tensors[name], tensors[names[0]]
        sound = tensor.is_floating_point() and 1 <= tensor.ndim <= 2 and tensor.numel() > 0
        if not sound or tensor.shape != first.shape:
            raise BadData(
                f"{file} has {_describe_tensor(tensor)} for {name}"
                + (f", and {_describe_tensor(first)} for {names[0]}" if tensor.shape != first.shape else ""),
                allowed=SHAPES,
                do="write the file again, with one encoder for all images",
            )


def _describe_tensor(tensor: Tensor) -> str:
    return f"{format_shape(tensor.shape)} of type {str(tensor.dtype).removeprefix('torch.')}"
