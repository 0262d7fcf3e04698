"""Latents that two processes encode: each its share, all of them seen by both, and one end for both."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.tasks.latent_cache.cache import ABOUT, PER_CHUNK, load_or_encode_latents
from halfstep.train.signals import StopSignalHandler
from tests.support.ranks import Ranks
from tests.tasks.latents_made import (
    MANY,
    PARTS,
    Counting,
    Pictures,
    encode,
    encoding,
    expected,
    moments_of,
    overflows,
    stop_asked,
)

pytestmark = pytest.mark.ranks


def kept_on(rank: int, places: list[str], how: Any, machine: bool) -> dict[str, Any]:
    """Two processes of one machine, or of two that share no disk."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = places[rank]
    if machine:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    counting = Counting()
    try:
        with StopSignalHandler():
            latents = load_or_encode_latents(encoding(partial(_counted, counting, how)), Pictures(MANY), parts=PARTS)
        right = all(torch.allclose(moments_of(latents, n), expected(n), atol=1e-6) for n in range(MANY))
        return {"images": counting.images, "folder": str(latents.chunks.folder), "right": right}
    except HalfstepError as error:
        return {"error": str(error), "code": error.exit_code}
    finally:
        os.environ.clear()
        os.environ.update(before)


def _counted(counting: Counting, how: Any, images: Tensor) -> Tensor:
    counting(images)
    found: Tensor = how(images)
    return found


def test_two_processes_share_the_work_and_find_the_same(on_ranks: Ranks, tmp_path: Path) -> None:
    place = str(tmp_path / "both")
    first = on_ranks(kept_on, [place, place], encode, False)
    assert [one["images"] for one in first] == [PER_CHUNK + 88 + 1, PER_CHUNK + 1]
    assert first[0]["folder"] == first[1]["folder"]
    assert all(one["right"] for one in first)
    assert [one["images"] for one in on_ranks(kept_on, [place, place], encode, False)] == [0, 0]


def test_machines_that_share_no_disk_have_all_of_it_each(on_ranks: Ranks, tmp_path: Path) -> None:
    places = [str(tmp_path / "one"), str(tmp_path / "other")]
    first = on_ranks(kept_on, places, encode, True)
    assert all(one["right"] for one in first)
    assert all((Path(one["folder"]) / ABOUT).is_file() for one in first)
    assert [one["images"] for one in on_ranks(kept_on, places, encode, True)] == [0, 0]


@pytest.mark.wording
def test_where_one_process_is_refused_both_end_with_its_words(on_ranks: Ranks, tmp_path: Path) -> None:
    place = str(tmp_path / "both")
    found = on_ranks(kept_on, [place, place], overflows, False)
    assert [one["code"] for one in found] == [65, 65]
    assert "rank 1: picture 39" in found[0]["error"]
    assert all("model.autoencoder_island=frozen" in one["error"] for one in found)


def asked_on_the_second(images: Tensor) -> Tensor:
    return encode(images) if distributed.rank() == 0 else stop_asked(images)


@pytest.mark.wording
def test_where_one_process_is_asked_to_stop_both_do(on_ranks: Ranks, tmp_path: Path) -> None:
    place = str(tmp_path / "both")
    found = on_ranks(kept_on, [place, place], asked_on_the_second, False)
    assert [one["code"] for one in found] == [75, 75]
    assert all("stopped by SIGTERM" in one["error"] for one in found)
    assert [one["images"] for one in on_ranks(kept_on, [place, place], encode, False)] == [88 + 1, 1]


def test_a_file_that_is_cut_off_on_one_machine_is_encoded_there(on_ranks: Ranks, tmp_path: Path) -> None:
    places = [str(tmp_path / "one"), str(tmp_path / "other")]
    other = Path(on_ranks(kept_on, places, encode, True)[1]["folder"]) / "000001.latents"
    other.write_bytes(other.read_bytes()[:-40])
    again = on_ranks(kept_on, places, encode, True)
    assert [one.get("error") for one in again] == [None, None]
    assert all(one["right"] for one in again)
