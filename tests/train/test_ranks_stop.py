"""Two ranks that are asked to stop, or that cannot write: both end at once, for the same reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.train import checkpointing
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE

pytestmark = pytest.mark.ranks


class SlowEvaluation(Tiny):
    """Rank 1 is asked to stop in the third of 64 batches."""

    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        if not model.training:
            SlowEvaluation.batches += 1
            time.sleep(0.05)
            if distributed.rank() == 1 and SlowEvaluation.batches == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch, metrics)


class SlowStart(Tiny):
    """Rank 1 is asked to stop while it reads the data."""

    def source(self, split: Any) -> Any:
        if distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60.0)
        return super().source(split)


def stopped(rank: int, folder: str, task: type[Tiny], settings: dict[str, Any]) -> dict[str, Any]:
    recipe = Path(folder) / f"tiny-{rank}.yaml"
    recipe.write_text(RECIPE)
    SlowEvaluation.batches = 0
    try:
        halfstep.fit(recipe, task=task, settings={"run.dir": f"{folder}/run", **settings}, quiet=True)
    except HalfstepError as error:
        return {"code": error.exit_code, "error": str(error), "batches": SlowEvaluation.batches}
    return {"code": 0}


@pytest.mark.wording
def test_a_stop_in_an_evaluation_is_obeyed_within_a_batch_or_two_on_all_ranks(on_ranks: Ranks, tmp_path: Path) -> None:
    settings = {"train.batch_size": 2, "data.samples": 1024, "train.epochs": 1, "train.steps": None}
    found = on_ranks(stopped, str(tmp_path), SlowEvaluation, settings)
    assert [one["code"] for one in found] == [75, 75], found
    assert found[1]["batches"] == 3
    # The other rank looks for a stop twice a second, between two batches.
    assert found[0]["batches"] < 48
    assert all("saved as step-" in one["error"] for one in found)


@pytest.mark.wording
def test_a_stop_while_the_data_is_read_stops_all_ranks(on_ranks: Ranks, tmp_path: Path) -> None:
    began = time.monotonic()
    found = on_ranks(stopped, str(tmp_path), SlowStart, {})
    assert [one["code"] for one in found] == [75, 75], found
    assert all("before the first step" in one["error"] for one in found)
    assert time.monotonic() - began < 50.0


def probed(rank: int, folder: str, kind: str) -> dict[str, Any]:
    own = Path(folder) / (kind if rank == 0 else f"{kind}-{rank}") if kind in ("other", "file") else Path(folder)
    needed, checkpointing.estimate_checkpoint_size = (
        checkpointing.estimate_checkpoint_size,
        lambda live: 2**60 if kind == "full" else 1,
    )
    seen, checkpointing.SEEN = checkpointing.SEEN, 0.2
    try:
        checkpointing.check_folder_writable(own, None)  # type: ignore[arg-type]
    except HalfstepError as error:
        return {"code": error.exit_code, "error": str(error)}
    finally:
        checkpointing.estimate_checkpoint_size, checkpointing.SEEN = needed, seen
    return {"code": 0, "error": ""}


@pytest.mark.parametrize(("kind", "code"), [("same", 0), ("other", 73), ("full", 74)])
@pytest.mark.wording
def test_every_rank_writes_before_the_first_step(on_ranks: Ranks, tmp_path: Path, kind: str, code: int) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other-1").mkdir()
    found = on_ranks(probed, str(tmp_path), kind)
    assert [one["code"] for one in found] == [code, code], found
    if kind == "other":
        assert found[0]["error"].startswith("rank 1: ")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"
