"""What each rank holds: as the recipe requests, or the least sharding that fits the memory of a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from halfstep.errors import BadRecipe
from halfstep.recipe.schema import OptimizerOptions, WorldOptions
from halfstep.step.synchronizers.shard_units import list_shard_units
from halfstep.train.optimizers import count_optimizer_moments
from halfstep.train.sharding import StateSize, choose_sharding, compile_blocks, synchronize_batchnorm

GB = 2**30


def chosen(
    mode: str = "auto", *, rows: int = 4096, parameters: int, ranks: int = 64, node: int = 8, memory: int | None = 80
) -> str:
    """Return the mode and the shard size for one matrix with Adam's two moments; `memory` is in GB."""
    options = WorldOptions.model_validate({"mode": mode})
    state = StateSize([((rows, parameters // rows), 4)])
    given = None if memory is None else memory * GB
    found = choose_sharding(options, state=lambda: state, memory=given, ranks=ranks, ranks_a_node=node)
    return f"{found.mode} {found.shard_size}"


def test_the_least_sharding_that_fits_is_taken() -> None:
    assert chosen(parameters=10**9) == "ddp 1"
    assert chosen(parameters=8 * 10**9) == "hsdp 8"
    assert chosen(parameters=30 * 10**9) == "hsdp 16"
    assert chosen(parameters=150 * 10**9) == "fsdp 64"
    assert chosen(parameters=8 * 10**9, ranks=8) == "fsdp 8"
    assert chosen(parameters=70 * 10**9, ranks=1) == "ddp 1"


def test_of_shardings_that_do_not_fit_the_one_without_padding_is_taken() -> None:
    assert chosen(parameters=10**12) == "fsdp 64"
    assert chosen(parameters=10**12, rows=16) == "hsdp 16"


def test_ranks_on_a_host_share_its_memory() -> None:
    assert chosen(parameters=70 * 10**9, memory=None) == "ddp 1"


def test_the_size_of_a_state_is_that_of_its_tensors() -> None:
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 3))
    model[1].requires_grad_(False)
    state = StateSize.of(model, moments=2, ema=True)
    assert state.a_rank(1) == 4 * (5 * 80 + 2 * 33)
    # 10 rows over 4 ranks are 3 on each, with padding; 3 rows are one.
    assert state.a_rank(4) == 4 * (5 * 3 * 8 + 2 * 11)


@pytest.mark.parametrize(
    ("name", "momentum", "count"), [("adamw", 0.9, 2), ("sgd", 0.9, 1), ("sgd", 0.0, 0), ("rmsprop", 0.0, 1)]
)
def test_the_moments_of_an_optimizer_are_counted(name: str, momentum: float, count: int) -> None:
    assert (
        count_optimizer_moments(OptimizerOptions.model_validate({"name": name, "momentum": momentum, "lr": 0.1}))
        == count
    )


@pytest.mark.parametrize(("mode", "holds"), [("ddp", "ddp 1"), ("fsdp", "fsdp 64"), ("hsdp", "hsdp 8")])
def test_what_is_asked_for_is_taken(mode: str, holds: str) -> None:
    assert chosen(mode, parameters=10_000) == holds
    if mode != "hsdp":
        assert chosen(mode, parameters=10_000, ranks=1) == "ddp 1"


@pytest.mark.wording
@pytest.mark.parametrize(("ranks", "node"), [(8, 8), (12, 8), (1, 1)])
def test_groups_that_do_not_divide_the_ranks_are_refused(ranks: int, node: int) -> None:
    with pytest.raises(BadRecipe, match=r"world\.shard_size"):
        chosen("hsdp", parameters=10_000, ranks=ranks, node=node)


@pytest.mark.wording
def test_batch_statistics_over_all_ranks_need_a_gpu() -> None:
    with pytest.raises(BadRecipe, match="SyncBatchNorm"):
        synchronize_batchnorm(nn.BatchNorm1d(4), torch.empty(0).device)


def test_every_batch_normalization_is_synchronized_with_its_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.LayerNorm(4))
    model[1][0].running_mean.fill_(3.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        synchronize_batchnorm(model, torch.device("cuda"))
    assert [type(module).__name__ for module in model.modules()].count("SyncBatchNorm") == 1
    assert model[1][0].running_mean.tolist() == [3.0] * 4


class Block(nn.Sequential):
    """A layer in a class that is not torch's."""


@pytest.mark.wording
@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
def test_a_model_without_blocks_of_its_own_is_not_compiled_in_shards(model: nn.Module) -> None:
    with pytest.raises(BadRecipe, match="without repeated blocks"):
        compile_blocks(list_shard_units(model, torch.bfloat16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_blocks_are_compiled() -> None:
    model = nn.Sequential(Block(nn.Linear(4, 4)), Block(nn.Linear(4, 4)), nn.LayerNorm(4))
    compile_blocks(list_shard_units(model, torch.bfloat16))
    assert [module._compiled_call_impl is not None for module in (model, *model)] == [False, True, True, False]
