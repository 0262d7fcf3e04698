"""Saves beside the training: what is written is what was there when it was asked for, and no failure is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.checkpoint.commit import CheckpointSaver, RankSnapshot
from halfstep.checkpoint.paths import Disk, list_drafts, list_generations
from halfstep.checkpoint.reading import read_rank_state, verify_checkpoint
from halfstep.distributed import RankGroup


class Gate(Disk):
    """Holds every save at its first file until it is opened."""

    def __init__(self) -> None:
        self.open, self.threads = threading.Event(), set[str]()

    def create(self, path: Path) -> int:
        self.threads.add(threading.current_thread().name)
        assert self.open.wait(10)
        return super().create(path)


class Broken(Disk):
    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def write(self, file: int, content: bytes | memoryview) -> None:
        if self.error is not None:
            raise self.error
        super().write(file, content)


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Any]:
    made: list[CheckpointSaver] = []

    def make(disk: Disk | None = None, background: bool = True) -> CheckpointSaver:
        made.append(
            CheckpointSaver(tmp_path / "checkpoints", keep=2, party=RankGroup(), background=background, disk=disk)
        )
        return made[-1]

    yield make
    for saver in made:
        saver.close()


def snapshot(attempt: int, **tensors: Tensor) -> RankSnapshot:
    return RankSnapshot(attempt, {"attempt": attempt}, tensors)


def saved(tmp_path: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint, which must be whole."""
    newest = list_generations(tmp_path / "checkpoints")[0]
    assert verify_checkpoint(newest).problem is None
    return read_rank_state(newest, 0)[1]


def test_what_the_training_changes_right_after_is_not_in_the_save(savers: Any, tmp_path: Path) -> None:
    gate = Gate()
    saver, weight = savers(gate), torch.arange(6.0).reshape(2, 3)
    saver.save(snapshot(1, weight=weight))
    weight.fill_(-1)
    gate.open.set()
    (told,) = saver.finish()
    assert (told.failure, told.attempt, told.bytes) == (None, 1, 24)
    assert torch.equal(saved(tmp_path)["weight"], torch.arange(6.0).reshape(2, 3))


def test_the_training_goes_on_while_a_save_is_written(savers: Any) -> None:
    gate = Gate()
    saver = savers(gate)
    saver.save(snapshot(1, weight=torch.ones(3)))
    assert saver.results() == []
    gate.open.set()
    (told,) = saver.finish()
    assert gate.threads == {"checkpoint_0"}
    assert 0 <= told.blocked <= told.seconds


def test_the_second_save_is_copied_into_the_memory_of_the_first(savers: Any, tmp_path: Path) -> None:
    saver = savers()
    odd = torch.randn(4, 6)[:, ::2]  # not dense: a buffer like it is laid out otherwise
    tensors = {"weight": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "odd": odd, "one": odd.sum()}
    places = []
    for attempt in (1, 2, 3):
        saver.save(snapshot(attempt, **tensors))
        assert saver.finish()[0].failure is None
        places.append({name: buffer.data_ptr() for name, buffer in saver._buffers.items()})
        assert all(torch.equal(tensor, saved(tmp_path)[name]) for name, tensor in tensors.items())
        for tensor in tensors.values():
            tensor.add_(1)
    assert places[0] == places[1] == places[2]
    assert not {tensor.data_ptr() for tensor in tensors.values()} & set(places[0].values())


def test_a_tensor_of_another_shape_or_type_gets_other_memory(savers: Any, tmp_path: Path) -> None:
    saver = savers()
    for attempt, tensor in enumerate([torch.ones(3), torch.ones(5), torch.ones(5, dtype=torch.int64), torch.ones(0)]):
        saver.save(snapshot(attempt, weight=tensor))
        assert saver.finish()[0].failure is None
        assert torch.equal(saved(tmp_path)["weight"], tensor)
        assert saved(tmp_path)["weight"].dtype == tensor.dtype
    assert list(saver._buffers) == ["weight"]
    saver.save(snapshot(9))
    assert saver.finish()[0].bytes == 0
    assert not saver._buffers


def test_one_save_is_under_way_at_a_time(savers: Any, tmp_path: Path) -> None:
    gate = Gate()
    saver = savers(gate)
    saver.save(snapshot(1, weight=torch.zeros(3)))
    threading.Timer(0.2, gate.open.set).start()
    began = time.perf_counter()
    saver.save(snapshot(2, weight=torch.ones(3)))
    assert time.perf_counter() - began > 0.1, "the second one did not wait for the first"
    assert [one.attempt for one in saver.finish()] == [1, 2]
    assert [one.attempt for one in list_generations(tmp_path / "checkpoints")] == [2, 1]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), RuntimeError("a defect")])
def test_a_failure_is_told_once_and_the_next_save_is_none(
    savers: Any, tmp_path: Path, error: Exception, background: bool
) -> None:
    disk = Broken(error)
    saver = savers(disk, background)
    saver.save(snapshot(1, weight=torch.ones(3)))
    (told,) = saver.finish()
    assert (told.generation, told.attempt) == (None, 1)
    assert ("No space left" if isinstance(error, OSError) else type(error).__name__) in str(told.failure)
    assert saver.results() == [] == saver.finish()
    assert list_generations(tmp_path / "checkpoints") == [] == list_drafts(tmp_path / "checkpoints")
    disk.error = None
    saver.save(snapshot(2, weight=torch.ones(3)))
    assert [(one.attempt, one.failure) for one in saver.finish()] == [(2, None)]


def test_a_failure_of_the_protocol_itself_is_told_too(tmp_path: Path) -> None:
    """Another process is gone, and what all of them agree by fails."""

    class Broken(RankGroup):
        def decide(self, text: str, conclude: Any) -> str:
            raise RuntimeError("Connection closed by peer")

    saver = CheckpointSaver(tmp_path / "checkpoints", keep=2, party=Broken())
    saver.save(snapshot(1, weight=torch.ones(3)))
    assert [str(one.failure) for one in saver.finish()] == ["RuntimeError: Connection closed by peer"]
    assert saver.results() == []
    saver.close()


def test_a_folder_that_cannot_be_made_is_a_save_that_failed(savers: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    saver = savers()
    saver.save(snapshot(1, weight=torch.ones(3)))
    assert saver.finish()[0].failure is not None


@pytest.mark.parametrize("background", [True, False])
def test_a_state_that_cannot_be_copied_is_a_save_that_failed(savers: Any, tmp_path: Path, background: bool) -> None:
    class NoMemory(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in ("copy_", "cpu", "empty_like"):
                raise RuntimeError("DefaultAllocator: can't allocate memory\nand more")
            return super().__torch_function__(function, types, args, kwargs)

    saver = savers(None, background)
    saver.save(snapshot(1, good=torch.ones(3), weight=torch.ones(3).as_subclass(NoMemory)))
    (told,) = saver.finish()
    assert str(told.failure) == "no memory for a copy of the state: DefaultAllocator: can't allocate memory"
    assert list_generations(tmp_path / "checkpoints") == [] == list_drafts(tmp_path / "checkpoints")
    saver.save(snapshot(2, weight=torch.ones(3)))
    assert saver.finish()[0].failure is None


def test_close_waits_for_what_is_under_way(savers: Any, tmp_path: Path) -> None:
    gate = Gate()
    saver = savers(gate)
    saver.save(snapshot(1, weight=torch.ones(3)))
    threading.Timer(0.1, gate.open.set).start()
    saver.close()
    assert torch.equal(saved(tmp_path)["weight"], torch.ones(3))
    assert [one.attempt for one in saver.results()] == [1]


def test_without_a_background_the_save_is_done_when_it_returns(savers: Any, tmp_path: Path) -> None:
    saver, names = savers(None, False), threading.enumerate()
    saver.save(snapshot(7, weight=torch.full((2,), 7.0)))
    assert torch.equal(saved(tmp_path)["weight"], torch.full((2,), 7.0))
    (told,) = saver.results()
    assert told.blocked == told.seconds > 0
    assert threading.enumerate() == names
