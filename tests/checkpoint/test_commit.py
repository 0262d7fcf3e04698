"""A save happens completely or not at all: what is written, what is refused, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from faults.crash_story import commit_together
from halfstep.checkpoint.commit import NotCommitted, RankSnapshot, commit_checkpoint, remove_old_generations
from halfstep.checkpoint.paths import DRAFT, CheckpointDir, Disk, list_drafts, list_generations, remove_unfinished_saves
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state, verify_checkpoint
from halfstep.checkpoint.sealed import (
    FORMAT,
    MANIFEST,
    MOST_TENSORS,
    add_seal,
    name_state_file,
    name_tensors_file,
    read_manifest,
)
from halfstep.distributed import RankGroup
from halfstep.files import LARGEST_JSON


class Failing(Disk):
    """Fails at the n-th operation of a kind."""

    def __init__(self, operation: str, nth: int = 1, error: Exception | None = None) -> None:
        real = getattr(super(), operation)
        left = [nth]

        def failing(*given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*given)

        setattr(self, operation, failing)


def snapshot(attempt: int = 3, **more: Any) -> RankSnapshot:
    return RankSnapshot(attempt, {"step": attempt}, **{"tensors": {"w": torch.full((4, 3), float(attempt))}, **more})


def save(folder: Path, given: RankSnapshot, *, keep: int = 2, disk: Disk | None = None) -> CheckpointDir:
    return commit_checkpoint(folder, given, keep=keep, disk=disk or Disk(), party=RankGroup())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, whatever the type."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    plain = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return alike and torch.equal(*plain)


# -- what is written --------------------------------------------------------------------------------------------------

ODD = {
    "zero-dim": torch.tensor(2.5),
    "empty": torch.empty(0),
    "empty/rows": torch.empty(3, 0, 2),
    "brain": torch.randn(5, 3).bfloat16(),
    "half": torch.randn(7).half(),
    "odd bytes": torch.arange(3, dtype=torch.uint8),
    "doubles": torch.tensor([math.inf, -math.inf, math.nan, -0.0, 5e-324], dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.tensor([-(2**63), 2**63 - 1]),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).t(),
    "every other": torch.randn(10)[::2],
    "a view/of one": torch.randn(1, 3).expand(4, 3),
}


def test_tensors_of_every_kind_are_as_the_usual_reader_expects_them(tmp_path: Path) -> None:
    found = save(tmp_path / "c", snapshot(tensors=ODD))
    file = found.path / name_tensors_file(0)
    loaded = load_file(file)
    assert loaded.keys() == ODD.keys()
    assert [name for name in ODD if not same(loaded[name], ODD[name])] == []
    assert all(tensor.is_contiguous() for tensor in loaded.values())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_no_tensors_and_an_empty_state_are_a_checkpoint_too(tmp_path: Path) -> None:
    found = save(tmp_path / "c", RankSnapshot(0, {}, {}))
    assert found.name == "step-00000000.0001"
    assert verify_checkpoint(found).problem is None
    assert read_rank_state(found, 0) == ({}, {})


def test_a_commit_is_the_three_files_and_their_manifest(tmp_path: Path) -> None:
    found = save(tmp_path / "c", snapshot(environment={"torch": "x"}))
    assert names(found.path) == [MANIFEST, name_state_file(0), name_tensors_file(0)]
    manifest = read_manifest(found)
    assert (manifest.attempt, manifest.world_size, manifest.environment) == (3, 1, {"torch": "x"})
    assert {one.name: one.size for one in manifest.files} == {
        name: (found.path / name).stat().st_size for name in (name_state_file(0), name_tensors_file(0))
    }


@pytest.mark.wording
def test_a_tensor_that_no_file_can_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted, match="complex64"):
        save(tmp_path / "c", snapshot(tensors={"w": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(NotCommitted, match="JSON"):
        save(tmp_path / "c", RankSnapshot(3, {"loss": math.nan}, {}))
    assert names(tmp_path / "c") == []


# -- what is not worth keeping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_that_are_not_finite_are_never_committed(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, snapshot(3))
    bad = torch.zeros(1000, dtype=dtype)
    bad[617] = value
    with pytest.raises(NotCommitted) as caught:
        save(tmp_path, snapshot(6, tensors={"good": torch.zeros(2), "w": bad}, finite=["good", "w"]))
    assert str(caught.value) == "not finite: w"
    assert caught.value.is_nonfinite
    assert names(tmp_path) == ["step-00000003.0001"]


def test_buffers_may_be_infinite_and_not_nan(tmp_path: Path) -> None:
    mask = torch.tensor([0.0, -math.inf])
    save(tmp_path, snapshot(3, tensors={"mask": mask, "count": torch.tensor(3)}, not_nan=["mask", "count"]))
    with pytest.raises(NotCommitted, match="not finite: mask"):
        save(tmp_path, snapshot(6, tensors={"mask": mask * 0}, not_nan=["mask"]))
    empty = {"w": torch.empty(0), "flags": torch.tensor([True])}
    save(tmp_path, snapshot(9, tensors=empty, finite=list(empty), not_nan=list(empty)))
    assert [one.attempt for one in list_generations(tmp_path)] == [9, 3]


def test_other_tensors_may_hold_anything(tmp_path: Path) -> None:
    found = save(tmp_path, snapshot(tensors={"metric": torch.tensor([math.nan])}))
    assert read_rank_state(found, 0)[1]["metric"].isnan().all()


# -- failures ---------------------------------------------------------------------------------------------------------

STEPS = [("make_folder", 1), *((name, nth) for name in ("create", "write", "flush") for nth in (1, 2, 3))]


@pytest.mark.parametrize(("operation", "nth"), [*STEPS, ("write", 4), ("flush_folder", 1), ("rename", 1)])
def test_a_failure_anywhere_leaves_no_draft_and_the_old_one(operation: str, nth: int, tmp_path: Path) -> None:
    save(tmp_path, snapshot(3))
    with pytest.raises(NotCommitted) as caught:
        save(tmp_path, snapshot(6), disk=Failing(operation, nth))
    assert str(caught.value) == "No space left on device"
    assert not caught.value.is_nonfinite
    assert names(tmp_path) == ["step-00000003.0001"]
    assert save(tmp_path, snapshot(6)).attempt == 6


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("odd"), ValueError("worse")])
def test_a_failure_of_any_kind_is_told_as_one(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(NotCommitted) as caught:
        save(tmp_path, snapshot(), disk=Failing("write", 2, error))
    assert str(caught.value) == f"{type(error).__name__}: {error}"
    assert names(tmp_path) == []


def test_a_name_that_could_not_be_flushed_is_no_acknowledged_save_and_no_loss_either(tmp_path: Path) -> None:
    save(tmp_path, snapshot(3))
    with pytest.raises(NotCommitted):
        save(tmp_path, snapshot(6), disk=Failing("flush_folder", 2))
    assert list_drafts(tmp_path) == []
    verdict, damaged = find_newest_intact(tmp_path)
    assert (verdict is not None, damaged) == (True, [])
    assert 3 in [one.attempt for one in list_generations(tmp_path)]


def test_old_ones_that_cannot_be_removed_do_not_undo_a_commit(tmp_path: Path) -> None:
    for attempt in (3, 6):
        save(tmp_path, snapshot(attempt))
    assert save(tmp_path, snapshot(9), disk=Failing("rename", 2)).attempt == 9
    assert [one.attempt for one in list_generations(tmp_path)] == [9, 6, 3]
    save(tmp_path, snapshot(12), disk=Failing("remove", 1))
    assert [one.attempt for one in list_generations(tmp_path)] == [12, 9]
    assert len(list_drafts(tmp_path)) == 1, "one was held up, and the next was removed"
    remove_unfinished_saves(tmp_path, Disk())
    assert names(tmp_path) == ["step-00000009.0003", "step-00000012.0004"]


# -- several processes ------------------------------------------------------------------------------------------------


def together(folder: Path, *given: RankSnapshot, disks: list[Disk] | None = None) -> list[Any]:
    return commit_together(folder, given, keep=2, disks=disks or [Disk() for _ in given])


def test_every_process_writes_its_own_and_knows_the_same_checkpoint(tmp_path: Path) -> None:
    parts = [snapshot(3, tensors={"own": torch.tensor([rank])}) for rank in range(3)]
    found = together(tmp_path, *parts)
    assert found == [CheckpointDir(tmp_path / "step-00000003.0001", 3, 1)] * 3
    assert read_manifest(found[0]).world_size == 3
    assert [int(read_rank_state(found[0], rank)[1]["own"]) for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("operation", ["create", "write", "flush"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_is_told_by_all_in_the_same_words(operation: str, rank: int, tmp_path: Path) -> None:
    together(tmp_path, snapshot(3), snapshot(3))
    disks = [Failing(operation) if rank == own else Disk() for own in range(2)]
    told = together(tmp_path, snapshot(6), snapshot(6), disks=disks)
    assert [type(one) for one in told] == [NotCommitted] * 2
    assert {str(one) for one in told} == {f"No space left on device (rank {rank})"}
    assert names(tmp_path) == ["step-00000003.0001"]


def test_a_process_that_has_gone_wrong_keeps_all_from_saving(tmp_path: Path) -> None:
    bad = snapshot(3, tensors={"w": torch.tensor(math.nan)}, finite=["w"])
    told = together(tmp_path / "c", snapshot(3), bad)
    assert [str(one) for one in told] == ["not finite: w (rank 1)"] * 2
    assert all(one.is_nonfinite for one in told)
    assert not (tmp_path / "c").exists() or names(tmp_path / "c") == []


def test_processes_at_different_steps_make_no_checkpoint(tmp_path: Path) -> None:
    told = together(tmp_path, snapshot(3), snapshot(6))
    assert [str(one) for one in told] == ["the processes are at different steps: 3, 6"] * 2
    assert names(tmp_path) == []


# -- old ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    for attempt in (3, 6, 9, 12, 6):
        save(tmp_path, snapshot(attempt), keep=keep)
    assert [one.attempt for one in list_generations(tmp_path)] == [6, 12, 9][:keep]
    assert list_drafts(tmp_path) == []


def test_a_step_that_is_saved_again_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = save(tmp_path, snapshot(3)), save(tmp_path, RankSnapshot(3, {"again": True}, {}))
    assert first.path != second.path
    assert verify_checkpoint(first).problem is None
    verdict, _ = find_newest_intact(tmp_path)
    assert verdict is not None
    assert verdict.generation == second


def test_numbers_are_not_used_again_after_a_failure(tmp_path: Path) -> None:
    class Stubborn(Failing):
        def remove(self, file: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    save(tmp_path, snapshot(3))
    with pytest.raises(NotCommitted, match="No space"):
        save(tmp_path, snapshot(6), disk=Stubborn("flush", 3))
    assert names(tmp_path) == ["step-00000003.0001", "step-00000006.0002.tmp"]
    assert save(tmp_path, snapshot(6)).number == 3


def test_old_ones_that_cannot_be_listed_are_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlisted(Disk):
        """From the commit on, the folder is there and cannot be read."""

        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            monkeypatch.setattr(Path, "iterdir", unreadable)

    def unreadable(path: Path) -> list[Path]:
        raise OSError(errno.EIO, "Input/output error")

    save(tmp_path, snapshot(3))
    found = save(tmp_path, snapshot(6), keep=1, disk=Unlisted())
    monkeypatch.undo()
    assert verify_checkpoint(found).problem is None
    assert [one.attempt for one in list_generations(tmp_path)] == [6, 3]


@pytest.mark.full
def test_as_many_tensors_as_can_be_read_are_written_and_not_one_more(tmp_path: Path) -> None:
    one = torch.zeros(0)
    most = {str(n): one for n in range(MOST_TENSORS - 1)}
    found = save(tmp_path, snapshot(3, tensors=most))
    assert read_rank_state(found, 0)[1].keys() == most.keys()
    with pytest.raises(NotCommitted, match=r"100,000 tensors of one process: .* at most 99,999"):
        save(tmp_path, snapshot(6, tensors={**most, "more": one}))
    assert names(tmp_path) == [found.name]


def test_as_much_state_as_can_be_read_is_written_and_not_one_byte_more(tmp_path: Path) -> None:
    most = "x" * (LARGEST_JSON - 2)
    found = save(tmp_path, RankSnapshot(3, most, {}))
    assert read_rank_state(found, 0) == (most, {})
    with pytest.raises(NotCommitted, match="16,777,217 bytes of state without tensors"):
        save(tmp_path, RankSnapshot(6, most + "x", {}))
    with pytest.raises(NotCommitted, match="bytes for the table of tensors"):
        save(tmp_path, snapshot(6, tensors={most: torch.zeros(1)}))
    with pytest.raises(NotCommitted, match="bytes of manifest"):
        save(tmp_path, snapshot(6, environment={"long": most}))
    assert names(tmp_path) == [found.name]


def damage(generation: CheckpointDir, kind: str) -> None:
    file = generation.path / (MANIFEST if kind == "manifest" else name_tensors_file(0))
    if kind == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("kind", ["missing", "cut", "manifest"])
def test_damaged_ones_are_not_counted_among_those_that_are_kept(kind: str, tmp_path: Path) -> None:
    for attempt in (3, 6, 9, 12):
        save(tmp_path, snapshot(attempt), keep=9)
    for one in list_generations(tmp_path)[:2]:
        damage(one, kind)
    remove_old_generations(tmp_path, 2, Disk())
    assert [one.attempt for one in list_generations(tmp_path)] == [12, 9, 6, 3]
    remove_old_generations(tmp_path, 1, Disk())
    assert [one.attempt for one in list_generations(tmp_path)] == [12, 9, 6]
    save(tmp_path, snapshot(15), keep=2)
    assert [one.attempt for one in list_generations(tmp_path)] == [15, 12, 9, 6]
    save(tmp_path, snapshot(18), keep=2)
    assert [one.attempt for one in list_generations(tmp_path)] == [18, 15]


class Overlay(Disk):
    """Renames no committed folder, as an overlay file system does not where the folder is in a lower layer."""

    def rename(self, old: Path, new: Path) -> None:
        if not old.name.endswith(DRAFT):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().rename(old, new)


def test_old_ones_in_the_lower_layer_of_an_overlay_are_removed(tmp_path: Path) -> None:
    for attempt in (3, 6, 9, 12):
        save(tmp_path, snapshot(attempt), keep=2, disk=Overlay())
    assert names(tmp_path) == [one.name for one in reversed(list_generations(tmp_path))]
    assert [one.attempt for one in list_generations(tmp_path)] == [12, 9]


def test_one_that_is_half_removed_from_an_overlay_is_no_checkpoint_and_goes_later(tmp_path: Path) -> None:
    for attempt in (3, 6):
        save(tmp_path, snapshot(attempt))
    crashing = Overlay()
    crashing.remove_folder = Failing("remove_folder").remove_folder  # type: ignore[method-assign]
    save(tmp_path, snapshot(9), disk=crashing)
    assert verify_checkpoint(list_generations(tmp_path)[2]).problem
    save(tmp_path, snapshot(12), disk=Overlay())
    assert [one.attempt for one in list_generations(tmp_path)] == [12, 9]


@pytest.mark.parametrize("form", [FORMAT - 1, FORMAT + 1])
def test_one_of_another_version_is_not_removed_as_damaged(form: int, tmp_path: Path) -> None:
    for attempt in (3, 6, 9):
        save(tmp_path, snapshot(attempt), keep=9)
    newest = list_generations(tmp_path)[0].path / MANIFEST
    content = json.loads(newest.read_text())
    del content["seal"]
    newest.write_bytes(add_seal({**content, "format": form}))
    remove_old_generations(tmp_path, 2, Disk())
    assert [one.attempt for one in list_generations(tmp_path)] == [9, 6]


def test_sweeping_removes_drafts_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, snapshot(3))
    for number in range(2, 7):
        (tmp_path / f"step-00000006.{number:04x}.tmp").mkdir()
        (tmp_path / f"step-00000006.{number:04x}.tmp" / MANIFEST).write_text("{")
    (tmp_path / "step-00000006.0002.tmp" / "a folder").mkdir()
    (tmp_path / "step-00000006.0007.bad").mkdir()
    outside = tmp_path.with_name("outside")
    outside.mkdir()
    (outside / "precious").touch()
    (tmp_path / "step-00000006.0008.tmp").symlink_to(outside)
    remove_unfinished_saves(tmp_path, Disk())
    left = ["step-00000003.0001", "step-00000006.0002.tmp", "step-00000006.0007.bad", "step-00000006.0008.tmp"]
    assert names(tmp_path) == left, "what cannot be removed stays, and holds nothing up"
    assert (outside / "precious").exists()


def test_plain_state_is_written_as_json(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    found = save(tmp_path, RankSnapshot(3, plain, {}))
    assert json.loads((found.path / name_state_file(0)).read_bytes()) == plain
