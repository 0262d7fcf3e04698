"""What an operation is said to have done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.guard.diagnosis.trials import describe_effect, has_undefined_result
from halfstep.observe.nonfinite_origin import NonfiniteOrigins, NonfiniteSource
from halfstep.observe.recorder import Recorder

X = torch.tensor([[0.0, 1.0, -2.0], [4.0, 2.0, 1.0]])
TOO_LARGE = "overflows fp32 (its largest number is 3.4e+38)"
ALL_HIDDEN = "is over a row that is all -inf"


def made_by(compute: Callable[[Tensor], Tensor]) -> NonfiniteSource:
    x = X.clone()
    origins = NonfiniteOrigins(nn.Identity(), x)
    with Recorder(nn.Identity(), origins):
        end = compute(x)
    found = origins.reaching([end])
    assert found is not None
    return found


def hidden(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(x.shape, dtype=torch.bool), -torch.inf)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(("compute", "operation", "effect"), [
    (lambda x: (x.relu() * 1e25).pow(2), "aten.pow", TOO_LARGE),
    (lambda x: x.reciprocal(), "aten.reciprocal", "divides by zero"),
    (lambda x: x.pow(-3), "aten.pow", "divides by zero"),
    (lambda x: x.pow(torch.full((3,), -3.0)), "aten.pow", "divides by zero"),
    (lambda x: x.sqrt(), "aten.sqrt", "takes the root of a negative number"),
    (lambda x: x.pow(0.3), "aten.pow", "takes the root of a negative number"),
    (lambda x: x * 1e20 / 1e-30, "aten.div", TOO_LARGE),
    (lambda x: x / 0.0, "aten.div", "divides by zero"),
    (lambda x: x / (x > 99).sum(), "aten.div", "divides by zero"),
    (lambda x: x / (x * 0), "aten.div", "divides by zero"),
    (lambda x: (x * 1e30) / (x.abs() * 0 + 1e-30), "aten.div", TOO_LARGE),
    (lambda x: x[:1].std(0), "aten.std", "averages over nothing"),
    (lambda x: x[:1].var(0), "aten.var", "averages over nothing"),
    (lambda x: x[:0].mean(), "aten.mean", "averages over nothing"),
    (lambda x: hidden(x).logsumexp(1).mean(), "aten.logsumexp", ALL_HIDDEN),
    (lambda x: hidden(x).amax(1).sum(), "aten.amax", ALL_HIDDEN),
])  # fmt: skip
def test_effects(compute: Callable[[Tensor], Tensor], operation: str, effect: str) -> None:
    found = made_by(compute)
    assert found.name == operation
    assert describe_effect(found) == effect
    assert has_undefined_result(found) is (effect != TOO_LARGE)
