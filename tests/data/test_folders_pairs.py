"""Images and their conditions, paired by name; and images alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from faults.bad_images import DAMAGED, picture
from halfstep.data.dataset import BadSample, Subset
from halfstep.data.fingerprint import fingerprint
from halfstep.data.folders import ImagePairs, UnlabeledImages, resolve_pair_folders
from halfstep.errors import BadData, Unsafe


def put(path: Path, size: tuple[int, int] = (8, 8), number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number, 64).resize(size).save(path)
    return path


def pairs(root: Path, channels: int = 3, condition_channels: int = 1) -> ImagePairs:
    return ImagePairs(*resolve_pair_folders(root, "condition"), channels, condition_channels)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(("a", "b", "area/c")):
        put(tmp_path / "images" / f"{name}.png", (8, 6), number)
        put(tmp_path / "conditions" / f"{name}.tif", (8, 6), number + 10)
    return tmp_path


def test_each_image_comes_with_its_condition(root: Path) -> None:
    source = pairs(root)
    assert [source.key(n) for n in range(len(source))] == ["a.png", "area/c.png", "b.png"]
    for n, (image, condition) in enumerate(((0, 10), (2, 12), (1, 11))):
        sample = source.read(n)
        assert set(sample) == {"image", "condition"}
        assert sample["image"].shape == (3, 6, 8)
        assert sample["condition"].shape == (1, 6, 8)
        assert np.array_equal(sample["image"].permute(1, 2, 0), np.array(picture(image, 64).resize((8, 6))))
        gray = np.array(picture(condition, 64).resize((8, 6)).convert("L"))
        assert np.array_equal(sample["condition"][0], gray)
        assert torch.equal(source.without_image(n)["condition"], sample["condition"])
        assert set(source.without_image(n)) == {"condition"}


def test_both_keep_their_own_depth(tmp_path: Path) -> None:
    for folder, kind in (("images", np.uint16), ("conditions", np.float32)):
        (tmp_path / folder).mkdir()
        Image.fromarray(np.full((4, 4), 7, kind)).save(tmp_path / folder / "a.tif")
    sample = pairs(tmp_path, 1).read(0)
    assert sample["image"].dtype == torch.uint16
    assert sample["condition"].dtype == torch.float32


def test_the_image_is_not_decoded_for_its_condition_alone(root: Path) -> None:
    (root / "images" / "a.png").write_bytes(DAMAGED["cut.png"]())
    some = Subset(pairs(root), [2, 0])
    with pytest.raises(BadSample, match=r"a\.png"):
        some.read(1)
    assert torch.equal(some.without_image(1)["condition"], pairs(root).without_image(0)["condition"])


@pytest.mark.wording
def test_files_without_a_partner_are_listed(root: Path) -> None:
    put(root / "images" / "d.png")
    put(root / "conditions" / "e.png")
    with pytest.raises(BadData, match="2 files without a partner") as caught:
        pairs(root)
    assert str(root / "images" / "d.png") in caught.value.given
    assert str(root / "conditions" / "e.png") in caught.value.given
    assert "conditions/a.png" in caught.value.allowed
    assert "mask" not in str(caught.value)


def test_a_name_is_the_whole_name(tmp_path: Path) -> None:
    """For masks `a_mask` belongs to `a`; a condition has no such ending."""
    put(tmp_path / "images" / "a_mask.png")
    put(tmp_path / "conditions" / "a_mask.png")
    assert pairs(tmp_path).key(0) == "a_mask.png"


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_a_condition_that_cannot_be_read_is_a_bad_sample(tmp_path: Path, name: str) -> None:
    put(tmp_path / "images" / "x.png")
    place = tmp_path / "conditions" / f"x{Path(name).suffix}"
    place.parent.mkdir()
    place.write_bytes(DAMAGED[name]())
    with pytest.raises(BadSample, match="conditions/x"):
        pairs(tmp_path).read(0)


def test_channels_that_a_condition_has_not_are_a_bad_sample(root: Path) -> None:
    with pytest.raises(BadSample, match="7 channels need"):
        pairs(root, condition_channels=7).read(0)


@pytest.mark.parametrize("size", [(8, 6), (4, 3), (16, 12), (3, 2)])
def test_a_condition_may_be_of_another_size(tmp_path: Path, size: tuple[int, int]) -> None:
    put(tmp_path / "images" / "a.png", (8, 6))
    put(tmp_path / "conditions" / "a.png", size)
    assert pairs(tmp_path).read(0)["condition"].shape == (1, size[1], size[0])


@pytest.mark.wording
@pytest.mark.parametrize("size", [(60, 80), (80, 80), (40, 60)])
def test_a_condition_of_another_form_is_an_error_with_both_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    put(tmp_path / "images" / "a.png", (80, 60))
    put(tmp_path / "conditions" / "a.png", size)
    with pytest.raises(BadData, match=f"80 × 60 pixels, and its condition {size[0]} × {size[1]}"):
        pairs(tmp_path).read(0)


@pytest.mark.wording
def test_both_folders_must_be_there_and_hold_an_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(BadData, match=r"condition folder .* does not exist"):
        pairs(tmp_path)
    (tmp_path / "conditions").mkdir()
    with pytest.raises(BadData, match="contains no image"):
        pairs(tmp_path)


@pytest.mark.wording
def test_links_that_leave_the_folder_are_refused(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = put(tmp_path_factory.mktemp("elsewhere") / "secret.png")
    (root / "conditions" / "d.png").symlink_to(secret)
    put(root / "images" / "d.png")
    with pytest.raises(Unsafe, match=r"secret\.png"):
        pairs(root)


def test_a_changed_condition_is_noticed(root: Path) -> None:
    source = pairs(root)
    assert [key for key, _ in source.files_of(0)] == ["images/a.png", "conditions/a.tif"]
    before = fingerprint(source)
    put(root / "conditions" / "b.tif", (8, 6), 99)
    assert fingerprint(pairs(root)) != before


@pytest.mark.wording
def test_images_alone_are_all_that_lie_below_a_folder(root: Path) -> None:
    source = UnlabeledImages(root / "images", 1)
    assert [source.key(n) for n in range(len(source))] == ["a.png", "area/c.png", "b.png"]
    assert set(source.read(1)) == {"image"}
    assert source.read(1)["image"].shape == (1, 6, 8)
    assert source.without_image(1) == {}
    (root / "nothing").mkdir()
    with pytest.raises(BadData, match="nothing contains no image"):
        UnlabeledImages(root / "nothing")
