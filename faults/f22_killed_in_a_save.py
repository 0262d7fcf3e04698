"""A rank is killed while all of them save their shards: that save is complete or not there, and a run goes on."""

from __future__ import annotations

from pathlib import Path

from faults import on_two, rig
from faults.job import HALVED, Job, saved_step
from faults.judged import Compared, first_wrong, outcome
from faults.killing import POINTS, KillAt, Point
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.sealed import MANIFEST, read_manifest

ID = "F22"
WHAT = "a rank killed before, in or after its shard leaves the save complete or absent; a restart resumes"
EACH = {False: 1, True: 5}
SETTINGS = {**HALVED, "train.steps": 20, "world.mode": "fsdp", "model.width": 64, "world.timeout": 10.0}
SHARD = "rank-00001.safetensors"
WHEN = {
    "before its shard": (1, Point("before", "create", SHARD)),
    "in its shard": (1, Point("after", "write", SHARD)),
    "after its shard": (1, Point("after", "flush", SHARD)),
    "after its whole part": (1, Point("after", "flush", "rank-00001.json")),
    "before the manifest": (0, POINTS["before the manifest"]),
    "after the manifest": (0, POINTS["after the manifest is flushed"]),
    "after the rename": (0, POINTS["after the rename"]),
}
"""The rank that is killed, and where. Rank 0 writes the manifest for all."""
SMALL = ("in its shard", "after the manifest")
LATEST = 45.0
"""Seconds until the other rank has ended: its timeout, and what a busy machine adds to it. How soon is F35's row."""


def run(full: bool) -> Outcome:
    trials, compared = {}, Compared()
    with rig.scratch() as folder:
        whole = folder / "whole"
        assert Job(whole).run(SETTINGS) == [0, 0], rig.said(whole, 0)
        for name in WHEN if full else SMALL:
            for number in range(EACH[full]):
                place = folder / f"{name.replace(' ', '-')}-{number}"
                trials[f"{name} {number}"] = _killed(place, name, 2 + number % 4, whole, compared)
    return outcome(trials, str(compared))


class KillShardAt(KillAt):
    """Of a rank that does not make the folder of a save: its saves are counted by its own shards."""

    def create(self, path: Path) -> int:
        self._saves += path.name == SHARD
        return super().create(path)


def _killed(folder: Path, name: str, save: int, whole: Path, compared: Compared) -> str | None:
    rank, point = WHEN[name]
    job = Job(folder).start(SETTINGS, disks={rank: (KillShardAt if rank else KillAt)(point, save)})
    job.ranks[rank].join(rig.LONGEST)
    codes = job.codes(LATEST)
    saved = saved_step(folder)
    return first_wrong(
        (f"exit codes {codes}", lambda: codes[rank] == -9 and codes[1 - rank] == 76),
        ("every manifest has its files", lambda: _complete(folder)),
        (f"a save is intact: {saved}", lambda: saved >= 3),
        ("a restart comes to the end", lambda: job.run(SETTINGS, attempt=1) == [0, 0]),
        ("it is the same run to the bit", lambda: compared.counted(on_two.same(folder, whole))),
    )


def _complete(folder: Path) -> bool:
    """Whether every save that has its name has a manifest, and every file that this one lists, in its full size."""
    for one in list_generations(folder / CHECKPOINTS):
        if not (one.path / MANIFEST).is_file():
            return False
        if any((one.path / file.name).stat().st_size != file.size for file in read_manifest(one).files):
            return False
    return True
