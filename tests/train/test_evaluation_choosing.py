"""The worst and the typical samples of an evaluation."""

from __future__ import annotations

import pytest
import torch

from halfstep.data.dataset import Batch
from halfstep.train.evaluation import (
    SampleChooser,
    choose_worst_and_typical,
    describe_chosen_samples,
    format_caption,
    format_caption_start,
)
from halfstep.train.task import SampleDisplay
from tests.tasks.made import made


def test_the_worst_come_first_and_the_typical_are_in_the_middle() -> None:
    quality = [0.9, 0.5, 0.1, 0.52, 0.8, 0.3, 0.6]
    assert choose_worst_and_typical(quality, [0] * 7, 4) == [(2, "worst"), (5, "worst"), (3, "typical"), (1, "typical")]
    assert choose_worst_and_typical(quality, [0] * 7, 1) == [(2, "worst")]


def test_few_samples_are_all_shown() -> None:
    assert choose_worst_and_typical([0.5, 0.1], [0, 0], 4) == [(1, ""), (0, "")]
    assert choose_worst_and_typical([0.5], [0], 4) == [(0, "")]


def test_they_are_not_all_of_one_class() -> None:
    quality = [0.01, 0.02, 0.03, 0.04, 0.2, 0.5, 0.6, 0.9, 0.91, 0.92]
    kinds = [0, 0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert [place for place, _ in choose_worst_and_typical(quality, kinds, 4)][:2] == [0, 4]
    # A class that does well is not the worst of anything.
    assert all(quality[place] <= 0.5 for place, why in choose_worst_and_typical(quality, kinds, 6) if why == "worst")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_numbers_are_those_of_the_samples(count: int) -> None:
    task = made("classification")
    choosing = SampleChooser(task)
    for ids, truths in (([7, 8, 9], [0, 1, 2]), ([12], [3])):
        logits = torch.zeros(len(ids), 6)
        logits[:, 0] = 9.0
        choosing.on_outputs(Batch({}, ids, [], []), logits, torch.tensor(truths))
    chosen = choosing.chosen(count)
    assert choosing.total == 4
    assert len({one.number for one in chosen}) == count
    assert {one.number for one in chosen} <= {7, 8, 9, 12}
    assert (7 in {one.number for one in chosen}) == (count == 4), "the only one that is right"
    assert ("all 4" in describe_chosen_samples(chosen, 4)) == (count == 4)


def test_a_task_that_does_not_judge_has_none() -> None:
    choosing = SampleChooser(made("slots"))
    assert not choosing.judges
    assert choosing.chosen(4) == []
    assert SampleChooser(made("segmentation")).judges


def test_captions_have_the_name_without_its_folders() -> None:
    assert format_caption_start("worst", "/a/b/c.jpg") == "worst: c.jpg"
    assert format_caption("c.jpg", SampleDisplay({"": None}, "truth: x\nanswer: y")) == "c.jpg\ntruth: x\nanswer: y"
    assert format_caption("c.jpg", SampleDisplay({"a": None, "b": None}, "IoU 0.5")) == "c.jpg, IoU 0.5"
    assert format_caption("", SampleDisplay({"": None})) == ""
