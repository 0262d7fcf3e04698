"""The clips that a recipe for slots names: what is read, what is shared, and what can be pointed at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from halfstep.errors import BadData
from halfstep.tasks.options.slots import SlotsData
from halfstep.tasks.shared.sources import build_clip_sources, has_object_masks, open_clips


def put(folder: Path, count: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        Image.fromarray(np.full((6, 8, 3), n, np.uint8)).save(folder / f"{n}.png")


def data(**values: Any) -> SlotsData:
    return SlotsData(**{"frames": 2, "size": 16, **values})


def names(source: Any) -> set[str]:
    return {source.key(n).split("#")[0] for n in range(len(source))}


@pytest.mark.parametrize("name", ["shapes", "sprites"])
@pytest.mark.parametrize("val", [0.25, "val"])
def test_drawn_clips_are_shared(tmp_path: Path, name: str, val: float | str) -> None:
    save_file({"masks": np.ones((2, 5, 5), bool)}, tmp_path / "sprites.safetensors")
    sources = build_clip_sources(data(name=name, path=str(tmp_path), val=val, samples=40, objects=2))
    assert len(sources["train"]) + len(sources["val"]) == 40
    assert 3 <= len(sources["val"]) <= 18
    sample = sources["train"].read(0)
    assert sample["image"].shape == (2, 3, 16, 16)
    assert 1 <= int(sample["mask"].max()) <= 2
    assert not torch.equal(sample["image"], sources["val"].read(0)["image"])
    assert has_object_masks(data(name=name))


def test_frames_are_shared_by_recording(tmp_path: Path) -> None:
    for name in "abcde":
        put(tmp_path / name)
    given = data(name="frames", path=str(tmp_path), val=0.3)
    sources = build_clip_sources(given)
    assert names(sources["train"]) | names(sources["val"]) == set("abcde")
    assert not names(sources["train"]) & names(sources["val"])
    assert len(sources["train"]) + len(sources["val"]) == 10
    assert set(sources["train"].read(0)) == {"image"}
    assert not has_object_masks(given)


@pytest.mark.parametrize("val", [0.5, "val"])
def test_folders_of_splits_are_found_with_their_masks(tmp_path: Path, val: float | str) -> None:
    for split in ("train", "val"):
        for clip in ("a", "b"):
            put(tmp_path / split / "images" / f"{split}_{clip}")
            put(tmp_path / split / "masks" / f"{split}_{clip}")
    given = data(name="frames", path=str(tmp_path), val=val)
    sources = build_clip_sources(given)
    assert has_object_masks(given)
    assert sources["train"].read(0)["mask"].shape == (2, 6, 8)
    kinds = {name.split("_")[0] for name in names(sources["val"])}
    assert kinds == ({"val"} if val == "val" else {"train"})


@pytest.mark.wording
def test_a_folder_a_clip_and_a_video_can_be_pointed_at(tmp_path: Path) -> None:
    put(tmp_path / "one")
    given = data(name="frames")
    assert len(open_clips(tmp_path / "one", given)) == 2
    put(tmp_path / "two")
    assert len(open_clips(tmp_path, given)) == 4
    with pytest.raises(BadData, match="does not exist"):
        open_clips(tmp_path / "none", given)
    pytest.importorskip("av")
    (tmp_path / "film.mp4").write_bytes(b"damaged")
    for place in (tmp_path, tmp_path / "film.mp4"):
        assert "film.mp4" in open_clips(place, given).name(0)


@pytest.mark.wording
def test_too_short_clips_say_what_to_change(tmp_path: Path) -> None:
    put(tmp_path / "a", 3)
    with pytest.raises(BadData, match=r"data\.frames"):
        build_clip_sources(data(name="frames", path=str(tmp_path), frames=4))


@pytest.mark.parametrize("known", ["train", "val"])
def test_masks_count_where_a_model_is_judged(tmp_path: Path, known: str) -> None:
    for split in ("train", "val"):
        put(tmp_path / split / ("images/a" if split == known else "a"))
    put(tmp_path / known / "masks" / "a")
    given = data(name="frames", path=str(tmp_path), val="val")
    assert has_object_masks(given) == (known == "val")
    assert ("mask" in build_clip_sources(given)["val"].read(0)) == has_object_masks(given)
