"""Images as they are, in the channels that were asked for, or a plain reason."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from faults.bad_images import BOMBS, DAMAGED, encoded, picture, with_chunk
from halfstep.data import image_files, image_io
from halfstep.data.dataset import BadSample
from halfstep.data.image_io import read_image, scale_to_unit_range


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    into = io.BytesIO()
    image.save(into, kind, **options)
    return into.getvalue()


def pages(*arrays: Any) -> bytes:
    first, *rest = (Image.fromarray(array) for array in arrays)
    return saved(first, "TIFF", save_all=True, append_images=rest)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_pixels_come_as_they_are(kind: str, tmp_path: Path) -> None:
    image = picture(1)
    (tmp_path / "a").write_bytes(saved(image, kind))
    tensor = read_image(tmp_path / "a")
    assert tensor.dtype == torch.uint8
    assert tensor.is_contiguous()
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), np.array(image))
    assert torch.equal(tensor, read_image(saved(image, kind)))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_kinds_are_read(kind: str) -> None:
    gray = Image.new("RGB", (20, 10), (90, 120, 150))
    tensor = read_image(saved(gray, kind))
    assert tensor.shape == (3, 10, 20)
    assert (tensor.float().mean((1, 2)) - torch.tensor([90.0, 120.0, 150.0])).abs().max() < 4


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_kind_of_colour_becomes_the_channels_that_are_asked_for(mode: str, channels: int) -> None:
    plain = Image.new("RGB", (6, 4), (200, 200, 200)).convert(mode)
    tensor = read_image(saved(plain, "TIFF" if mode == "CMYK" else "PNG"), channels)
    assert tensor.shape == (channels, 4, 6)
    assert tensor.dtype == torch.uint8
    if channels in (2, 4):
        assert (tensor[-1] == 255).all()
    if mode != "1":
        assert (tensor[:1].int() - 200).abs().max() <= 5


def test_cmyk_jpeg_is_a_photograph_and_no_fault() -> None:
    tensor = read_image(saved(Image.new("RGB", (16, 16), (250, 10, 10)).convert("CMYK"), "JPEG"))
    assert tensor[0].float().mean() > 200
    assert tensor[1:].float().mean() < 60


def test_alpha_is_dropped_not_painted() -> None:
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert read_image(saved(clear, "PNG"))[:, 0, 0].tolist() == [10, 20, 30]
    assert read_image(saved(clear, "PNG"), 4)[:, 0, 0].tolist() == [10, 20, 30, 0]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_range(kind: str) -> None:
    values = np.array([[0, 1, 255], [256, 40000, 65535]], np.uint16)
    tensor = read_image(saved(Image.fromarray(values), kind), 1)
    assert tensor.dtype == torch.uint16
    assert tensor[0].tolist() == values.tolist()
    three = read_image(saved(Image.fromarray(values), kind), 3)
    assert three.shape == (3, 2, 3)
    assert torch.equal(scale_to_unit_range(three)[2], scale_to_unit_range(tensor)[0])
    assert scale_to_unit_range(tensor).max() == 1.0
    assert scale_to_unit_range(tensor)[0, 0, 1] == pytest.approx(1 / 65535)


def test_floating_tiff_comes_as_it_is() -> None:
    values = np.array([[-1.5, 0.0], [2.25, 1e6]], np.float32)
    tensor = read_image(saved(Image.fromarray(values), "TIFF"), 1)
    assert scale_to_unit_range(tensor)[0].tolist() == values.tolist()


def test_scaling_goes_by_the_range_of_the_type() -> None:
    assert scale_to_unit_range(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("channels", [2, 3, 7])
def test_pages_are_channels(channels: int) -> None:
    arrays = [np.full((3, 5), 1000 * n, np.uint16) for n in range(channels)]
    tensor = read_image(pages(*arrays), channels)
    assert tensor.dtype == torch.uint16
    assert tensor[:, 0, 0].tolist() == [1000 * n for n in range(channels)]


@pytest.mark.parametrize(
    ("arrays", "channels", "reason"),
    [
        ([np.zeros((3, 5), np.uint8)] * 4, 5, "4 pages"),
        ([np.zeros((3, 5), np.uint8)] * 6, 5, "more than 5 pages"),
        ([np.zeros((3, 5), np.uint8), np.zeros((3, 6), np.uint8)], 2, "differs in size"),
        ([np.zeros((3, 5), np.uint8), np.zeros((3, 5), np.uint16)], 2, "different depth"),
        ([np.zeros((3, 5), np.uint8)], 5, "5 channels need"),
    ],
)
def test_pages_that_do_not_fit_are_refused(arrays: list[Any], channels: int, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        read_image(pages(*arrays), channels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image_as_pillow_does(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    png = saved(picture(2).resize((9, 5)), "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(png)))
    assert np.array_equal(read_image(png).permute(1, 2, 0).numpy(), np.array(upright))


def test_damaged_exif_is_no_reason_to_lose_the_image() -> None:
    png = with_chunk(encoded(picture(4)), b"eXIf", b"MM\0*" + os.urandom(5000))
    assert torch.equal(read_image(png), read_image(encoded(picture(4))))


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_bad_samples(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(DAMAGED[name]())
    with pytest.raises(BadSample) as caught:
        read_image(path)
    assert caught.value.name == str(path)
    assert 5 < len(caught.value.reason) < 250
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_rejected_by_their_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = BOMBS[name]()
    monkeypatch.setattr(ImageFile.ImageFile, "load", _never)
    monkeypatch.setattr(Image.Image, "load", _never)
    with pytest.raises(BadSample, match=r"pixels|not an image"):
        read_image(content)


def _never(self: Image.Image) -> None:
    raise AssertionError("too late")


def test_the_cap_is_ours_and_not_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_io, "MOST_PIXELS", 255)
    with pytest.raises(BadSample, match="16 × 16 pixels, more than 255"):
        read_image(encoded(picture()))
    monkeypatch.setattr(image_io, "MOST_PIXELS", 256)
    read_image(encoded(picture()))
    with pytest.raises(BadSample, match="more than 256"):
        read_image(pages(*[np.zeros((8, 8), np.uint8)] * 5), 5)


def test_files_beyond_the_size_cap_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image_files, "MOST_BYTES", 1000)
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(1001)
    with pytest.raises(BadSample, match="1,001 bytes"):
        read_image(tmp_path / "sparse.png")
    with pytest.raises(BadSample, match="1,001 bytes"):
        read_image(bytes(1001))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path, reason in ((tmp_path / "pipe.png", "pipe"), (tmp_path, "folder"), (tmp_path / "no.png", "No such file")):
        with pytest.raises(BadSample, match=reason):
            read_image(path)


def test_no_handles_are_left_open(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(DAMAGED["cut.png"]())
    (tmp_path / "empty.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.png")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for name in ("bad.png", "empty.png", "pipe.png", "missing.png", ".") * 3:
        with pytest.raises(BadSample):
            read_image(tmp_path / name)
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert after == before


def test_other_formats_are_not_even_tried() -> None:
    gif = saved(picture().convert("P"), "GIF")
    with pytest.raises(BadSample, match="JPEG, PNG, WEBP, TIFF, BMP"):
        read_image(gif)


def test_random_damage_never_escapes() -> None:
    draw = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "TIFF", "BMP", "WEBP"):
        whole = saved(picture(5, 24), kind)
        for _ in range(60):
            spoiled = bytearray(whole)
            for place in draw.integers(0, len(whole), 6):
                spoiled[place] = draw.integers(256)
            try:
                assert read_image(bytes(spoiled)).shape[0] == 3
            except BadSample:
                continue


def test_compressed_text_is_bounded() -> None:
    png = with_chunk(encoded(picture()), b"iTXt", b"k\0\1\0\0\0" + zlib.compress(bytes(2**24)))
    with pytest.raises(BadSample, match=r"large|decoded"):
        read_image(png)


def test_a_lying_tiff_chain_does_not_hang() -> None:
    """Each page points to itself as the next one."""
    tags = [(256, 4, 4), (257, 4, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 0), (279, 4, 16)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    tiff = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", 8) + bytes(16)
    with pytest.raises(BadSample):
        read_image(tiff, 9)
