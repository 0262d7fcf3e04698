"""What a loss function holds is found."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from halfstep.observe.reachable import find_reachable_instances

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
