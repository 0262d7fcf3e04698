"""What a loss function holds is found."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from halfstep.observe.reachable import find_generators, find_reachable_instances

GLOBAL = torch.Generator()


class Task:
    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def loss(self, model: Any, batch: Any) -> Any:
        return torch.rand(1, generator=self.own)


def of_the_file(model: Any, batch: Any) -> Any:
    return [torch.rand(1, generator=GLOBAL) for _ in batch]


def test_wherever_it_is() -> None:
    own = torch.Generator()

    def enclosing(model: Any, batch: Any) -> Any:
        return torch.rand(1, generator=own)

    def given(model: Any, batch: Any, own: torch.Generator = own) -> Any:
        return torch.rand(1, generator=own)

    for function in (
        enclosing,
        given,
        Task(own).loss,
        functools.partial(given, own=own),
        functools.partial(Task(own).loss, None),
        lambda model, batch: enclosing(model, batch),
    ):
        assert find_reachable_instances(function, torch.Generator) == [own]
    assert find_reachable_instances(of_the_file, torch.Generator) == [GLOBAL]


def test_nothing_to_find() -> None:
    def recursive(model: Any, batch: Any) -> Any:
        return recursive(model, later)

    assert find_reachable_instances(recursive, torch.Generator) == []
    later = None
    assert find_reachable_instances(None, torch.Generator) == []
    assert find_reachable_instances(torch.nn.functional.cross_entropy, nn.Module) == []
    loss = nn.MSELoss()
    assert find_reachable_instances(loss, nn.Module) == [loss]


def test_generators_of_all_libraries_also_private_ones_and_their_methods() -> None:
    python, numpy, old, own = random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()
    draw, model = random.Random(2).random, nn.Sequential(nn.Linear(2, 2))
    model[0]._own, normal = old, numpy.normal  # type: ignore[assignment]

    def loss_fn(model: Any, batch: Any) -> Any:
        return python.random() + draw() + normal() + float(torch.rand(1, generator=own))

    found = find_generators(loss_fn, model, [own])
    assert {id(each) for each in found} == {id(each) for each in (python, draw.__self__, numpy, old, own)}
    assert len(found) == 5
