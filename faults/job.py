"""Several ranks of one run, each a process to be killed, stopped and signaled, launched as torchrun's agent does.

torchrun itself would load torch anew in every process, which takes longer than the run; a few trials use it all the
same.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from faults import child, mutants, rig
from halfstep.checkpoint.paths import CHECKPOINTS, Disk
from halfstep.checkpoint.reading import find_newest_intact
from halfstep.files import read_json
from halfstep.train.status import name_status_file
from tests.support.preloaded import server

HALVED: dict[str, Any] = {"train.batch_size": 4}
"""On two ranks, as many samples a step as one rank has in `child.RECIPE`."""


class Job:
    """Launches of one run. The store outlives an attempt, as the agent's does; a person's own command is a new Job."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.folder, self.size = folder, ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = int(self._store.port)
        self.ranks: list[BaseProcess] = []

    def start(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        attempt: int = 0,
        disks: Mapping[int, Disk] | None = None,
        only: Sequence[int] | None = None,
        **more: Any,
    ) -> Job:
        """Start every rank, or `only` some of them; see `child.run`. `disks` are those of single ranks."""
        more = {"mutant": mutants.current(), **more}
        self.ranks = []
        for rank in range(self.size) if only is None else only:
            own = {**more, "disk": (disks or {}).get(rank)}
            given = (self._environment(rank, attempt), str(self.folder), dict(settings or {}), own)
            self.ranks.append(server().Process(target=child.run_rank, args=given))
            self.ranks[-1].start()
        return self

    def codes(self, within: float = rig.LONGEST) -> list[int]:
        """The exit codes of all ranks. Ranks that have not ended in time are killed, and count as 124."""
        until = time.monotonic() + within
        for rank in self.ranks:
            rank.join(max(0.0, until - time.monotonic()))
        late = [rank.exitcode is None for rank in self.ranks]
        self.end()
        return [124 if hung else rank.exitcode or 0 for hung, rank in zip(late, self.ranks, strict=True)]

    def run(self, settings: Mapping[str, Any] | None = None, **more: Any) -> list[int]:
        """A launch from its start to its end."""
        return self.start(settings, **more).codes()

    def ended(self, rank: int, within: float) -> tuple[int | None, float]:
        """The exit code of one rank, None where it has not ended, and the seconds until it."""
        began = time.monotonic()
        self.ranks[rank].join(within)
        return self.ranks[rank].exitcode, time.monotonic() - began

    def pid(self, rank: int) -> int:
        return self.ranks[rank].pid or 0

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def statuses(self) -> list[dict[str, Any]]:
        """What each rank wrote of itself."""
        return [read_json(self.folder / name_status_file(rank)) or {} for rank in range(self.size)]

    def said(self, rank: int) -> str:
        return rig.said(self.folder, rank)

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def _environment(self, rank: int, attempt: int) -> dict[str, str]:
        """As torchrun sets it."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "9",
        }


def saved_step(folder: Path) -> int:
    """The step of the newest checkpoint that is intact; -1 without one."""
    verdict, _ = find_newest_intact(folder / CHECKPOINTS)
    return -1 if verdict is None else verdict.generation.attempt
