"""Compare the data of a run with what its newest checkpoint has of it, and all shards with their index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from halfstep.checkpoint.paths import CheckpointDir
from halfstep.checkpoint.reading import read_rank_state
from halfstep.data.dataset import complete_source
from halfstep.data.fingerprint import Fingerprint, different, fingerprint
from halfstep.data.indexed import find_shards
from halfstep.data.shard_check import describe_shard_change
from halfstep.data.shard_index import MOST_THREADS
from halfstep.data.shards import Shards
from halfstep.runs.finished import load_saved_task
from halfstep.status_line import OnProgress
from halfstep.train.state import State
from halfstep.train.task import Split, Task

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True)
class VerifiedData:
    """The data of a run, compared with its newest checkpoint and its index."""

    shards: int
    """Shards that were read whole; 0 if the data has no index."""
    samples: int
    bytes: int
    changes: list[str]
    """What differs; empty where nothing does."""


def check_data(
    folder: Path, checkpoint: CheckpointDir, own: type[Task] | None, on_progress: OnProgress
) -> VerifiedData:
    """Read all shards of a run, and compare what the data is with what a checkpoint has of it."""
    task = load_saved_task(folder, own)
    sources = tuple(complete_source(task.source(split)) for split in SPLITS)
    saved = State.from_parts(*read_rank_state(checkpoint, 0), where=str(checkpoint.path)).position["data_fingerprint"]
    changes = different(Fingerprint.from_dict(saved), fingerprint(*sources))
    sets = {shards.index.seal: shards for source in sources if (shards := find_shards(source)) is not None}
    jobs = [(shards, number) for shards in sets.values() for number in range(len(shards.index.names))]
    with ThreadPoolExecutor(MOST_THREADS) as pool:
        for done, change in enumerate(pool.map(_find_job_change, jobs), 1):
            changes += [change] if change else []
            on_progress(done, len(jobs))
    samples = sum(len(shards) for shards in sets.values())
    size = sum(int(shards.index.table["bytes"].sum()) for shards in sets.values())
    return VerifiedData(len(jobs), samples, size, changes)


def _find_job_change(job: tuple[Shards, int]) -> str:
    return describe_shard_change(*job)
