"""Clips out of video files: the right frames, by seeking, and a plain reason where a file is damaged."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.data import video
from halfstep.data.dataset import BadSample
from halfstep.data.video import ClipWindows, VideoFiles
from halfstep.errors import BadData, MissingExtra

av = pytest.importorskip("av")
BITS = 6


def write(
    path: Path,
    count: int = 60,
    size: int = 64,
    codec: str = "mpeg4",
    rate: object = 25,
    last: int | None = None,
    **options: str,
) -> Path:
    """A film whose frames show their number in stripes, white for 1, with a start to seek to every dozen.

    The last frame is shown for the time of `last` frames.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        stream.codec_context.gop_size = 12
        packets = []
        for n in range(count):
            stripes = np.array([n >> bit & 1 for bit in range(BITS)], np.uint8) * 255
            picture = np.repeat(stripes, -(-size // BITS))[:size, None, None].repeat(size, 1).repeat(3, 2)
            packets += stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
        packets += stream.encode()
        if last is not None:
            packets[-1].duration = last
        for packet in packets:
            container.mux(packet)
    return path


def numbers(image: torch.Tensor) -> list[int]:
    high = -(-image.shape[-2] // BITS)
    middles = image[:, 1, high // 2 :: high, 5] > 127
    return [sum(int(bit) << n for n, bit in enumerate(row)) for row in middles.tolist()]


@pytest.mark.parametrize("suffix", [".mp4", ".avi", ".mkv", ".mov", ".MP4"])
def test_every_window_has_its_frames(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a{suffix}")
    windows = ClipWindows(VideoFiles(tmp_path), 4, 3)
    assert len(windows) == 5
    for n in range(5):
        sample = windows.read(n)
        assert sample["image"].shape == (4, 3, 64, 64)
        assert sample["image"].dtype == torch.uint8
        assert numbers(sample["image"]) == [12 * n, 12 * n + 3, 12 * n + 6, 12 * n + 9]


def test_frames_are_found_in_any_order_and_at_odd_rates(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", rate=Fraction(30000, 1001))
    source = VideoFiles(tmp_path)
    assert source.length(0) == 60
    for first in (59, 0, 31, 13, 12, 11, 47):
        assert numbers(source.part(0, range(first, first + 1))["image"]) == [first]


def test_frames_that_are_stored_out_of_order_are_shown_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", bf="2")
    source = VideoFiles(tmp_path)
    for first in (0, 5, 12, 25, 50):
        assert numbers(source.part(0, range(first, first + 8))["image"]) == list(range(first, first + 8))


@pytest.mark.parametrize("suffix", [".mp4", ".mov"])
def test_a_last_frame_that_is_shown_for_long_stands_for_all_of_its_time(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", 8, last=20)
    source = VideoFiles(path)
    assert source.length(0) == 8
    found = numbers(source.part(0, range(8))["image"])
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-4:] == [7] * 4
    with pytest.raises(BadSample, match="ends before frame 8"):
        source.part(0, range(4, 9))


def test_decoding_begins_near_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.mp4")
    monkeypatch.setattr(video, "MOST_BEFORE", 14)
    assert numbers(VideoFiles(tmp_path).part(0, range(55, 58))["image"]) == [55, 56, 57]
    monkeypatch.setattr(video, "MOST_BEFORE", 2)
    with pytest.raises(BadSample, match="no nearer start"):
        VideoFiles(tmp_path).part(0, range(58, 59))


def test_a_film_that_lies_on_its_side_is_turned_upright(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", 2)
    lying = VideoFiles(path).part(0, range(1, 2))["image"][0].int()
    content = bytearray(path.read_bytes())
    # The matrix of a track, 44 bytes behind its name: a quarter turn to the right.
    matrix = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 64 * 65536, 0, 2**30)
    at = content.index(b"tkhd") + 44
    content[at : at + len(matrix)] = matrix
    path.write_bytes(content)
    upright = VideoFiles(path).part(0, range(1, 2))["image"][0].int()
    assert not torch.equal(upright, lying)
    assert torch.equal(upright, lying.rot90(-1, (1, 2)))


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    path = write(tmp_path / "some" / "a.mp4", 8)
    write(tmp_path / "some" / "b.mp4", 8)
    source = VideoFiles(path)
    assert len(source) == 1
    assert source.name(0) == str(path)
    assert list(source.files_of(0, range(1))) == [("a.mp4", str(path))]


def test_a_source_survives_the_way_to_a_worker(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", 8)
    windows = ClipWindows(VideoFiles(tmp_path), 4)
    windows.read(0)
    assert numbers(pickle.loads(pickle.dumps(windows)).read(1)["image"]) == [4, 5, 6, 7]


@pytest.mark.parametrize("damage", ["empty", "noise", "cut", "picture", "playlist"])
def test_damaged_files_are_bad_samples_and_others_go_on(tmp_path: Path, damage: str) -> None:
    good = write(tmp_path / "b.mp4", 8).read_bytes()
    content = {
        "empty": b"",
        "noise": np.random.default_rng(0).bytes(5000),
        "cut": good[: len(good) // 3],
        "picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "playlist": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{tmp_path / 'b.mp4'}\n#EXT-X-ENDLIST\n".encode(),
    }[damage]
    (tmp_path / "a.mp4").write_bytes(content)
    windows = ClipWindows(VideoFiles(tmp_path), 4)
    assert [windows.key(n) for n in range(len(windows))] == ["a.mp4#0", "b.mp4#0", "b.mp4#4"]
    with pytest.raises(BadSample, match=r"a\.mp4: (cannot be decoded: [A-Z][a-z]|empty, 0 bytes$)"):
        windows.read(0)
    assert numbers(windows.read(1)["image"]) == [0, 1, 2, 3]


def test_a_file_that_is_damaged_in_its_middle_gives_no_wrong_frames_in_silence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avi")
    content = bytearray(path.read_bytes())
    with pytest.raises(BadSample, match="ends before frame"):
        VideoFiles(path).part(0, range(58, 64))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadSample):
        VideoFiles(path).part(0, range(50, 58))


def test_pipes_are_not_waited_for_and_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "a.mp4")
    source = VideoFiles(tmp_path)
    assert source.length(0) == 0
    with pytest.raises(BadSample, match="pipe"):
        source.part(0, range(2))
    (tmp_path / "a.mp4").unlink()
    write(tmp_path / "a.mp4", 8)
    monkeypatch.setattr(video, "MOST_PIXELS", 100)
    with pytest.raises(BadSample, match="64 × 64 pixels"):
        source.part(0, range(2))
    monkeypatch.setattr(video, "MOST_FRAMES", 5)
    assert source.length(0) == 0
    monkeypatch.setattr(video, "MOST_BYTES", 10)
    with pytest.raises(BadSample, match="bytes"):
        source.part(0, range(2))


@pytest.mark.wording
def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadData, match="contains no video"):
        VideoFiles(tmp_path)
    with pytest.raises(BadData, match="does not exist"):
        VideoFiles(tmp_path / "none")
    write(tmp_path / "a.mp4", 4)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra) as caught:
        VideoFiles(tmp_path)
    assert "pip install 'halfstep[video]'" in caught.value.do


class Misled:
    """A film of 60 frames whose index leads to frame 40, wherever one seeks but to the beginning."""

    average_rate, time_base, start_time, at = Fraction(25), Fraction(1, 25), 0, 0

    def seek(self, offset: int, stream: object) -> None:
        self.at = 40 if offset else 0

    def decode(self, stream: object) -> Iterator[Any]:
        for number in range(self.at, 60):
            yield av.VideoFrame.from_ndarray(np.full((4, 4, 3), number, np.uint8), format="rgb24"), number


def test_a_wrong_index_costs_time_and_not_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbered(container: Misled, stream: Misled, start: int, per_frame: Fraction) -> Iterator[tuple[int, Any]]:
        assert per_frame == 1
        return ((number, frame) for frame, number in container.decode(stream))

    monkeypatch.setattr(video, "_iterate_numbered_frames", numbered)
    for first in (20, 45, 0):
        film = Misled()
        found = [int(frame[0, 0, 0]) for frame in video._decode_wanted_frames(film, film, range(first, first + 5, 2))]
        assert found == [first, first + 2, first + 4]
