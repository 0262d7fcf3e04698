"""Ranks of a tiny run, started as torchrun's agent starts them: the agent's store outlives an attempt.

torchrun itself would load torch anew in every process, which takes longer than the run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.files import read_json
from halfstep.runs import fit
from halfstep.train.status import name_status_file
from halfstep.train.watchdog import end_hung_process
from tests.support.preloaded import PRELOADED
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.0, fused: false}
schedule: {name: constant}
train: {epochs: 4, batch_size: 8, num_workers: 0, seed: 5}
checkpoint: {every_steps: 3}
run: {log_every: 2, pictures: 0}
"""
AT = 8
"""The call of the loss in which something happens to rank 1: step 7, after the evaluation of the first epoch."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Agent:
    """Two ranks an attempt, and the store that they share with the attempts before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[BaseProcess] = []

    def start(self, what: str, *settings: str, attempt: int = 0, restarts: int = 9) -> list[BaseProcess]:
        """Start an attempt, in which `what` (a function below) happens to rank 1: in step 7, or building the model."""
        every = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        every |= {"MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        every |= {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
        every |= {"TORCHELASTIC_RUN_ID": "a job"}
        self.ranks = []
        for rank in ("0", "1"):
            given = ({**every, "RANK": rank, "LOCAL_RANK": rank}, str(self.folder), what, settings)
            self.ranks.append(_context.Process(target=_rank, args=given))
            self.ranks[-1].start()
        return self.ranks

    def codes(self, within: float = 90.0) -> list[int | None]:
        """The exit codes of both ranks; None for one that has not ended in time."""
        until = time.monotonic() + within
        for rank in self.ranks:
            rank.join(max(0.0, until - time.monotonic()))
        return [rank.exitcode for rank in self.ranks]

    def seen(self, attempt: int) -> list[list[list[float]]]:
        """The samples of each micro-batch of an attempt, of both ranks together."""
        ranks = [(self.folder / f"seen-{attempt}-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
        return [json.loads(one) + json.loads(other) for one, other in zip(*ranks, strict=False)]

    def statuses(self) -> list[dict[str, Any]]:
        return [read_json(self.run / name_status_file(rank)) or {} for rank in (0, 1)]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


def _rank(environment: dict[str, str], folder: str, what: str, settings: tuple[str, ...]) -> None:
    os.environ.update(environment)
    # Beside the run's folder, for a test that asks who prints what.
    printed = os.open(Path(folder) / f"printed-{environment['RANK']}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    recipe = Path(folder) / f"tiny-{environment['RANK']}.yaml"
    recipe.write_text(RECIPE)
    Troubled.what = what
    Troubled.seen = Path(folder) / f"seen-{environment['TORCHELASTIC_RESTART_COUNT']}-{environment['RANK']}.jsonl"
    given = [f"run.dir={folder}/run", *settings]
    resolved = fit.resolve_run_recipe(fit.read_recipe(str(recipe)), given, schema=Troubled.schema)
    try:
        fit.launch(resolved, task=Troubled, new=False, quiet=False, command="halfstep.fit", on_hang=end_hung_process)
    except HalfstepError as error:
        sys.exit(error.exit_code)


class Troubled(Tiny):
    """A task in whose loss something happens to rank 1."""

    what, calls = "nothing", 0
    seen = Path()

    def model(self) -> Any:
        if distributed.rank() == 1 and Troubled.what == "kill_building":
            kill()
        return super().model()

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        if model.training:
            with Troubled.seen.open("a") as file:
                print(json.dumps(batch["x"].tolist()), file=file)
        Troubled.calls += 1
        if distributed.rank() == 1 and Troubled.calls == AT and Troubled.what in HAPPENS:
            HAPPENS[Troubled.what]()
        return super().loss(model, batch, metrics)


def nothing() -> None: ...


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(1e6)


def hold() -> None:
    """Hold the interpreter: no other thread of this process runs any more."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def late() -> None:
    time.sleep(3.0)


def memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def bug() -> None:
    raise ZeroDivisionError("of a test")


HAPPENS = {one.__name__: one for one in (nothing, kill, stop, sleep, hold, late, memory, bug)}
