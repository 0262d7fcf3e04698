"""Hugging Face's sharded layout from shards of many ranks: to the bit, one tensor in memory at a time."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import load_torch_model
from safetensors import safe_open
from torch import Tensor, nn

from faults.crash_story import commit_together
from halfstep.checkpoint.chunks import ChunkedTensor
from halfstep.checkpoint.commit import RankSnapshot
from halfstep.checkpoint.paths import Disk, list_generations
from halfstep.errors import BadData, WrongUse
from halfstep.runs.sharded_export import (
    INDEX,
    WHOLE,
    StoredWeights,
    export_layout,
    open_checkpoint_weights,
    parse_byte_size,
    split_into_shards,
    write_layout,
)
from halfstep.train.state import COMPONENTS
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_sharded_runs import fit

RANKS, SIDE, LAYERS = 3, 64, 8


def stack() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)), nn.BatchNorm1d(SIDE))
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    model.register_buffer("not saved", torch.ones(1), persistent=False)
    return model


def snapshot(rank: int, model: nn.Module) -> RankSnapshot:
    """What a rank of three writes: rows of the parameters; rank 0 the buffers."""
    rows = -(-SIDE // RANKS)
    parameters = {f"weights/parameters/{name}": p.detach() for name, p in model.named_parameters()}
    chunks = {
        name: ChunkedTensor(tuple(p.shape), p.dtype, 0, rows, tuple(range(RANKS))) for name, p in parameters.items()
    }
    tensors = {name: p[rank * rows : (rank + 1) * rows] for name, p in parameters.items()}
    buffers = {f"weights/buffers/{name}": buffer for name, buffer in model.named_buffers()}
    weights = {
        "parameters": {name: {"$tensor": f"weights/parameters/{name}"} for name, _ in model.named_parameters()},
        "buffers": {name: {"$tensor": f"weights/buffers/{name}"} for name, _ in model.named_buffers()},
        "non_persistent_buffers": ["not saved"],
    }
    recipe = {"train": {"batch_size": 4, "microbatches": 1}}
    plain: dict[str, Any] = {**{name: {} for name in COMPONENTS}, "ema": None, "weights": weights, "recipe": recipe}
    return RankSnapshot(5, plain, tensors | (buffers if rank == 0 else {}), chunks=chunks)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    folder = tmp_path / "checkpoints"
    saved = commit_together(folder, [snapshot(rank, stack()) for rank in range(RANKS)], keep=2, disks=[Disk()] * RANKS)
    assert not any(isinstance(one, Exception) for one in saved), saved
    return list_generations(folder)[0]


def test_the_shards_of_all_ranks_become_what_hugging_face_reads(checkpoint: Any, tmp_path: Path) -> None:
    most = 3 * SIDE * SIDE * 4
    with open_checkpoint_weights(checkpoint, averaged=False) as weights:
        told = write_layout(weights, tmp_path / "export", most, {"halfstep": "of a test"})
    model, again = stack(), stack()
    nn.init.zeros_(again[0].weight)  # type: ignore[arg-type,index]
    load_torch_model(again, tmp_path / "export", strict=True)
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    index = json.loads((tmp_path / "export" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values()) == weights.bytes
    assert index["weight_map"].keys() == expected.keys()
    files = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert files == [*told, INDEX]
    assert files[0] == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    for name in told:
        with safe_open(tmp_path / "export" / name, "pt") as file:
            assert sum(file.get_tensor(one).nbytes for one in file.keys()) <= most  # noqa: SIM118 - not a mapping
            assert file.metadata()["format"] == "pt"


def test_one_tensor_is_in_memory_at_a_time(checkpoint: Any, tmp_path: Path) -> None:
    alive: dict[int, int] = {}
    largest = 0

    with open_checkpoint_weights(checkpoint, averaged=False) as weights:

        def read(name: str) -> Tensor:
            nonlocal largest
            tensor = weights.read(name)
            alive[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, id(tensor))
            largest = max(largest, sum(alive.values()))
            return tensor

        write_layout(StoredWeights(weights.likes, read), tmp_path / "export", 10**9, {})
    assert (tmp_path / "export" / WHOLE).is_file()
    # While the next one is read, the one before is still there.
    assert largest <= 2 * SIDE * SIDE * 4


@pytest.mark.wording
def test_a_chunk_of_another_shape_is_not_spread_over_its_place(tmp_path: Path) -> None:
    """The files were sealed anew, so their digests are right."""
    snapshots = [snapshot(rank, stack()) for rank in range(RANKS)]
    lying = {**snapshots[1].tensors, "weights/parameters/0.weight": torch.zeros(1, SIDE)}
    snapshots[1] = replace(snapshots[1], tensors=lying)
    commit_together(tmp_path / "checkpoints", snapshots, keep=2, disks=[Disk()] * RANKS)
    place = list_generations(tmp_path / "checkpoints")[0]
    with (
        open_checkpoint_weights(place, averaged=False) as weights,
        pytest.raises(BadData, match=r"0\.weight"),
    ):
        write_layout(weights, tmp_path / "export", 10**9, {})
    assert not (tmp_path / "export").exists()


def test_a_tensor_is_never_cut_and_files_hold_as_much_as_they_may() -> None:
    likes = {name: torch.empty(size, dtype=torch.uint8) for name, size in zip("abcde", (4, 4, 20, 3, 7), strict=True)}
    assert split_into_shards(likes, 10) == [["a", "b"], ["c"], ["d", "e"]]
    assert split_into_shards(likes, 100) == [["a", "b", "c", "d", "e"]]


@pytest.mark.wording
def test_weights_that_are_not_finite_are_not_exported_and_leave_nothing(tmp_path: Path) -> None:
    bad = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])}
    with pytest.raises(BadData, match="b is not finite"):
        write_layout(StoredWeights(bad, bad.__getitem__, ["b"]), tmp_path / "export", 4, {})
    assert list(tmp_path.iterdir()) == []
    write_layout(StoredWeights(bad, bad.__getitem__, []), tmp_path / "export", 4, {})
    with pytest.raises(FileExistsError):
        write_layout(StoredWeights(bad, bad.__getitem__, []), tmp_path / "export", 4, {})


@pytest.mark.parametrize(("text", "count"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2**31), ("9B", 9)])
def test_sizes_in_words(text: str, count: int) -> None:
    assert parse_byte_size(text) == count


@pytest.mark.wording
@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0GB", "5 apples"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="max_shard_size"):
        parse_byte_size(text)


@pytest.mark.ranks
@pytest.mark.parametrize("average", [True, False])
def test_a_run_of_two_ranks_is_exported_as_its_own_files_have_it(
    on_ranks: Ranks, tmp_path: Path, average: bool
) -> None:
    """At the end of an epoch the run has gathered its weights itself."""
    on_ranks(fit, str(tmp_path), "fsdp", {"model.width": 300})
    run = tmp_path / "run"
    told = export_layout(run, tmp_path / "joined", 1000, "checkpoint", average, Tiny)
    export_layout(run, tmp_path / "whole", 10**6, "last", average, Tiny)
    assert len(told.files) > 1
    models = [nn.Sequential(nn.Linear(2, 300), nn.Tanh(), nn.Linear(300, 1)) for _ in range(2)]
    for model, name in zip(models, ("joined", "whole"), strict=True):
        load_torch_model(model, tmp_path / name, strict=True)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
