"""The checkpoints of a run as its loop sees them; and what a full disk does to the other files that it leaves."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from halfstep.checkpoint.commit import CheckpointSaver
from halfstep.checkpoint.paths import CHECKPOINTS, Disk, list_drafts, list_generations
from halfstep.checkpoint.reading import verify_checkpoint
from halfstep.distributed import RankGroup
from halfstep.errors import HalfstepError, OutOfMemory, Stopped, StorageFailed
from halfstep.journal.events import Event, Journal
from halfstep.train import checkpointing
from halfstep.train.checkpointing import Checkpoints
from halfstep.train.loop import Loop
from halfstep.train.outputs import LAST, RunOutputs
from halfstep.train.resume import _remove_drafts as remove_drafts
from halfstep.train.run import make_loop
from halfstep.train.weights import compute_weights_digest, load_weights
from tests.support.room import files_of_at_most
from tests.support.tiny_task import Tiny


class EventList:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    def told(self, event: str) -> list[Event]:
        return [one for one in self.events if one["event"] == event]


class Full(Disk):
    full = False

    def write(self, file: int, content: bytes | memoryview) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(file, content)


def test_a_test_file_that_cannot_be_removed_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(disk: Disk, file: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(file))

    monkeypatch.setattr(checkpointing, "estimate_checkpoint_size", lambda live: 1)
    with monkeypatch.context() as held:
        held.setattr(Disk, "remove", busy)
        checkpointing.check_folder_writable(tmp_path, None)  # type: ignore[arg-type]
    (left,) = tmp_path.iterdir()
    remove_drafts(tmp_path, Disk())
    assert not left.exists(), "the next launch removes it"


class Starving(Disk):
    """The process has no memory left for what it writes."""

    def write(self, file: int, content: bytes | memoryview) -> None:
        raise MemoryError("of a test")


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    train = {"steps": 40, "batch_size": 8, "seed": 1, "num_workers": 0}
    words = {"task": "tiny", "precision": "fp32", "model": {}, "data": {}, "loss": {}, "train": train}
    recipe = Tiny.schema.model_validate(words)
    return make_loop(Tiny(recipe), recipe, tmp_path, Journal())


@pytest.fixture
def taking(loop: Loop, tmp_path: Path) -> tuple[Checkpoints, Full, EventList]:
    disk, heard = Full(), EventList()
    saver = CheckpointSaver(tmp_path / CHECKPOINTS, keep=2, party=RankGroup(), background=True, disk=disk)
    return Checkpoints(loop.live, saver, Journal([heard])), disk, heard


def attempt(checkpoints: Checkpoints, step: int) -> None:
    checkpoints._live.progress.attempts = step
    checkpoints.save()
    checkpoints.finish()


def counted(heard: EventList) -> list[str]:
    return [one["text"].rpartition("(")[2].rstrip(")") for one in heard.told("note")]


@pytest.mark.wording
def test_saves_that_fail_for_want_of_memory_end_the_run_with_the_code_of_memory(loop: Loop, tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path / CHECKPOINTS, keep=2, party=RankGroup(), background=True, disk=Starving())
    checkpoints = Checkpoints(loop.live, saver, Journal())
    attempt(checkpoints, 1)
    attempt(checkpoints, 2)
    with pytest.raises(OutOfMemory, match=r"3 checkpoints in a row .* step 3: MemoryError: of a test") as caught:
        attempt(checkpoints, 3)
    assert caught.value.exit_code == 81
    assert "memory" in caught.value.allowed


@pytest.mark.wording
def test_failures_are_counted_in_a_row_and_the_third_ends_the_run(
    taking: tuple[Checkpoints, Full, EventList], tmp_path: Path
) -> None:
    checkpoints, disk, heard = taking
    attempt(checkpoints, 1)
    disk.full = True
    attempt(checkpoints, 2)
    attempt(checkpoints, 3)
    assert checkpoints.failures == 2
    disk.full = False
    attempt(checkpoints, 4)
    assert checkpoints.failures == 0
    disk.full = True
    attempt(checkpoints, 5)
    attempt(checkpoints, 6)
    with pytest.raises(StorageFailed, match=r"3 checkpoints in a row .* step 7: No space left on device") as caught:
        attempt(checkpoints, 7)
    assert caught.value.exit_code == 74
    assert counted(heard) == [f"{count} in a row, 3 end the run" for count in (1, 2, 1, 2, 3)]
    assert all(one["level"] == "warning" for one in heard.told("note"))
    assert [one["attempt"] for one in heard.told("saved")] == [1, 4]
    found = list_generations(tmp_path / CHECKPOINTS)
    assert [(one.attempt, verify_checkpoint(one).problem) for one in found] == [(4, None), (1, None)]
    assert list_drafts(tmp_path / CHECKPOINTS) == []
    assert checkpoints.name == found[0].name


@pytest.mark.wording
def test_numbers_that_are_not_finite_are_not_the_disks_fault(
    taking: tuple[Checkpoints, Full, EventList], loop: Loop
) -> None:
    checkpoints, _, heard = taking
    attempt(checkpoints, 1)
    next(loop.model.parameters()).data.fill_(float("nan"))
    for step in range(2, 7):
        attempt(checkpoints, step)
    assert checkpoints.failures == 0
    assert len(heard.told("note")) == 5
    assert "not finite: weights/parameters/" in heard.told("note")[0]["text"]
    with pytest.raises(Stopped, match=r"at step 6 of 40: the newest .* step-00000001\.0001; .* not finite") as caught:
        checkpoints.stop("SIGTERM", 40)
    assert caught.value.exit_code == 75


@pytest.mark.wording
def test_a_stop_of_a_run_that_was_never_finite_does_not_blame_the_disk(
    taking: tuple[Checkpoints, Full, EventList], loop: Loop, tmp_path: Path
) -> None:
    checkpoints, _, _ = taking
    next(loop.model.parameters()).data.fill_(float("inf"))
    attempt(checkpoints, 1)
    checkpoints._live.progress.attempts = 2
    with pytest.raises(HalfstepError, match="nothing could be saved: the weights are not finite") as caught:
        checkpoints.stop("SIGTERM", 40)
    assert caught.value.exit_code == 80
    assert "room" not in str(caught.value)
    assert list_generations(tmp_path / CHECKPOINTS) == []


@pytest.mark.wording
def test_stop_saves_what_is_there_and_ends_with_75(taking: tuple[Checkpoints, Full, EventList]) -> None:
    checkpoints, _, heard = taking
    checkpoints._live.progress.attempts = 9
    with pytest.raises(Stopped, match=r"stopped by SIGTERM at step 9 of 40: saved as step-00000009\.0001") as caught:
        checkpoints.stop("SIGTERM", 40)
    assert caught.value.exit_code == 75
    with pytest.raises(Stopped, match=r"step-00000009\.0001"):
        checkpoints.stop("SIGTERM", 40)  # the same step is not saved twice
    assert [one["attempt"] for one in heard.told("saved")] == [9]


@pytest.mark.wording
def test_a_stop_that_cannot_save_does_not_say_that_it_did(taking: tuple[Checkpoints, Full, EventList]) -> None:
    checkpoints, disk, _ = taking
    attempt(checkpoints, 1)
    disk.full = True
    checkpoints._live.progress.attempts = 2
    with pytest.raises(StorageFailed, match="could not be saved: No space left on device"):
        checkpoints.stop("SIGTERM", 40)


def test_what_is_under_way_when_a_run_ends_is_told_and_raises_nothing(
    taking: tuple[Checkpoints, Full, EventList],
) -> None:
    checkpoints, disk, heard = taking
    disk.full = True
    attempt(checkpoints, 1)
    attempt(checkpoints, 2)
    checkpoints._live.progress.attempts = 3
    checkpoints.save()
    checkpoints.close()
    assert counted(heard)[-1] == "3 in a row, 3 end the run"


# -- the other files --------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_weights_that_have_no_room_are_a_warning_and_the_old_ones_stay(tmp_path: Path) -> None:
    heard, model = EventList(), nn.Linear(20, 20)
    keeper = RunOutputs(tmp_path, Journal([heard]), pictures=0)
    keeper.last(model, None)
    before = compute_weights_digest(model)
    model.weight.data.add_(1)
    with files_of_at_most(500):
        keeper.last(model, None)
        keeper.best(model, None, 1, {"loss": 0.5})
    assert [one["file"] for one in heard.told("saved")] == [LAST]
    notes = [one["text"] for one in heard.told("note")]
    assert [note.split()[0] for note in notes] == [LAST, "best.safetensors"]
    assert all("File too large" in note and "\n" not in note for note in notes)
    other = nn.Linear(20, 20)
    load_weights(other, tmp_path / LAST)
    assert compute_weights_digest(other) == before
    assert [path.name for path in tmp_path.iterdir()] == [LAST], "drafts are left"
    with pytest.raises(StorageFailed, match=r"last\.safetensors could not be written: .*File too large") as caught:
        keeper.result({"reason": "finished"})
    assert caught.value.exit_code == 74
    assert not (tmp_path / "result.json").exists()
    keeper.last(model, None)
    with pytest.raises(StorageFailed, match=r"best\.safetensors could not be written: .*File too large"):
        keeper.result({"reason": "finished"})
    keeper.best(model, None, 1, {"loss": 0.5})
    keeper.result({"reason": "finished"})
    assert (tmp_path / "result.json").exists()


@pytest.mark.wording
@pytest.mark.parametrize(
    "write", [lambda keeper: keeper.result({"a": "x" * 100}), lambda keeper: keeper.facts(_Facts())]
)
def test_a_small_file_that_has_no_room_ends_the_run_in_words(
    tmp_path: Path, write: Callable[[RunOutputs], None]
) -> None:
    keeper = RunOutputs(tmp_path, Journal(), pictures=0)
    with files_of_at_most(50), pytest.raises(StorageFailed, match=r"\.json could not be written: File too large"):
        write(keeper)
    assert list(tmp_path.iterdir()) == []


class _Facts:
    def facts(self) -> dict[str, Any]:
        return {"classes": ["cat"] * 50}


class Drawing(Tiny):
    def pictures(self, model: nn.Module, batch: Any) -> Any:
        return [np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)]


def test_the_newest_pictures_are_kept_and_other_files_stay(tmp_path: Path, loop: Loop) -> None:
    keeper = RunOutputs(tmp_path, Journal(), pictures=2, kept=3)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "mine.png").write_bytes(b"of a user")
    for epoch in (9998, 9999, 10000, 10001, 10002):
        keeper.pictures(Drawing(loop.recipe), loop.model, loop.val, loop.parts.choice.precision, epoch)
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "epoch-10000.png",
        "epoch-10001.png",
        "epoch-10002.png",
        "mine.png",
    ]


def test_a_picture_that_has_no_room_is_a_warning(tmp_path: Path, loop: Loop) -> None:
    heard = EventList()
    keeper = RunOutputs(tmp_path, Journal([heard]), pictures=2)
    with files_of_at_most(100):
        keeper.pictures(Drawing(loop.recipe), loop.model, loop.val, loop.parts.choice.precision, 1)
    assert "pictures/epoch-0001.png is unchanged: File too large" in heard.told("note")[0]["text"]
    assert heard.told("saved") == []
