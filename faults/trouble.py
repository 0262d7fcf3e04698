"""Something that happens to a rank, in the middle of a part of a step."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.tiny_task import Tiny

LINGERS = 60.0
"""Seconds that the process lives that a dead rank leaves behind."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(1)


def fail() -> None:
    raise ZeroDivisionError("of a row of the fault matrix")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold() -> None:
    """Hold the interpreter: no other thread of this process runs any more."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def loop() -> None:
    while True:
        pass


def linger() -> None:
    """Die, and leave a process behind that holds the connections open: nothing tells the other ranks."""
    if os.fork() == 0:
        time.sleep(LINGERS)
        os._exit(0)
    kill()


KINDS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (kill, segfault, leave, fail, stop, hold, loop, linger)
}
POINTS = ("forward", "backward", "optimizer", "barrier")


@dataclass
class Trouble:
    """What happens, where, and in which step of a launch, on one rank; called in its process before the run.

    Made in one process and used in another, so it holds nothing but plain data. `pause` is what a straggler sleeps in
    every step from then on, in place of a trouble.
    """

    kind: str
    point: str = "forward"
    step: int = 7
    rank: int = 1
    pause: float = 0.0
    mark: str = ""
    """A file that is made when it happens."""

    def __call__(self) -> None:
        if os.environ.get("RANK", "0") == str(self.rank):
            self._steps = 0
            self._count()
            getattr(self, f"_in_{self.point}")()

    def happen(self) -> None:
        if self.mark:
            Path(self.mark).touch()
        if self.pause:
            time.sleep(self.pause)
        else:
            KINDS[self.kind]()

    @property
    def _due(self) -> bool:
        return self._steps >= self.step if self.pause else self._steps == self.step

    def _count(self) -> None:
        def count(found: Any) -> None:
            self._steps += 1

        _in_training(count)

    def _in_forward(self) -> None:
        _in_training(lambda found: self.happen() if self._due else None)

    def _in_backward(self) -> None:
        _in_training(lambda found: found.register_hook(lambda gradient: self.happen()) if self._due else None)

    def _in_optimizer(self) -> None:
        register_optimizer_step_pre_hook(self._before_update)

    def _before_update(self, *given: Any) -> None:
        if self._due:
            self.happen()

    def _in_barrier(self) -> None:
        """In the collective in which the ranks agree on a step: the others wait there."""
        reduce = dist.all_reduce

        def troubled(*given: Any, **more: Any) -> Any:
            if self._due:
                self.happen()
            return reduce(*given, **more)

        dist.all_reduce = troubled  # type: ignore[assignment]


def _in_training(then: Callable[[Any], object]) -> None:
    """Call `then` with every loss of a model that is trained, from here on."""
    loss = Tiny.loss

    def followed(task: Tiny, model: Any, batch: Any, metrics: Any = None) -> Any:
        found = loss(task, model, batch, metrics)
        if model.training:
            then(found)
        return found

    Tiny.loss = followed  # type: ignore[method-assign]
