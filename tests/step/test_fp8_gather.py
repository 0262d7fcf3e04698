"""FSDP2 gathers the weights of fp8 layers in fp8: fewer bytes, counted, the same bits, and a skip changes nothing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper, distributed
from halfstep.precision.converted import find_converted_layers
from halfstep.precision.precision import resolve_precision_name
from tests.support.ranks import Ranks

pytest.importorskip("torchao")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.stop()


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def weights_of(model: nn.Module) -> Tensor:
    whole = [getattr(p.full_tensor(), "_tensor", p.full_tensor()) for p in model.parameters()]  # type: ignore[operator]
    return torch.cat([p.detach().flatten().clone() for p in whole])


def sharded_model() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 240), nn.GELU(), nn.Linear(240, 64, bias=False)) for _ in range(2)]
    model: Any = nn.Sequential(*blocks, nn.LayerNorm(64), nn.Linear(64, 16, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model[:2], model[3]):
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


class Run(NamedTuple):
    losses: list[float]
    gathered: list[int | None]
    evaluated: list[float]
    weights: list[float]
    in_fp8: float
    converted: list[str]
    plain: bool
    """Whether the state has nothing but plain tensors."""


def by_precision(rank: int, kind: str, in_fp8: bool) -> Run:
    from halfstep.step.synchronizers import float8_gather

    possible = float8_gather._can_gather_in_fp8
    float8_gather._can_gather_in_fp8 = possible if in_fp8 else lambda *_: False
    try:
        return trained_by_precision(rank, kind)
    finally:
        float8_gather._can_gather_in_fp8 = possible


def trained_by_precision(rank: int, kind: str) -> Run:
    """Train in a precision of halfstep, change it and change it back, with a step that is skipped."""
    model = sharded_model()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=resolve_precision_name(kind))
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    losses, gathered, evaluated = [], [], []
    for number, precision in enumerate([kind, kind, "bf16", kind, kind]):
        if precision != stepper.precision.name:
            stepper.change_precision(precision)
        losses.append(stepper.step(mse, batch).loss)
        gathered.append(stepper.gathered_bytes)
        assert not stepper.step(mse, batch * float("nan")).applied
        with stepper.evaluating():
            evaluated += [float(mse(model, batch)) for _ in range(1 + number % 2)]
    tensors = [distributed.unwrap_local_tensor(each) for each in model.state_dict().values()]
    observed = stepper.observed
    fp8 = 0.0 if observed is None else float(sum(observed.fp8.values()))
    plain = all(type(each) is torch.Tensor and each.dtype is torch.float32 for each in tensors)
    return Run(losses, gathered, evaluated, weights_of(model).tolist(), fp8, list(find_converted_layers(model)), plain)


def trained(rank: int, in_fp8: bool) -> tuple[int | None, list[float], bool, list[float], float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model: Any = nn.Sequential(*blocks, nn.LayerNorm(64))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=dataclasses.replace(config, enable_fsdp_float8_all_gather=in_fp8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[:2]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision=resolve_precision_name("bf16"))
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    losses = [stepper.step(mse, batch).loss for _ in range(3)]
    gathered, before = stepper.gathered_bytes, weights_of(model)
    skipped = stepper.step(mse, batch * float("nan"))
    same = not skipped.applied and torch.equal(weights_of(model), before)
    fp8 = 0.0 if stepper.observed is None else float(sum(stepper.observed.fp8.values()))
    return gathered, losses, same, before.tolist(), fp8


@pytest.mark.full
def test_weights_are_gathered_in_fp8_and_their_bytes_counted(two: Ranks) -> None:
    (wide, other), (narrow, another) = two(trained, False), two(trained, True)
    weights = 2 * 2 * 64 * 256
    # Each weight is gathered for forward and for backward.
    assert wide[0] is not None
    assert narrow[0] is not None
    assert wide[0] == other[0] == pytest.approx(2 * 2 * weights, rel=0.03)
    assert narrow[0] == another[0]
    assert narrow[0] / wide[0] < 0.6
    assert narrow[1] == pytest.approx(wide[1], rel=0.02)
    assert wide[2]
    assert narrow[2]
    assert narrow[3] == another[3]
    assert narrow[4] == wide[4] > 0


def test_a_precision_gathers_in_fp8_with_the_bits_of_a_gather_in_bf16(two: Ranks) -> None:
    narrow, wide = (two(by_precision, "fp8", in_fp8) for in_fp8 in (True, False))
    for one, other in zip(narrow, wide, strict=True):
        assert one._replace(gathered=[]) == other._replace(gathered=[])
        assert one.in_fp8 > 0
        assert one.converted == ["0.0", "0.2", "1.0", "1.2", "3"]  # the last one is sharded by itself
        assert one.plain
        shares = [a / b for a, b in zip(one.gathered, other.gathered, strict=True) if a is not None and b is not None]
        assert shares == pytest.approx([0.505, 0.505, 1.0, 0.505, 0.505], abs=0.01)


def with_other_private_classes(rank: int, missing: bool) -> tuple[Run, list[str]]:
    """Train where FSDP2's module is not there, or calls its extension in another way."""
    from halfstep.step import stepper_base
    from halfstep.step.synchronizers import float8_gather

    module, emitted = "halfstep.step.synchronizers.float8_gather", list[str]()
    emit, pre = stepper_base.StepperBase._emit, float8_gather._Float8WeightShard.fsdp_pre_all_gather
    stepper_base.StepperBase._emit = lambda _, found: emitted.extend(each.id for each in found)  # type: ignore[method-assign]
    try:
        if missing:
            sys.modules[module] = None  # type: ignore[assignment]
        else:
            float8_gather._Float8WeightShard.fsdp_pre_all_gather = lambda _, mesh, size: ((), None)  # type: ignore[assignment]
        return trained_by_precision(rank, "fp8"), emitted
    finally:
        sys.modules[module], stepper_base.StepperBase._emit = float8_gather, emit  # type: ignore[method-assign]
        float8_gather._Float8WeightShard.fsdp_pre_all_gather = pre  # type: ignore[method-assign]


@pytest.mark.parametrize("missing", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_unknown_fsdp_gathers_in_bf16_and_says_so(two: Ranks, missing: bool) -> None:
    wide, found = two(by_precision, "fp8", False), two(with_other_private_classes, missing)
    for one, (other, emitted) in zip(wide, found, strict=True):
        assert other == one
        assert set(emitted) == {"fp8.gather"}


@pytest.mark.full
def test_scales_of_rows_are_gathered_in_bf16(two: Ranks) -> None:
    narrow, wide = (two(by_precision, "fp8-rowwise", in_fp8) for in_fp8 in (True, False))
    assert narrow == wide
