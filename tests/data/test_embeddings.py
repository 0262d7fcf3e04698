"""Embeddings from a file: each with its image, sound, and found before the first step."""

from __future__ import annotations

import copy
import math
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from faults.bad_images import DAMAGED, picture
from halfstep.data.dataset import BadSample, split_source
from halfstep.data.embeddings import EmbeddingSource
from halfstep.data.fingerprint import fingerprint
from halfstep.data.folders import ImageFolder, UnlabeledImages
from halfstep.data.synthetic.shapes import ShapeLabels
from halfstep.errors import BadData

NAMES = ("cat/a.png", "cat/b.png", "dog/a.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(tmp_path / "set" / name)
    return tmp_path / "set"


def written(file: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, file)
    return file


def numbered(*shape: int, dtype: torch.dtype = torch.float32, under: str = "") -> dict[str, Tensor]:
    return {under + name: torch.full(shape, n + 0.5, dtype=dtype) for n, name in enumerate(NAMES)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 1)])
def test_each_image_has_its_own(root: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    file = written(root.parent / "e.safetensors", numbered(*shape, dtype=dtype))
    source = EmbeddingSource(UnlabeledImages(root), file)
    assert len(source) == 3
    for n in (2, 0, 1):
        sample = source.read(n)
        assert set(sample) == {"image", "embedding"}
        assert torch.equal(sample["image"], UnlabeledImages(root).read(n)["image"])
        assert sample["embedding"].dtype == torch.float32
        assert torch.equal(sample["embedding"], torch.full(shape, n + 0.5))
    assert source.name(2) == str(root / "dog" / "a.png")
    assert source.key(2) == "dog/a.png"


def test_what_the_source_has_besides_stays(root: Path) -> None:
    source = EmbeddingSource(ImageFolder(root), written(root.parent / "e.safetensors", numbered(4)))
    assert set(source.read(0)) == {"image", "label", "embedding"}
    (root / NAMES[0]).write_bytes(DAMAGED["cut.png"]())
    with pytest.raises(BadSample):
        source.read(0)
    assert set(source.without_image(0)) == {"label", "embedding"}


def test_a_name_may_have_the_split_before_it(root: Path) -> None:
    both = numbered(2) | {f"val/{name}": -tensor for name, tensor in numbered(2).items()}
    source = EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", both), "val/")
    assert source.read(1)["embedding"].tolist() == [-1.5, -1.5]
    assert source.key(1) == "cat/b.png", "which samples are for validation does not hang on it"


def test_drawn_samples_have_names_too(tmp_path: Path) -> None:
    drawn = ShapeLabels(6, 16)
    file = written(tmp_path / "e.safetensors", {drawn.name(n): torch.tensor([float(n)]) for n in range(6)})
    train, val = split_source(EmbeddingSource(drawn, file), 0.5)
    for part in (train, val):
        assert [part.read(n)["embedding"].item() for n in range(len(part))] == part.numbers


@pytest.mark.wording
def test_a_missing_name_is_named_with_one_that_is_there(root: Path) -> None:
    tensors = numbered(2, under="train/")
    with pytest.raises(BadData, match=r"no embedding for 3 of 3 images: cat/a\.png") as caught:
        EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", tensors))
    assert "'train/" in caught.value.allowed
    assert caught.value.exit_code == 65
    one_less = numbered(2)
    del one_less["dog/a.png"]
    with pytest.raises(BadData, match=r"1 of 3 images: dog/a\.png\n"):
        EmbeddingSource(UnlabeledImages(root), written(root.parent / "f.safetensors", one_less)).read(0)
    with pytest.raises(BadData, match="it contains nothing"):
        EmbeddingSource(UnlabeledImages(root), written(root.parent / "g.safetensors", {}))


@pytest.mark.wording
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.zeros(3), "3 of type float32 for dog/a.png, and 2 of type float32 for cat/a.png"),
        (torch.zeros(2, 1), "2×1"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
    ],
)
def test_embeddings_are_alike(root: Path, wrong: Tensor, words: str) -> None:
    tensors = numbered(2) | {"dog/a.png": wrong}
    with pytest.raises(BadData, match=words):
        EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", tensors))


@pytest.mark.wording
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 2, 2)])
def test_shapes_that_are_no_embedding_are_refused(root: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadData, match=r"e\.safetensors has .* for cat/a\.png\n") as caught:
        EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", numbered(*shape)))
    assert "tokens × width" in caught.value.allowed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_one_that_is_not_finite_is_a_bad_sample(root: Path, value: float) -> None:
    """1e300 is finite in the file, and not in fp32."""
    tensors = numbered(4, dtype=torch.float64)
    tensors["cat/b.png"][3] = value
    source = EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", tensors))
    with pytest.raises(BadSample, match=r"cat/b\.png: its embedding in .* is not finite"):
        source.read(1)
    with pytest.raises(BadSample, match="not finite"):
        source.without_image(1)
    assert source.read(0)["embedding"].isfinite().all()


def test_what_a_reader_changes_is_not_changed_for_the_next(root: Path) -> None:
    source = EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", numbered(4)))
    source.read(0)["embedding"].fill_(99.0)
    assert source.read(0)["embedding"].tolist() == [0.5] * 4


def test_a_copy_for_another_process_carries_no_tensors(root: Path) -> None:
    tensors = {name: torch.randn(1000, 100) for name in NAMES}
    source = EmbeddingSource(UnlabeledImages(root), written(root.parent / "e.safetensors", tensors))
    sent = pickle.dumps(source)
    assert len(sent) < 5_000
    for other in (pickle.loads(sent), copy.deepcopy(source)):
        assert torch.equal(other.read(2)["embedding"], tensors["dog/a.png"])


def _claims(length: int) -> bytes:
    return struct.pack("<Q", length) + b"{}"


BAD_FILES = {
    "empty": b"",
    "cut": None,
    "pickle": pickle.dumps({"cat/a.png": [1.0]}),
    "huge header": _claims(2**62),
    "large header": _claims(2**27),
    "no table": struct.pack("<Q", 2) + b"[]",
    "negative": struct.pack("<Q", 70) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'.ljust(70) + bytes(4),
}


@pytest.mark.wording
@pytest.mark.parametrize("kind", sorted(BAD_FILES))
def test_files_that_are_no_embeddings_are_refused(root: Path, kind: str) -> None:
    file = written(root.parent / "e.safetensors", numbered(64))
    content = BAD_FILES[kind]
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(BadData, match=r"e\.safetensors cannot be read") as caught:
        EmbeddingSource(UnlabeledImages(root), file)
    assert "data.embeddings" in caught.value.do


@pytest.mark.wording
def test_a_file_that_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(BadData, match=r"none\.safetensors cannot be read.*No such file"):
        EmbeddingSource(UnlabeledImages(root), root / "none.safetensors")
    with pytest.raises(BadData, match="cannot be read"):
        EmbeddingSource(UnlabeledImages(root), root)


def test_changed_embeddings_are_changed_data(root: Path) -> None:
    file = written(root.parent / "e.safetensors", numbered(4))
    before = fingerprint(EmbeddingSource(UnlabeledImages(root), file))
    assert fingerprint(EmbeddingSource(UnlabeledImages(root), file)) == before
    written(file, {name: tensor + 1 for name, tensor in numbered(4).items()})
    assert fingerprint(EmbeddingSource(UnlabeledImages(root), file)) != before


def test_a_link_to_a_file_is_the_file(root: Path) -> None:
    file = written(root.parent / "e.safetensors", numbered(2))
    link = root.parent / "link.safetensors"
    link.symlink_to(file)
    assert EmbeddingSource(UnlabeledImages(root), link).read(1)["embedding"].tolist() == [1.5, 1.5]
