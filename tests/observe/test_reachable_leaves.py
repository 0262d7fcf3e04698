"""The tensors of a batch: all of them, and without walking what holds none."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.step.step_inputs import list_batch_versions


@dataclass
class Held:
    x: Tensor


@dataclass(slots=True)
class Slim:
    words: list[str]


def test_each_with_its_path() -> None:
    x = torch.rand(2)
    tree = [{"image": x}, (1, Held(x)), UserDict(ids=x), "words", None, Slim(["a"])]
    assert [path for path, _ in iterate_tensor_leaves(tree)] == ["[0]['image']", "[1][1].x", "[2]['ids']"]


def test_writing_shows_whatever_the_batch_is_made_of() -> None:
    for batch in ({"x": torch.rand(2)}, UserDict(x=torch.rand(2)), Held(torch.rand(2)), [Held(torch.rand(2))]):
        before = list_batch_versions([batch])
        next(leaf for _, leaf in iterate_tensor_leaves(batch)).mul_(2)
        assert list_batch_versions([batch]) != before


def test_a_container_that_holds_itself() -> None:
    batch: dict[str, Any] = {"x": torch.rand(2)}
    batch["me"], batch["us"] = batch, [batch, batch]
    assert [path for path, _ in iterate_tensor_leaves(batch)] == ["['x']"]


class Counted(list[Any]):
    """Tells how many of its items were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counted.asked += 1
            yield item


def test_long_lists_of_plain_numbers_are_not_walked() -> None:
    x = torch.rand(2)
    assert [path for path, _ in iterate_tensor_leaves({"ids": [Counted([7] * 2048) for _ in range(64)], "x": x})] == [
        "['x']"
    ]
    assert Counted.asked == 0
    assert [path for path, _ in iterate_tensor_leaves([x] * 50)] == [f"[{index}]" for index in range(50)]


def test_a_batch_that_leads_to_a_whole_data_set_ends() -> None:
    batch = {"x": torch.rand(2), "others": [[[{"row": number}] for number in range(100)] for _ in range(1000)]}
    assert [path for path, _ in iterate_tensor_leaves(batch)] == ["['x']"]


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("cannot be looked at")


def test_what_breaks_when_it_is_looked_at_is_passed_over() -> None:
    assert [path for path, _ in iterate_tensor_leaves([Broken(x=torch.rand(2)), torch.rand(2)])] == ["[1]"]
