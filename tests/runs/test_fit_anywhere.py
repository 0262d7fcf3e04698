"""`halfstep.fit` where signals cannot be heard, or where somebody's event loop is running, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.errors import Stopped
from halfstep.train.run import Run
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
train: {epochs: 2, batch_size: 16, num_workers: 0, seed: 5}
run: {pictures: 0}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def fit(recipe: Path, task: type[Tiny] = Tiny) -> tuple[Run, str]:
    """A run, and what it printed to a stream that is no terminal."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run = halfstep.fit(recipe, task=task, settings={"run.dir": str(recipe.parent / "run")})
    return run, said.getvalue()


def test_in_a_running_event_loop(recipe: Path) -> None:
    async def cell() -> tuple[Run, str, Any]:
        handler = signal.getsignal(signal.SIGINT)
        return *fit(recipe), handler

    async def notebook() -> None:
        run, said, handler = await cell()
        assert run.reason == "finished"
        rows = [line.split() for line in said.splitlines() if line.lstrip().startswith(("1/2", "2/2"))]
        assert [row[0] for row in rows] == ["1/2", "2/2"], said
        assert "\x1b" not in said
        assert signal.getsignal(signal.SIGINT) is handler

    asyncio.run(notebook())


def test_in_a_thread_that_hears_no_signals(recipe: Path) -> None:
    found: list[Run] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: found.append(fit(recipe)[0]))
    thread.start()
    thread.join()
    assert found[0].reason == "finished"
    assert signal.getsignal(signal.SIGINT) is before


class Interrupted(Tiny):
    """A person presses stop in the third step."""

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.steps = 0

    def loss(self, model: torch.nn.Module, batch: Any, metrics: Any = None) -> Any:
        self.steps += model.training
        if self.steps == 3 and model.training:
            os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, batch, metrics)


@pytest.mark.wording
def test_stop_in_a_notebook_stops_the_run_and_the_next_cell_goes_on(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def notebook() -> None:
        with pytest.raises(Stopped, match="at step 3 of 8"):
            fit(recipe, Interrupted)
        await asyncio.sleep(0)  # the loop itself was not interrupted
        run, said = fit(recipe)
        assert run.steps == 8
        assert "resumed at step 3 of 8" in said

    asyncio.run(notebook())
    assert "stopping after this step; Ctrl-C again to stop now" in capfd.readouterr().err
