"""Drawn radio maps: the same for a seed, the field that physics says, and shadows where buildings are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.data.synthetic.radio_maps import (
    EXPONENT,
    LOST_IN_SHADOW,
    LOST_IN_WALLS,
    METRES,
    MOST_BUILT,
    NEAREST,
    RANGE,
    RadioMaps,
    _count_crossings,
    compute_radio_field,
)
from halfstep.errors import WrongUse


def test_a_sample_is_a_function_of_seed_and_index() -> None:
    first, again, other = RadioMaps(9, 32, seed=1), RadioMaps(99, 32, seed=1), RadioMaps(9, 32, seed=2)
    for part in ("image", "condition"):
        assert torch.equal(first.read(5)[part], again.read(5)[part])
        assert not torch.equal(first.read(5)[part], other.read(5)[part])
        assert not torch.equal(first.read(5)[part], first.read(6)[part])
    assert torch.equal(first.without_image(5)["condition"], first.read(5)["condition"])
    assert set(first.without_image(5)) == {"condition"}
    assert len({first.name(n) for n in range(9)} | {other.name(n) for n in range(9)}) == 18


@pytest.mark.parametrize(("size", "channels", "condition"), [(8, 1, 1), (33, 3, 2), (64, 1, 2), (200, 1, 1)])
def test_samples_are_bytes_of_the_size_asked_for(size: int, channels: int, condition: int) -> None:
    source = RadioMaps(20, size, channels, condition)
    for index in range(20):
        sample = source.read(index)
        assert sample["image"].shape == (channels, size, size)
        assert sample["condition"].shape == (condition, size, size)
        assert sample["image"].dtype == sample["condition"].dtype == torch.uint8
        assert (sample["image"] == sample["image"][:1]).all()
        assert sample["image"].float().std() > 5.0


def test_the_transmitter_stands_in_the_open_and_shines_brightest() -> None:
    source = RadioMaps(60, 64)
    shares = []
    for index in range(60):
        sample = source.read(index)
        buildings, spot = sample["condition"]
        assert set(buildings.unique().tolist()) <= {0, 255}
        at = divmod(int(spot.argmax()), 64)
        assert spot[at] == 255
        assert buildings[at] == 0
        assert sample["image"][0][at] == sample["image"].max()
        assert (spot > 127).sum() < 64 * 64 // 50
        shares.append(float((buildings > 0).float().mean()))
    assert max(shares) <= MOST_BUILT
    assert min(shares) > 0.0
    assert 0.1 < sum(shares) / 60 < MOST_BUILT


def test_in_one_channel_the_map_and_the_transmitter_can_be_told_apart() -> None:
    one, two = RadioMaps(4, 64, 1, 1).read(3), RadioMaps(4, 64, 1, 2).read(3)
    assert torch.equal(one["image"], two["image"])
    buildings, spot = two["condition"]
    assert one["condition"].max() == 255
    assert int(one["condition"].argmax()) == int(spot.argmax())
    assert (one["condition"][0][(buildings > 0) & (spot < 100)] == 128).all()


def by_hand(built: np.ndarray[Any, Any], place: tuple[int, int], row: int, column: int) -> float:
    """Pixels of building on the line to one pixel, in many small steps."""
    far = math.hypot(row - place[0], column - place[1])
    if far == 0:
        return 0.0
    at = (np.arange(4000) + 0.5) / 4000
    rows = np.floor(place[0] + (row - place[0]) * at + 0.5).astype(int)
    columns = np.floor(place[1] + (column - place[1]) * at + 0.5).astype(int)
    return float(built[rows, columns].mean() * far)


def test_rays_meet_what_lies_on_the_line() -> None:
    source = RadioMaps(8, 48)
    draw = np.random.default_rng(0)
    wrong = []
    for index in range(8):
        buildings, spot = source.read(index)["condition"].numpy()
        built, place = buildings > 0, divmod(int(spot.argmax()), 48)
        crossed = _count_crossings(built, place)
        for row, column in draw.integers(0, 48, (60, 2)):
            wrong.append(abs(crossed[row, column] - by_hand(built, place, row, column)))
    assert np.mean(wrong) < 0.25
    assert np.quantile(wrong, 0.95) < 1.0


@pytest.mark.parametrize("place", [(20, 31), (0, 0), (63, 5)])
def test_over_open_ground_the_field_falls_with_the_logarithm_of_the_distance(place: tuple[int, int]) -> None:
    field = compute_radio_field(np.zeros((64, 64), bool), place)
    for row, column in ((20, 40), (63, 63), (0, 1), (5, 60)):
        metres = max(math.hypot(row - place[0], column - place[1]) * METRES / 64, NEAREST)
        assert field[row, column] == pytest.approx(1 - 10 * EXPONENT * math.log10(metres / NEAREST) / RANGE, abs=1e-6)


def test_behind_a_building_there_is_a_shadow_with_a_soft_edge() -> None:
    built = np.zeros((64, 64), bool)
    built[28:37, 30:36] = True
    lost = (compute_radio_field(np.zeros_like(built), (32, 8)) - compute_radio_field(built, (32, 8))) * RANGE
    walls = 6 * METRES / 64 * LOST_IN_WALLS
    assert lost[32, 50] == pytest.approx(LOST_IN_SHADOW * (1 - math.exp(-walls / LOST_IN_SHADOW)), rel=0.05)
    assert abs(lost[:, :28]).max() < 0.01, "nothing is lost before the building"
    assert abs(lost[4:12, 50]).max() < 0.01, "nor beside it"
    edge = np.diff(lost[32:60, 50])
    assert edge.max() < 0.2, "but for lines that cross the building at a slant"
    assert edge.min() > -0.6 * lost[32, 50], "from one pixel to the next the shadow is not gone"


@pytest.mark.parametrize("built", [np.ones((16, 16), bool), np.zeros((8, 8), bool)])
def test_fields_stay_in_range_where_all_is_built_or_nothing(built: np.ndarray[Any, Any]) -> None:
    field = compute_radio_field(built, (3, 7))
    assert np.isfinite(field).all()
    assert field.min() >= 0.0
    assert field.max() <= 1.0


@pytest.mark.wording
@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"size": 7}, {"size": 1025}, {"channels": 0}, {"condition_channels": 3}]
)
def test_impossible_sets_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WrongUse, match="drawn maps") as caught:
        RadioMaps(**{"samples": 5, **wrong})
    assert "data.condition_channels" in caught.value.do
