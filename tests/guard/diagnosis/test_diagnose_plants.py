"""A dozen of the planted faults, and some healthy warm-ups; the benchmark has all of them."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from benchmarks.culprits import false_verdicts, misses, verdict_on
from benchmarks.plants.catalogue import all_plants
from benchmarks.plants.plant import Plant
from halfstep.guard.verdict import Cause, Verdict

CHOSEN = (
    "amplifier_deep[fp16]", "vae_decoder[fp16]", "residual[fp16]", "root_mean_square[fp16]", "log_of_rest[bf16]",
    "full_mask[bf16]", "hidden_target[fp32]", "where_trap[fp16]", "custom_backward[fp16]",
    "recomputed_back_reentrant[fp32]", "recomputed_function_reentrant[fp32]",
    "mask_in_the_batch[fp16]", "nan_pixel_in_picture[bf16]", "nan_target[fp32]",
    "blown_up_weight[fp16]", "learning_rate[fp16]", "all_ignored[bf16]", "not_normalised[fp16]",
    "smoothed_over_a_mask[fp32]", "negative_variance[bf16]", "own_numbers[fp32]", "bad_word[fp32]",
    "from_a_checkpoint[bf16]", "classifier[bf16]", "fails_twice[bf16]", "warm_up_of_plain_24_16[fp16]",
    "by_little[bf16]", "log_of_zero[bf16]", "bad_center[bf16]", "outlier[fp16]", "written_in_place[bf16]",
    "read_once[fp32]", "compiled_to_infinity[bf16]", "by_a_count_of_zero[bf16]", "noise_of_python[bf16]",
)  # fmt: skip
PLANTS = {plant.title: plant for plant in all_plants()}


@pytest.mark.filterwarnings("ignore::UserWarning")  # some plants change their batch, or take the spread of one number
@pytest.mark.parametrize("title", CHOSEN)
def test_planted_faults_are_named(title: str) -> None:
    assert misses(PLANTS[title].expected, verdict_on(PLANTS[title])) == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_planted_fault_is_named() -> None:
    found = {title: misses(plant.expected, verdict_on(plant)) for title, plant in PLANTS.items()}
    assert {title: missed for title, missed in found.items() if missed} == {}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_healthy_warm_ups_are_called_so(seed: int) -> None:
    skipped, wrong = false_verdicts(seed)
    assert wrong == []
    assert skipped > 0


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(PLANTS) == len(all_plants()) >= 378
    assert {plant.precision for plant in PLANTS.values()} == {"fp16", "bf16", "fp32"}
    by_class = Counter(plant.expected.cause for plant in PLANTS.values())
    assert set(by_class) == set(get_args(Cause))
    assert min(by_class.values()) >= 15


def test_what_is_not_named_is_counted_as_missed() -> None:
    def missed(plant: Plant, verdict: Verdict | None) -> int:
        return len(misses(plant.expected, verdict))

    plant = PLANTS["amplifier[fp16]"]
    verdict = verdict_on(plant)
    assert verdict is not None
    assert missed(plant, verdict) == 0
    assert missed(plant, None) == 1
    assert missed(PLANTS["vae_decoder[fp16]"], verdict) == 1
    assert missed(PLANTS["residual[fp16]"], verdict) == 2
    assert missed(PLANTS["nan_pixel[fp16]"], verdict) == 2
