"""What diffusion learns from: any data with any condition it can have, and plain words where it cannot."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from faults.bad_images import encoded, picture
from halfstep.data.dataset import Source
from halfstep.errors import BadData, BadRecipe
from halfstep.tasks.options.diffusion import DiffusionData
from halfstep.tasks.shared.sources import build_diffusion_sources
from halfstep.train.task import Split

DRAWN: dict[str, Any] = {"samples": 20, "size": 16, "channels": 1}


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(len(name)).save(root / name)
    return root


def tar(path: Path, mask: bool = False, label: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for n in range(6):
            members = {f"{n:04d}.png": encoded(picture(n))} | ({f"{n:04d}.cls": b"%d" % (n % 3)} if label else {})
            for name, content in (members | ({f"{n:04d}.mask.png": b"no mask at all"} if mask else {})).items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def sources(condition: str, **data: Any) -> dict[Split, Source]:
    return build_diffusion_sources(DiffusionData(**data), condition)[0]


def keys(source: Any) -> list[str]:
    return [source.key(n) for n in range(len(source))]


@pytest.mark.parametrize("val", ["val", 0.5])
def test_a_folder_of_classes(tmp_path: Path, val: str | float) -> None:
    put(tmp_path, "train/cat/a.png", "train/cat/b.png", "train/dog/c.png", "train/dog/d.png", "val/dog/e.png")
    found, names = build_diffusion_sources(DiffusionData(name="folder", path=str(tmp_path), val=val), "class")
    assert names == ["cat", "dog"]
    assert sum(map(len, found.values())) == (5 if val == "val" else 4)
    for source in found.values():
        for n, key in enumerate(keys(source)):
            assert source.read(n)["label"] == names.index(key.split("/")[0])


@pytest.mark.parametrize("condition", ["none", "embedding"])
@pytest.mark.parametrize("names", [("a.png", "b.png", "c.png"), ("cat/a.png", "dog/b.png", "dog/deep/c.png")])
@pytest.mark.parametrize("val", ["val", 0.3])
def test_images_without_classes(tmp_path: Path, condition: str, names: tuple[str, ...], val: str | float) -> None:
    put(tmp_path / "set" / "train", *names)
    put(tmp_path / "set" / "val", *names)
    file = tmp_path / "e.safetensors"
    save_file({f"{s}/{name}": torch.tensor([float(s == "val")]) for s in ("train", "val") for name in names}, file)
    found, classes = build_diffusion_sources(
        DiffusionData(name="folder", path=str(tmp_path / "set"), val=val, embeddings=str(file)), condition
    )
    assert classes == []
    assert sorted(keys(found["train"]) + keys(found["val"])) == sorted(names * (2 if val == "val" else 1))
    for split, source in found.items():
        sample = source.read(0)
        assert set(sample) == {"image"} | ({"embedding"} if condition == "embedding" else set())
        # A share is taken from the training folder: nothing in `val` is seen.
        assert ("/val/" in source.name(0)) == (val == "val" and split == "val")
        if condition == "embedding":
            assert sample["embedding"].item() == float("/val/" in source.name(0))


def test_a_class_that_is_called_train_is_no_split(tmp_path: Path) -> None:
    put(tmp_path, "train/a.png", "plane/b.png", "bus/c.png", "bus/d.png")
    found = sources("none", path=str(tmp_path), val=0.3)
    assert sorted(keys(found["train"]) + keys(found["val"])) == ["bus/c.png", "bus/d.png", "plane/b.png", "train/a.png"]


@pytest.mark.parametrize(("condition", "parts"), [("none", {"image"}), ("class", {"image", "label"})])
def test_shards_give_what_is_asked_for_and_no_more(tmp_path: Path, condition: str, parts: set[str]) -> None:
    """A mask that cannot be read is nobody's trouble here."""
    tar(tmp_path / "s.tar", mask=True)
    found, names = build_diffusion_sources(DiffusionData(name="shards", path=str(tmp_path), val=0.3), condition)
    assert names == (["0", "1", "2"] if condition == "class" else [])
    assert all(set(source.read(n)) == parts for source in found.values() for n in range(len(source)))


def test_embeddings_of_shards_go_by_their_keys(tmp_path: Path) -> None:
    tar(tmp_path / "set" / "s.tar")
    file = tmp_path / "e.safetensors"
    save_file({f"s.tar/{n:04d}": torch.full((2, 3), float(n)) for n in range(6)}, file)
    found = sources("embedding", name="shards", path=str(tmp_path / "set" / "s.tar"), val=0.3, embeddings=str(file))
    for source in found.values():
        for n, key in enumerate(keys(source)):
            sample = source.read(n)
            assert sample["embedding"].tolist() == [[float(key[-4:])] * 3] * 2
            assert torch.equal(sample["image"].permute(1, 2, 0), torch.from_numpy(np.array(picture(int(key[-4:])))))


@pytest.mark.parametrize("inside", [True, False])
def test_pairs_of_conditions_and_images(tmp_path: Path, inside: bool) -> None:
    splits = ("train", "val") if inside else ("",)
    for split in splits:
        for folder in ("images", "conditions"):
            put(tmp_path / split / folder, "a.png", "b.png", "c.png")
    found = sources(
        "image", name="pairs", path=str(tmp_path), val="val" if inside else 0.3, channels=1, condition_channels=2
    )
    assert sum(map(len, found.values())) == 3 * len(splits)
    for source in found.values():
        sample = source.read(0)
        assert sample["image"].shape == (1, 16, 16)
        assert sample["condition"].shape == (2, 16, 16)


@pytest.mark.wording
def test_the_images_of_pairs_can_be_had_alone(tmp_path: Path) -> None:
    put(tmp_path / "images", "a.png", "b.png")
    found = sources("none", name="pairs", path=str(tmp_path), val=0.5)
    assert all(set(source.read(0)) == {"image"} for source in found.values())
    with pytest.raises(BadData, match=r"condition folder .* does not exist"):
        sources("image", name="pairs", path=str(tmp_path), val=0.5)


def test_drawn_shapes_and_maps() -> None:
    shapes, names = build_diffusion_sources(DiffusionData(name="shapes", classes=3, **DRAWN), "class")
    assert len(names) == 3
    assert set(shapes["val"].read(0)) == {"image", "label"}
    maps, none = build_diffusion_sources(DiffusionData(name="maps", condition_channels=2, **DRAWN), "image")
    assert none == []
    sample = maps["train"].read(0)
    assert sample["image"].shape == (1, 16, 16)
    assert sample["condition"].shape == (2, 16, 16)
    for found in (shapes, maps):
        assert len(found["train"]) + len(found["val"]) == 20
        assert min(map(len, found.values())) >= 1


@pytest.mark.wording
@pytest.mark.parametrize(
    ("condition", "name", "word"),
    [
        ("class", "pairs", "data.name=folder"),
        ("class", "maps", "data.name=folder"),
        ("image", "folder", "data.name=pairs"),
        ("image", "shards", "data.name=pairs"),
        ("image", "shapes", "data.name=pairs"),
        ("embedding", "folder", "data.embeddings=FILE"),
        ("embedding", "shapes", "data.embeddings=FILE"),
    ],
)
def test_conditions_that_the_data_has_not_are_refused(condition: str, name: str, word: str) -> None:
    with pytest.raises(BadRecipe, match=f"model.condition={condition}") as caught:
        sources(condition, name=name, **DRAWN)
    assert word in caught.value.do
    assert "model.condition=none" in caught.value.do


@pytest.mark.wording
def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    with pytest.raises(BadData, match="nowhere"):
        sources("none", path=str(tmp_path / "nowhere"), val=0.5)
    with pytest.raises(BadData, match="split of 1 sample "):
        sources("none", path=str(tmp_path), val=0.5)
    with pytest.raises(BadData, match="no class folders"):
        sources("class", path=str(tmp_path), val=0.5)


@pytest.mark.parametrize("apart", [True, False])
def test_validation_may_lie_anywhere(tmp_path: Path, apart: bool) -> None:
    put(tmp_path / "set" / ("train" if apart else ""), "a.png", "b.png")
    put(tmp_path / "other", "c.png")
    found = sources("none", path=str(tmp_path / "set"), val=str(tmp_path / "other"))
    assert {split: keys(source) for split, source in found.items()} == {"train": ["a.png", "b.png"], "val": ["c.png"]}


@pytest.mark.wording
def test_two_samples_of_one_name_cannot_have_embeddings(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        tar(tmp_path / "set" / folder / "s.tar")
    file = tmp_path / "e.safetensors"
    save_file({f"s.tar/{n:04d}": torch.zeros(3) for n in range(6)}, file)
    with pytest.raises(BadData, match=r"6 names belong to several samples: s\.tar/0000") as caught:
        sources("embedding", name="shards", path=str(tmp_path / "set"), val=0.3, embeddings=str(file))
    assert "rename" in caught.value.do
    assert len(sources("none", name="shards", path=str(tmp_path / "set"), val=0.3)["train"]) > 0


@pytest.mark.wording
def test_labels_that_only_some_have_are_left_alone_where_nobody_asks_for_them(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar")
    tar(tmp_path / "b.tar", label=False)
    found = sources("none", name="shards", path=str(tmp_path), val=0.3)
    assert sum(map(len, found.values())) == 12
    with pytest.raises(BadData, match="differ in having a label"):
        sources("class", name="shards", path=str(tmp_path), val=0.3)
