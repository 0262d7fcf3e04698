"""Sharded tensors are written once, and read by any number of ranks, each of which opens only the files it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfstep.checkpoint.chunks import ChunkedTensor, convert_chunks_to_json, find_chunk_layout, parse_chunks
from halfstep.checkpoint.resharding import load_into_tensors
from halfstep.checkpoint.sealed import name_tensors_file
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
SHAPES = {"even": (8, 3), "uneven": (7, 2, 2), "few rows": (2, 5), "vector": (5,), "one": (1,)}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.bfloat16 if name == "vector" else torch.float32
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def placed(ranks: list[int] | list[list[int]]) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", ranks)
    how = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return {name: distribute_tensor(whole(name), mesh, how) for name in SHAPES}


def saved(rank: int, folder: str, ranks: Any) -> str:
    tensors = placed(ranks)
    table = {name: find_chunk_layout(name, tensor) for name, tensor in tensors.items()}
    mine = {name for name, one in table.items() if one.is_held_by(rank)}
    save_file({name: tensors[name].to_local().contiguous() for name in mine}, Path(folder) / name_tensors_file(rank))
    return json.dumps(convert_chunks_to_json(table))


def loaded(rank: int, folder: str, table: str, ranks: Any) -> int:
    from torch.distributed.device_mesh import DeviceMesh

    tensors = placed(ranks)
    mine = DeviceMesh("cpu", ranks).get_coordinate() is not None
    local = {name: torch.full_like(tensor.to_local(), 7.0) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.to_local().copy_(local[name])
    opened = load_into_tensors(Path(folder), parse_chunks(json.loads(table), 4), tensors) if mine else 0
    for name, tensor in tensors.items() if mine else ():
        assert torch.equal(tensor.full_tensor(), whole(name)), name
    return opened


@pytest.mark.parametrize("wrote", [[0, 1, 2, 3], [0, 1], [[0, 1], [2, 3]]], ids=str)
def test_what_some_ranks_wrote_others_read(four: Ranks, tmp_path: Path, wrote: Any) -> None:
    tables = four(saved, str(tmp_path), wrote)
    table = parse_chunks(json.loads(tables[0]), 4)
    # Every element is in exactly one chunk of one file.
    held = [name for rank in range(4) for name in _names(tmp_path / name_tensors_file(rank))]
    assert len(held) == sum(len(list(one.chunks())) for one in table.values())
    assert set(held) == set(SHAPES)
    for reads in ([0, 1, 2, 3], [0, 1], [0, 1, 2], [[0, 1], [2, 3]]):
        opened = four(loaded, str(tmp_path), tables[0], reads)
        assert max(opened) <= 4
    alone = {name: torch.full_like(whole(name), 7.0) for name in SHAPES}
    load_into_tensors(tmp_path, table, alone)
    assert all(torch.equal(alone[name], whole(name)) for name in SHAPES)


def test_a_rank_opens_only_the_files_it_needs(four: Ranks, tmp_path: Path) -> None:
    tables = four(saved, str(tmp_path), [0, 1, 2, 3])
    table = {"even": parse_chunks(json.loads(tables[0]), 4)["even"]}
    (tmp_path / name_tensors_file(3)).unlink()
    first = {"even": torch.zeros(8, 3)}
    with pytest.raises(FileNotFoundError):
        load_into_tensors(tmp_path, table, first)
    opened = four(_first_quarter, str(tmp_path), tables[0])
    assert opened == [1, 1, 1, None]


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def _first_quarter(rank: int, folder: str, table: str) -> int | None:
    even = {"even": parse_chunks(json.loads(table), 4)["even"]}
    tensor = placed([0, 1, 2, 3])["even"]
    try:
        return load_into_tensors(Path(folder), even, {"even": tensor})
    except FileNotFoundError:
        return None


def _replicas_of(tables: dict[str, ChunkedTensor]) -> set[tuple[int, ...]]:
    return {one.ranks for one in tables.values()}


def test_replicas_share_the_writing(four: Ranks, tmp_path: Path) -> None:
    tables = four(saved, str(tmp_path), [[0, 1], [2, 3]])
    assert _replicas_of(parse_chunks(json.loads(tables[0]), 4)) == {(0, 1), (2, 3)}
    assert len(set(tables)) == 1


GOOD = {"layouts": [[0, 1]], "tensors": {"w": [[4, 2], "F32", 0, 2, 0]}}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {**GOOD, "more": 1},
        {**GOOD, "layouts": [[0, 4]]},
        {**GOOD, "layouts": [[0, True]]},
        {**GOOD, "tensors": {"w": [[4, 2], "F32", 0, 1, 0]}},
        {**GOOD, "tensors": {"w": [[4, 2], "F32", 2, 2, 0]}},
        {**GOOD, "tensors": {"w": [[4, 2], "F32", 0, 2, 1]}},
        {**GOOD, "tensors": {"w": [[4, -2], "F32", 0, 2, 0]}},
        {**GOOD, "tensors": {"w": [[4, 2], "F31", 0, 2, 0]}},
        {**GOOD, "tensors": {"w": "abcde"}},
    ],
    ids=str,
)
def test_a_table_that_was_not_written_is_refused(broken: Any) -> None:
    assert parse_chunks(GOOD, 2)["w"].ranks == (0, 1)
    with pytest.raises(ValueError):
        parse_chunks(broken, 2)


def test_the_table_is_small_for_many_ranks() -> None:
    ranks = tuple(range(1024))
    tensors = {f"layers.{n}.weight": ChunkedTensor((8192, 8192), torch.float32, 0, 8, ranks) for n in range(1000)}
    assert len(json.dumps(convert_chunks_to_json(tensors))) < 100_000
    assert parse_chunks(convert_chunks_to_json(tensors), 1024) == tensors
