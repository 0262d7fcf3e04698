"""FSDP2 gathers the weights of fp8 layers in fp8: fewer bytes, counted, and a skip that changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.precision.precision import precision_named
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
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision=precision_named("bf16"))
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    losses = [stepper.step(mse, batch).loss for _ in range(3)]
    gathered, before = stepper.gathered_bytes, weights_of(model)
    skipped = stepper.step(mse, batch * float("nan"))
    same = not skipped.applied and torch.equal(weights_of(model), before)
    fp8 = 0.0 if stepper.observed is None else float(sum(stepper.observed.fp8.values()))
    return gathered, losses, same, before.tolist(), fp8


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
