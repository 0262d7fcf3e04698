"""Weights in folders: shards that torch.distributed.checkpoint wrote, Hugging Face's layout, and pickles by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halfstep.errors import BadData, HalfstepError, Unsafe
from halfstep.train.weights import load_weights
from tests.support.ranks import Ranks


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # Seven rows on two ranks: chunks of different lengths.
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def written_by_dcp(rank: int, folder: str, classic: bool) -> None:
    model = made(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    writer = None if classic else HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer, checkpoint_id=folder if classic else None)


@pytest.mark.ranks
def test_shards_of_torch_are_joined_to_the_bit(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(written_by_dcp, str(tmp_path / "dcp"), False)
    assert len(list((tmp_path / "dcp").glob("*.safetensors"))) == 2
    model = made(2)
    report = load_weights(model, tmp_path / "dcp")
    assert report.complete
    assert same(model, made(1))
    # The files of one rank alone: rows are missing.
    sorted((tmp_path / "dcp").glob("*.safetensors"))[0].unlink()
    before = made(3)
    with pytest.raises(HalfstepError):
        load_weights(before, tmp_path / "dcp")
    assert same(before, made(3))


@pytest.mark.wording
@pytest.mark.ranks
def test_a_folder_with_a_pickle_is_refused_with_the_command_that_converts_it(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(written_by_dcp, str(tmp_path / "dcp"), True)
    with pytest.raises(Unsafe) as refused:
        load_weights(made(2), tmp_path / "dcp")
    command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {tmp_path / 'dcp'} weights.pt"
    assert command in str(refused.value)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "weights.pt")
    model = made(2)
    load_weights(model, tmp_path / "weights.pt")
    assert same(model, made(1)), "the command leads to weights that are read"


def test_the_layout_of_hugging_face(tmp_path: Path) -> None:
    save_torch_state_dict(made(1).state_dict(), tmp_path, max_shard_size=100)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = made(2)
    load_weights(model, tmp_path)
    assert same(model, made(1))


def part(path: Path, rows: Any, offsets: Any) -> None:
    save_file({"w": torch.ones(rows, 2)}, path, {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})})


@pytest.mark.wording
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([3, 0], "4 of 5|8 of 10"),
        ([1, 0], "8 of 6"),
        ([2**50, 0], "of 2,2"),
        ([-1, 0], "no counts"),
        ([True, 0], "no counts"),
        ([2], "zip|argument|shorter"),
        ("x", "no counts"),
        (None, "NoneType"),
    ],
)
def test_chunks_that_are_not_there_exactly_once_are_refused(tmp_path: Path, second: Any, said: str) -> None:
    part(tmp_path / "shard-1.safetensors", 2, [0, 0])
    part(tmp_path / "shard-2.safetensors", 2, second)
    with pytest.raises(BadData, match=said):
        load_weights(nn.Linear(2, 4), tmp_path)


@pytest.mark.wording
def test_chunks_that_overlap_and_leave_a_hole_are_refused(tmp_path: Path) -> None:
    for number, at in enumerate([[0, 0], [0, 0], [4, 0]]):
        part(tmp_path / f"shard-{number}.safetensors", 2, at)
    with pytest.raises(BadData, match="parts of w overlap"):
        load_weights(nn.Linear(2, 6), tmp_path)


@pytest.mark.wording
def test_a_pickle_among_the_files_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(Unsafe, match=r"model\.safetensors"):
        load_weights(nn.Linear(1, 1), tmp_path)
