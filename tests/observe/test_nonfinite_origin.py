"""Where numbers that are not finite come from, and what is not trouble though it is not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.observe.nonfinite_origin import BATCH, NonfiniteOrigins, NonfiniteSource
from halfstep.observe.reachable import iterate_tensor_leaves
from halfstep.observe.recorder import OUTSIDE, Operation, Recorder

Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    factor: Tensor

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.body, self.head, self.change = nn.Linear(8, 6), nn.Linear(6, 2), change
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.body(x)) * self.factor)


def origin_in(
    change: Change, x: Tensor | None = None, prepare: Callable[[Net], None] = lambda _: None
) -> NonfiniteSource | None:
    """Of a step in fp32."""
    model = Net(change)
    prepare(model)
    batch = {"x": torch.randn(4, 8) if x is None else x}
    origins = NonfiniteOrigins(model, batch)
    with Recorder(model, origins):
        loss = model(batch["x"]).square().mean()
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return origins.reaching([loss]) or origins.reaching(gradients)


def named(made: NonfiniteSource | None) -> tuple[str, str, bool] | None:
    return None if made is None else (made.name, made.module, made.backward)


# -- what is not trouble -------------------------------------------------------------------------------------------


def causal(h: Tensor) -> Tensor:
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return (h @ h.T).masked_fill(hidden, -torch.inf).softmax(-1) @ h


def causal_by_adding(h: Tensor) -> Tensor:
    return (h @ h.T + torch.full((4, 4), -torch.inf).triu(1)).softmax(-1) @ h


def unused_branch(h: Tensor) -> Tensor:
    return torch.where(h > -1e9, h, h.detach() / 0)


def never_set(h: Tensor) -> Tensor:
    memory = torch.empty_like(h)
    memory.detach()[:] = torch.nan  # whatever was there
    return memory.copy_(h.detach()) + h


def largest(h: Tensor) -> Tensor:
    return torch.maximum(h, torch.full_like(h, -torch.inf))


@pytest.mark.parametrize("change", [causal, causal_by_adding, unused_branch, never_set, largest, torch.tanh])
def test_what_is_not_finite_and_does_not_reach_the_end_is_not_named(change: Change) -> None:
    assert origin_in(change) is None


def test_memory_that_was_never_set_is_nobodys_fault() -> None:
    origins = NonfiniteOrigins(nn.Linear(2, 2), ())
    memory = torch.full((3,), torch.nan)
    origins(Operation(torch.ops.aten.empty.memory_format, ([3],), {}, memory, "", False, False))
    assert origins.reaching([memory]) is None
    origins(Operation(torch.ops.aten.mul.Tensor, (torch.ones(3), 2.0), {}, memory, "", False, False))
    assert origins.reaching([memory]) is not None


# -- what is ---------------------------------------------------------------------------------------------------------


def full_mask(h: Tensor) -> Tensor:
    return (h @ h.T).masked_fill(torch.eye(4, dtype=torch.bool) | True, -torch.inf).softmax(-1) @ h


def in_place(h: Tensor) -> Tensor:
    copy = h.clone()
    copy.div_(torch.zeros(()))
    return copy


def through_a_view(h: Tensor) -> Tensor:
    copy = h.clone()
    copy[1:, :2].transpose(0, 1).log_().mul_(1.0)
    return copy


def in_lists(h: Tensor) -> Tensor:
    first, second = h.clone(), h.clone()
    torch._foreach_mul_([first, second], [1.0, torch.finfo(torch.float32).max])
    torch._foreach_mul_([first, second], [1.0, 100.0])
    return first + second


def trap(h: Tensor) -> Tensor:
    return torch.where(h > 1e9, (h * 0).sqrt(), h)


def into_an_output(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    torch.div(h.detach(), torch.zeros(()), out=out)
    return out + h


def complex_numbers(h: Tensor) -> Tensor:
    return h + (torch.complex(h, h) / torch.zeros((), dtype=torch.complex64)).abs()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (full_mask, ("aten._softmax", "", False)),
        (in_place, ("aten.div_", "", False)),
        (through_a_view, ("aten.log_", "", False)),
        (in_lists, ("aten._foreach_mul_", "", False)),
        (into_an_output, ("aten.div", "", False)),
        (complex_numbers, ("aten.div", "", False)),
        (trap, ("aten.div", "", True)),
    ],
)
def test_the_first_operation_that_spoils_is_named(change: Change, expected: tuple[str, str, bool]) -> None:
    found = origin_in(change)
    assert named(found) == expected
    assert found is not None
    assert found.line is not None
    # Also of an operation in backward: the line of the forward operation that it belongs to.
    first = change.__code__.co_firstlineno
    file, _, line = found.line.rpartition(":")
    assert file.endswith("test_nonfinite_origin.py")
    assert first < int(line) <= first + 4


def test_what_the_operation_was_given_is_told() -> None:
    found = origin_in(lambda h: h / torch.zeros(()))
    assert found is not None
    assert found.kinds == {"inf", "-inf"}
    divided, by = found.given
    assert (divided.shape, divided.has_zero, divided.has_negative) == ((4, 6), False, True)
    assert (by.has_zero, by.largest, by.kinds) == (True, 0.0, frozenset())
    assert found.in_fp32 is None


def test_an_overflow_of_16_bits_is_told_in_fp32() -> None:
    found = origin_in(lambda h: (h.half() * 0 + 300).square().float())
    assert found is not None
    assert (found.name, found.format, found.in_fp32) == ("aten.pow", "fp16", 90000.0)


def test_one_byte_numbers_do_not_crash() -> None:
    found = origin_in(lambda h: h + (h * 0 + 1e6).to(torch.float8_e5m2).float())
    assert found is not None
    assert (found.name, found.format, found.kinds) == ("aten._to_copy", "fp8_e5m2", {"inf"})


# -- what came from outside ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_of_the_batch(value: float) -> None:
    x = torch.randn(4, 8)
    x[2, 3] = value
    found = origin_in(torch.tanh, x)
    assert found is not None
    assert found.outside == f"{BATCH}['x']"


def test_a_bad_weight_and_a_bad_buffer() -> None:
    weight = origin_in(torch.tanh, prepare=lambda model: model.head.weight.data[1, 1:2].fill_(torch.nan) and None)
    buffer = origin_in(torch.tanh, prepare=lambda model: model.factor.fill_(torch.nan) and None)
    assert weight is not None
    assert buffer is not None
    assert (weight.outside, buffer.outside) == ("weight head.weight", "buffer factor")


def test_a_constant_of_minus_infinity_is_a_mask_and_one_of_nan_is_not() -> None:
    mask, nan = torch.zeros(4, 4), torch.full((), torch.nan)
    mask[0, 1] = -torch.inf
    assert origin_in(lambda h: (h @ h.T + mask).softmax(-1) @ h) is None
    found = origin_in(lambda h: h + nan)
    assert found is not None
    assert found.outside == "a constant"


def test_a_mask_in_the_batch_is_not_blamed_for_what_something_else_did() -> None:
    model = Net(torch.tanh)
    batch = {"x": torch.randn(4, 8), "mask": torch.zeros(4, 4).fill_diagonal_(-torch.inf)}
    origins = NonfiniteOrigins(model, batch)
    with Recorder(model, origins):
        h = (torch.randn(4, 4) + batch["mask"]).softmax(-1)
        large = h / torch.zeros(())
        loss = (large + batch["mask"]).softmax(-1).sum()
    assert named(origins.reaching([loss])) == ("aten.div", OUTSIDE, False)


# -- what a batch is made of -----------------------------------------------------------------------------------------


@dataclass
class Graph:
    nodes: Tensor
    more: Any


def test_tensors_are_found_in_whatever_a_batch_is_made_of() -> None:
    one = torch.ones(1)

    class Own:
        def __init__(self) -> None:
            self.pixels = one

    batch = [{"image": one, 3: (one, "text")}, Graph(one, [Own()]), None, nn.Linear(1, 1)]
    paths = [path for path, _ in iterate_tensor_leaves(batch)]
    assert paths == ["[0]['image']", "[0][3][0]", "[1].nodes", "[1].more[0].pixels"]


def test_a_batch_that_holds_itself_has_an_end() -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)
    assert 1 <= len(list(iterate_tensor_leaves(batch))) < 20
    assert list(iterate_tensor_leaves([])) == []


# -- what is written into ------------------------------------------------------------------------------------------


def test_an_operation_that_spoils_a_buffer_in_place_is_named() -> None:
    model = Net(lambda h: h * model.factor.div_(0.0))
    origins = NonfiniteOrigins(model, ())
    with Recorder(model, origins):
        loss = model(torch.randn(4, 8)).square().mean()
    found = origins.reaching([loss])
    assert found is not None
    assert (found.name, found.outside) == ("aten.div_", None)


def test_what_was_bad_before_it_was_written_into_is_named_itself() -> None:
    model = Net(lambda h: h * model.factor.mul_(2.0))
    model.factor.fill_(torch.nan)
    origins = NonfiniteOrigins(model, ())
    with Recorder(model, origins):
        loss = model(torch.randn(4, 8)).square().mean()
    found = origins.reaching([loss])
    assert found is not None
    assert found.outside == "buffer factor"
