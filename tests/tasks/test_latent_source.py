"""Samples with latents in place of images: in their places, in workers, and only when there are any."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from halfstep.data.dataset import BadSample, Order, Sample, Samples
from halfstep.data.fingerprint import fingerprint
from halfstep.data.loader import TrainLoader
from halfstep.errors import BadData
from halfstep.tasks.latent_cache.cache import LatentSource, load_or_encode_latents
from tests.tasks.latents_made import MANY, PARTS, Pictures, encoding, expected, kept, moments_of
from tests.tasks.latents_made import own_cache as own_cache


def test_samples_that_cannot_be_read_leave_the_others_in_their_places() -> None:
    source = LatentSource(Pictures(MANY, unreadable=(0, 7, 300)))
    source.latents = kept(source.source)
    assert source.latents.moments(7) is None
    assert torch.allclose(source.read(8)["moments"], expected(8), atol=1e-6)
    assert torch.allclose(source.read(301)["moments"], expected(301), atol=1e-6)
    with pytest.raises(BadSample, match="picture 7: cut off"):
        source.read(7)
    source.source.unreadable = ()
    with pytest.raises(BadSample, match="picture 7: it has no latents"):
        source.read(7)


class WithNan(Pictures):
    def read(self, index: int) -> Sample:
        sample = super().read(index)
        return {**sample, "image": sample["image"] * torch.nan} if index == 3 else sample


def test_an_image_that_is_not_finite_is_a_bad_sample_and_no_fault_of_the_format() -> None:
    latents = kept(WithNan(8))
    assert latents.moments(3) is None
    assert torch.allclose(moments_of(latents, 4), expected(4), atol=1e-6)


@pytest.mark.wording
def test_nothing_that_can_be_read_is_said() -> None:
    with pytest.raises(BadData, match="none of the first 3 samples can be read"):
        kept(Pictures(3, unreadable=(0, 1, 2)))


def test_images_until_there_are_latents_and_none_are_decoded_after() -> None:
    source = LatentSource(Pictures(20))
    before = fingerprint(source)
    assert before == fingerprint(source.source)
    assert source.read(3).keys() == {"image", "label"}
    source.latents = kept(source.source)
    source.source.decoded.clear()
    sample = source.read(3)
    assert sample.keys() == {"moments", "label"}
    assert (int(sample["label"]), source.source.decoded) == (3, [])
    assert torch.allclose(sample["moments"], expected(3), atol=1e-6)
    assert fingerprint(source) == before
    assert source.name(3) == "picture 3"


def test_a_source_goes_to_workers_with_its_latents() -> None:
    source = LatentSource(Pictures(40))
    samples = Samples(source, _as_it_is, seed=0)
    order = Order(40, seed=0)
    loader = TrainLoader(samples, order, batch_size=8, collate=default_collate, workers=2, device=torch.device("cpu"))
    assert "image" in loader.read_batch().tensors
    source.latents = kept(source.source)
    source.read(0)  # opens a file, which is not sent along
    seen = {number: row for (batch,) in loader.windows(0) for number, row in _rows(batch)}
    assert seen.keys() == set(range(40))
    assert all(torch.allclose(row, expected(number), atol=1e-6) for number, row in seen.items())
    sent = pickle.loads(pickle.dumps(source))
    assert torch.equal(sent.read(5)["moments"], source.read(5)["moments"])


def _as_it_is(sample: Sample) -> Sample:
    return sample


def _rows(batch: Any) -> Any:
    return zip(batch.ids, batch.tensors["moments"], strict=True)


def test_images_may_be_read_by_workers() -> None:
    latents = load_or_encode_latents(encoding(workers=2), Pictures(40), parts=PARTS)
    assert all(torch.allclose(moments_of(latents, n), expected(n), atol=1e-6) for n in range(40))
