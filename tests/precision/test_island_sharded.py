"""Islands whose weights FSDP2 gathers in 16 bits: they run in fp32 on rounded weights, and their gradients arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from halfstep import island


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("apart", [True, False])
def test_an_island_computes_wide_on_weights_that_are_gathered_narrow(mesh: Any, apart: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4))
    island(model, "1")
    policy, seen = MixedPrecisionPolicy(param_dtype=torch.bfloat16), []

    def look(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0].dtype, module.weight.dtype, output.dtype))

    model[1][0].register_forward_hook(look)  # type: ignore[index]
    if apart:
        fully_shard(model[1], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for _ in range(2):
        out = model(torch.randn(3, 8))
        out.float().square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert seen == [(torch.float32,) * 3] * 2
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.full_tensor().abs().sum() > 0  # type: ignore[attr-defined]


def test_a_frozen_island_that_was_cast_afterwards_still_computes_wide() -> None:
    layer = island(nn.Linear(8, 8).requires_grad_(False)).bfloat16()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype is torch.float32
    assert torch.equal(out, nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()))
    assert layer.weight.dtype is torch.bfloat16


def test_an_error_inside_leaves_the_weights_as_they_were() -> None:
    layer = island(nn.Linear(8, 8)).bfloat16()
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 9))
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.dtype is torch.bfloat16
