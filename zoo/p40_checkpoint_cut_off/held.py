"""The same kill in the middle of a save, a damaged file, and a save that went well: the newest whole one is found."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import Tensor

from halfstep.checkpoint.commit import RankSnapshot, commit_checkpoint
from halfstep.checkpoint.paths import Disk, list_generations
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state
from halfstep.distributed import RankGroup
from zoo.outcome import Outcome
from zoo.p40_checkpoint_cut_off.plain import state


class Killed(BaseException):
    """Nothing that code may catch and tidy up after."""


class KilledHalfWay(Disk):
    """Writes half of the tensors' bytes, and no more."""

    def write(self, file: int, content: bytes | memoryview) -> None:
        whole = memoryview(content).cast("B")
        if len(whole) > 100_000:
            super().write(file, whole[: len(whole) // 2])
            raise Killed
        super().write(file, whole)


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        save(folder, 1, Disk())
        try:
            save(folder, 2, KilledHalfWay())
            killed = False
        except Killed:
            killed = True
        after_the_kill = newest(folder)
        save(folder, 3, Disk())
        weights = max(list_generations(folder)[0].path.iterdir(), key=lambda file: file.stat().st_size)
        weights.write_bytes(weights.read_bytes()[:-1000])
        after_damage = newest(folder)
    return Outcome(
        good=killed and after_the_kill == after_damage == 1,
        seen=f"killed in the save of step 2: {killed}, then the newest whole one is step {after_the_kill}; with step 3 "
        f"cut short on the disk it is step {after_damage}, and its digests are right",
    )


def save(folder: Path, step: int, disk: Disk) -> None:
    commit_checkpoint(folder, RankSnapshot(step, {"attempt": step}, state(step)), keep=3, disk=disk, party=RankGroup())


def newest(folder: Path) -> int:
    """Return the step of the newest intact checkpoint, by its tensors."""
    intact, _damaged = find_newest_intact(folder)
    assert intact is not None
    tensors: dict[str, Tensor] = read_rank_state(intact.generation, 0)[1]
    return int(tensors["weight"][0, 0])
