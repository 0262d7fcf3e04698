"""Latents on the disk: the right ones are found again, and no others; what is broken is never trained on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from halfstep.data import fingerprint as fingerprints
from halfstep.data.dataset import Sample
from halfstep.data.folders import ImageFolder
from halfstep.data.synthetic.shapes import ShapeLabels
from halfstep.errors import BadData, NotBegun, StorageFailed
from halfstep.tasks.latent_cache.cache import ABOUT, PER_CHUNK, CachedLatents, LatentChunks, load_or_encode_latents
from halfstep.tasks.latent_cache.encoding import MomentEncoder
from halfstep.train.signals import StopSignalHandler
from tests.tasks.latents_made import (
    MANY,
    PARTS,
    Counting,
    Pictures,
    encode,
    encoding,
    expected,
    kept,
    moments_of,
    overflows,
    stop_asked,
)
from tests.tasks.latents_made import own_cache as own_cache


def files(latents: CachedLatents) -> list[Path]:
    return [latents.chunks.path(chunk) for chunk in range(len(latents.chunks))]


def never(images: Tensor) -> Tensor:
    raise AssertionError("there was nothing to encode")


# -- found again ------------------------------------------------------------------------------------------------------


def test_each_sample_has_its_own_latents_and_they_are_encoded_once() -> None:
    how = Counting()
    latents = kept(how=how)
    assert how.images == MANY + 1, "each one, and one to know how much room they take"
    assert len(files(latents)) == 3
    for again in (latents, kept(how=never)):
        assert len(again) == MANY
        for number in (0, 1, PER_CHUNK - 1, PER_CHUNK, MANY - 1):
            assert torch.allclose(moments_of(again, number), expected(number), atol=1e-6), number
    assert "nothing encoded" in kept(how=never).notes[0]


def test_what_is_written_says_what_it_depends_on() -> None:
    latents = kept()
    written = json.loads((latents.chunks.folder / ABOUT).read_text())
    assert written["about"].items() >= PARTS.items()
    assert written["about"]["samples"] == str(MANY)


@pytest.mark.parametrize("part", ["autoencoder", "format", "size", "channels"])
def test_another_autoencoder_or_format_has_other_latents(part: str) -> None:
    one, other = kept(Pictures(8)), kept(Pictures(8), how=lambda images: encode(images) + 1.0, **{part: "other"})
    assert one.chunks.folder != other.chunks.folder
    assert torch.allclose(moments_of(other, 3), expected(3) + 1.0, atol=1e-6)


def test_other_names_or_another_count_have_other_latents() -> None:
    folders = {kept(source).chunks.folder for source in (Pictures(8), Pictures(9), Pictures(8, word="photograph"))}
    assert len(folders) == 3


def drawn(classes: int) -> ShapeLabels:
    return ShapeLabels(12, 16, classes)


def as_numbers(sample: Sample) -> Tensor:
    return sample["image"].float()[:1] / 255


def test_drawn_images_of_the_same_names_that_look_otherwise() -> None:
    how = MomentEncoder(encode, as_numbers, torch.empty(0).device)
    assert drawn(4).name(5) == drawn(6).name(5)
    one, other = (load_or_encode_latents(how, drawn(classes), parts=PARTS) for classes in (4, 6))
    assert one.chunks.folder != other.chunks.folder


def on_disk(folder: Path) -> ImageFolder:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(20):
            pixels = np.full((4, 4), 10 * number + len(name), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.bmp")
    return ImageFolder(folder, 1)


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_was_changed_does_not_find_the_old_latents(
    tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = MomentEncoder(encode, as_numbers, torch.empty(0).device)
    source = on_disk(tmp_path / "set")
    if not whole:  # a set that is too large to be read
        monkeypatch.setattr(fingerprints, "MOST_WHOLE_BYTES", 0)
        monkeypatch.setattr(fingerprints, "SAMPLED_FILES", 0)
    first = load_or_encode_latents(how, source, parts=PARTS)
    assert load_or_encode_latents(how, source, parts=PARTS).chunks.folder == first.chunks.folder
    changed = Path(source.name(4))  # not among the images that are looked at
    size = changed.stat().st_size
    Image.fromarray(np.full((4, 4), 99, np.uint8)).save(changed)
    assert changed.stat().st_size == size
    os.utime(changed, (1, 1))
    again = load_or_encode_latents(how, source, parts=PARTS)
    assert again.chunks.folder != first.chunks.folder
    assert torch.allclose(moments_of(again, 4)[0], torch.tensor(99 / 255), atol=1e-6)


def test_a_set_that_was_moved_finds_its_latents(tmp_path: Path) -> None:
    how = MomentEncoder(encode, as_numbers, torch.empty(0).device)
    first = load_or_encode_latents(how, on_disk(tmp_path / "here"), parts=PARTS)
    assert load_or_encode_latents(how, on_disk(tmp_path / "there"), parts=PARTS).chunks.folder == first.chunks.folder


# -- interrupted, damaged, full ---------------------------------------------------------------------------------------


class Interrupted(Counting):
    def __call__(self, images: Tensor) -> Tensor:
        if self.images >= PER_CHUNK + 64:
            raise KeyboardInterrupt
        return super().__call__(images)


def test_what_was_finished_before_an_interruption_is_used() -> None:
    with pytest.raises(KeyboardInterrupt):
        kept(how=Interrupted())
    how = Counting()
    latents = kept(how=how)
    assert how.images == MANY - PER_CHUNK + 1
    assert all(torch.allclose(moments_of(latents, n), expected(n), atol=1e-6) for n in range(0, MANY, 37))
    assert (latents.chunks.folder / ABOUT).is_file()


@pytest.mark.wording
def test_a_signal_ends_it_after_the_file_that_is_being_written() -> None:
    with StopSignalHandler(), pytest.raises(NotBegun, match="stopped by SIGTERM while encoding latents") as caught:
        kept(how=stop_asked)
    assert caught.value.exit_code == 75
    how = Counting()
    kept(how=how)
    assert how.images == MANY - PER_CHUNK + 1


def test_a_file_that_is_cut_off_or_gone_is_encoded_again() -> None:
    latents = kept()
    one, two, _ = files(latents)
    one.write_bytes(one.read_bytes()[:-40])
    two.unlink()
    how = Rounded()
    again = kept(how=how)
    assert how.images == 2 * PER_CHUNK + 1
    assert all(torch.allclose(moments_of(again, n), expected(n), atol=1e-3) for n in range(0, MANY, 37))
    kept(how=never)


class Rounded(Counting):
    """Another machine: the last digits are others, and so is the SHA-256."""

    def __call__(self, images: Tensor) -> Tensor:
        return super().__call__(images) + 1e-4


class Overtaken(Rounded):
    """Another run begins and ends while this one is at its second file."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = True

    def __call__(self, images: Tensor) -> Tensor:
        if self.alone and self.images > PER_CHUNK:
            self.alone = False
            kept()
        return super().__call__(images)


def test_runs_that_encode_the_same_at_once_leave_nothing_that_is_refused() -> None:
    how = Overtaken()
    latents = kept(how=how)
    assert not how.alone
    for again in (latents, kept(how=never)):
        assert all(torch.allclose(moments_of(again, n), expected(n), atol=1e-3) for n in range(0, MANY, 37))


def test_a_sample_that_could_not_be_read_for_a_moment_is_not_lost_for_ever() -> None:
    assert kept(Pictures(MANY, unreadable=(7,))).moments(7) is None
    how = Counting()
    latents = kept(Pictures(MANY), how=how)
    assert how.images == PER_CHUNK + 1, "its file alone"
    assert torch.allclose(moments_of(latents, 7), expected(7), atol=1e-6)
    kept(Pictures(MANY, unreadable=(7,)), how=never)


@pytest.mark.parametrize("place", [0, 9, 30, 5000, -5, -20, -40])
def test_a_file_in_which_a_bit_was_flipped_is_encoded_again(place: int) -> None:
    """Its shape, whether a sample is good, one of its moments, the seal and a digest."""
    path = files(kept())[1]
    before = path.read_bytes()
    content = bytearray(before)
    content[place] ^= 1
    path.write_bytes(content)
    how = Counting()
    latents = kept(how=how)
    assert how.images == PER_CHUNK + 1, "its file alone"
    assert path.read_bytes() == before
    assert torch.allclose(moments_of(latents, PER_CHUNK + 9), expected(PER_CHUNK + 9), atol=1e-6)


def spoil(latents: CachedLatents, chunk: int, number: int, value: float) -> None:
    """As another program would write it: everything fits, but for one number."""
    opened = latents.chunks.open(chunk)
    rows = [opened.moments(row) for row in range(len(latents.chunks.numbers(chunk)))]
    rows[number][0, 0, 0] = value
    latents.chunks.write(chunk, rows)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_encoded_again(value: float) -> None:
    spoil(kept(), 2, 5, value)
    how = Counting()
    latents = kept(how=how)
    assert how.images == MANY - 2 * PER_CHUNK + 1
    assert torch.allclose(moments_of(latents, 2 * PER_CHUNK + 5), expected(2 * PER_CHUNK + 5), atol=1e-6)


@pytest.mark.wording
def test_a_number_that_spoils_while_a_run_reads_is_refused() -> None:
    latents = kept()
    spoil(latents, 0, 5, torch.nan)
    assert torch.allclose(moments_of(latents, 4), expected(4), atol=1e-6)
    with pytest.raises(BadData, match="row 5") as caught:
        latents.moments(5)
    assert str(files(latents)[0]) in caught.value.given


def test_a_bit_that_flips_while_a_run_reads_is_refused() -> None:
    """Each page is compared when it is first read, also in a file that was whole when the run began."""
    latents = kept()
    path = files(latents)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(BadData) as caught:
        latents.moments(7)
    assert str(path) in caught.value.given
    assert torch.allclose(moments_of(latents, PER_CHUNK), expected(PER_CHUNK), atol=1e-6)


def test_somebody_elses_latents_are_encoded_again() -> None:
    ours, theirs = kept(), kept(format="fp16", how=lambda images: encode(images) * 2)
    shutil.copy(files(theirs)[0], files(ours)[0])
    shutil.copy(files(ours)[1], files(ours)[2])
    how = Counting()
    latents = kept(how=how)
    assert how.images == PER_CHUNK + 88 + 1, "the first and the last"
    assert all(torch.allclose(moments_of(latents, n), expected(n), atol=1e-6) for n in range(0, MANY, 37))


@pytest.mark.wording
def test_files_that_are_gone_while_a_run_reads() -> None:
    latents = kept()
    shutil.rmtree(latents.chunks.folder)
    with pytest.raises(BadData, match="cannot be read any more") as caught:
        latents.moments(0)
    assert "start the run again" in caught.value.do


@pytest.mark.wording
@pytest.mark.parametrize(("computed_in", "do"), [("fp16", "model.autoencoder_island=frozen"), ("fp32", "train it")])
def test_latents_that_are_not_finite_are_never_written(computed_in: str, do: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=rf"picture 39\d: its latents, encoded in {computed_in}") as caught:
        kept(how=overflows, format=computed_in)
    assert do in caught.value.do
    left = list((tmp_path / "cache").rglob("*.latents"))
    assert len(left) == 1, "the chunk before it"
    written = LatentChunks(left[0].parent, left[0].parent.name, MANY).open(0)
    assert all(torch.isfinite(written.moments(row)).all() for row in range(PER_CHUNK))
    assert not list((tmp_path / "cache").rglob(ABOUT))


@pytest.mark.wording
def test_how_far_it_is_is_told_and_nothing_is_begun_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    how = Counting()
    load_or_encode_latents(
        encoding(how), Pictures(MANY), parts=PARTS, on_progress=lambda done, of: told.append((done, of))
    )
    assert told == sorted(told)
    assert len(told) > 1
    assert told[-1] == (600, 600)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(StorageFailed, match="the disk has 100 B left") as caught:
        kept(Pictures(40))
    assert "data.cache_latents=false" in caught.value.do
    kept(how=never)
