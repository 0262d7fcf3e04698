"""Batches that no model can use, in the shapes that loaders give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Plain, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants
from halfstep import Window

ALL, TWO, ONE = "fp16 bf16 fp32", "bf16 fp32", "fp32"
GOOD = 3
"""Good batches before the bad one."""


def _turns(model: nn.Module, loss_fn: Callable[..., Any], good: Any, bad: Any) -> Scene:
    batches: dict[bool, Any] = {False: good, True: bad}
    return Scene(model, loss_fn, good, steps=GOOD + 2, scale=256.0, batch_at=lambda step: batches[step >= GOOD])


def _with(t: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    t = t.clone()
    t[place] = value
    return t


def distance(out: Tensor, y: Tensor) -> Tensor:
    return (out.float() - y).square().mean()


def in_a_dict() -> Scene:
    model = Perceptron()
    x, y = batch_for(model)
    return _turns(
        model,
        lambda m, b: distance(m(b["pixels"]), b["labels"]["boxes"]),
        {"pixels": x, "labels": {"boxes": y}},
        {"pixels": x, "labels": {"boxes": _with(y, (1, 2), torch.nan)}},
    )


def in_a_nested_list() -> Scene:
    model = Perceptron()
    x, y = batch_for(model)
    weight = torch.ones(len(x), 1)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return distance(m(b[0]) * b[1][1], b[1][0])

    return _turns(model, loss_fn, [x, [y, weight]], [x, [y, _with(weight, (4, 0), torch.inf)]])


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = "a.png"


class Plainly:
    """A batch that is an object of somebody's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def in_an_object(kind: Callable[..., Any]) -> Callable[[], Scene]:
    def make() -> Scene:
        model = Perceptron()
        x, y = batch_for(model)
        bad = kind(_with(x, (2, 5), torch.nan), y)
        return _turns(model, lambda m, b: distance(m(b.x), b.y), kind(x, y), bad)

    return make


def in_a_window() -> Scene:
    """The third of four micro-batches."""
    model = Perceptron()
    x, y = batch_for(model)
    micro = [(x, y)] * 4
    bad = [*micro[:2], (_with(x, (0, 0), torch.nan), y), micro[3]]
    return _turns(model, squares, Window(micro), Window(bad))


def far_target() -> Scene:
    """One target is 1e30: its square does not fit any format."""
    model = Perceptron()
    x, y = batch_for(model)
    return _turns(model, squares, (x, y), (x, _with(y, (3, 1), 1e30)))


def far_sample() -> Scene:
    model = Plain()
    x, y = batch_for(model)
    return _turns(model, squares, (x, y), (_with(x, (5, 1), 1e30), y))


def not_divided_by_255() -> Scene:
    """Values of up to a hundred million, in all samples: fp16 cannot hold them, and divided by their spread it can."""
    model = Plain()
    x, y = batch_for(model)
    return _turns(model, squares, (x, y), (x * 1e8, y))


def hidden_by_a_teacher() -> Scene:
    """Soft labels of a teacher, -inf where it saw nothing."""

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        soft = b[1].softmax(-1)
        return -(soft * m(b[0]).float().log_softmax(-1)).sum(-1).mean()

    model = Perceptron()
    x, y = batch_for(model)
    bad = y.clone()
    bad[2] = -torch.inf
    return _turns(model, loss_fn, (x, y), (x, bad))


def of_complex_numbers() -> Scene:
    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return distance(m(torch.view_as_real(b[0]).flatten(1)), b[1])

    model = Perceptron()
    x = torch.randn(6, 4, dtype=torch.complex64)
    y = torch.randn(6, 4)
    bad = x.clone()
    bad[1, 1] = complex(torch.nan, 0.0)
    return _turns(model, loss_fn, (x, y), (bad, y))


def popped() -> Scene:
    """The loss takes its batches from a list: a second run finds nothing."""

    def loss_fn(m: nn.Module, b: list[Any]) -> Tensor:
        x, y = b.pop()
        return distance(m(x), y)

    model = Perceptron()
    x, y = batch_for(model)
    bad = _with(x, (0, 0), torch.nan)
    return Scene(
        model, loss_fn, [(x, y)], steps=GOOD + 1, scale=256.0, batch_at=lambda step: [(bad if step >= GOOD else x, y)]
    )


def rows_of_a_feature_file() -> Scene:
    """Features were computed once, and two rows of them are NaN; the batch is the numbers of rows."""
    features, targets = torch.randn(40, 8), torch.randn(40, 4)
    features[20:22] = torch.nan

    def loss_fn(m: nn.Module, rows: Tensor) -> Tensor:
        return distance(m(features.index_select(0, rows)), targets[rows])

    model = Perceptron()
    return _turns(model, loss_fn, torch.arange(6), torch.arange(18, 24))


def first_of_all() -> Scene:
    """The very first batch of the run."""
    model = Plain()
    x, y = batch_for(model)
    return Scene(model, squares, (_with(x, (0, 7), -torch.inf), y), scale=256.0)


def all_of_them() -> list[Plant]:
    def data(*words: str) -> Expected:
        return Expected("data", words=words)

    return [
        *plants("in_a_dict", ALL, in_a_dict, data("sample 1 contains nan", "boxes")),
        *plants("in_a_nested_list", TWO, in_a_nested_list, data("sample 4 contains inf")),
        *plants("in_a_dataclass", TWO, in_an_object(Sample), data("sample 2 contains nan")),
        *plants("in_a_plain_object", TWO, in_an_object(Plainly), data("sample 2 contains nan")),
        *plants("in_a_window", TWO, in_a_window, data("micro-batch", "sample 0 contains nan")),
        *plants("far_target", TWO, far_target, data("the batch[1], sample 3", "reaches")),
        *plants("far_sample", TWO, far_sample, data("the batch[0], sample 5", "reaches")),
        *plants("not_divided_by_255", "fp16", not_divided_by_255, data("the batch[0]", "reaches")),
        *plants("hidden_by_a_teacher", TWO, hidden_by_a_teacher, data("sample 2", "-inf")),
        *plants("of_complex_numbers", ONE, of_complex_numbers, data("sample 1 contains nan")),
        *plants("popped", ONE, popped, data("could not be run again")),
        *plants("rows_of_a_feature_file", TWO, rows_of_a_feature_file, data("nan in rows 20, 21")),
        *plants("first_of_all", ALL, first_of_all, data("the batch[0], sample 0 contains -inf")),
    ]  # fmt: skip
