"""A guarded run on two processes: one verdict, one remedy, one end, and no process that waits for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.errors import HalfstepError
from halfstep.train.weights import compute_weights_digest
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.support.troubled import InOneModule, InTheLoss, every_loop, fit, rate_times
from tests.train.test_loop import events

pytestmark = pytest.mark.ranks


class OnOneRank(Tiny):
    """Only what the second process computes is too large for fp16, and only from the tenth batch on."""

    batches = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        out = model(batch["x"])
        self.batches += model.training
        large = 1e6 if distributed.rank() == 1 and self.batches >= 10 else 1.0
        return ((out * large / large).float() - batch["y"]).square().mean()


TASKS = {kind.__name__: kind for kind in (Tiny, InOneModule, InTheLoss, OnOneRank)}


def run_on(rank: int, folder: str, task: str, settings: dict[str, Any], times: float = 1.0) -> dict[str, Any]:
    loops: list[Any] = []
    place = Path(folder) / f"rank-{rank}"
    shared = {"run.dir": f"{folder}/run", **settings}
    with every_loop(loops.append), every_loop(rate_times(times, since=31)):
        try:
            run = fit(place, TASKS[task], **shared)
        except HalfstepError as error:
            said = str(error).replace(str(place), "")  # each rank has a copy of the recipe
            return {"code": error.exit_code, "said": said, "weights": compute_weights_digest(loops[0].model)}
    return {"steps": run.steps, "precision": run.precision, "weights": compute_weights_digest(loops[0].model)}


@pytest.mark.parametrize("task", ["InOneModule", pytest.param("InTheLoss", marks=pytest.mark.full), "OnOneRank"])
def test_both_are_cured_in_the_same_way(on_ranks: Ranks, tmp_path: Path, task: str) -> None:
    one, other = on_ranks(run_on, str(tmp_path), task, {"guard": "repair"})
    assert one == other
    assert "code" not in one, one
    remedies = [event for event in events(tmp_path / "run", "guard") if event["kind"] == "remedy"]
    assert [event["facts"]["remedy"] for event in remedies] == ["island" if task == "InOneModule" else "precision"]
    assert one["precision"] == ("fp16" if task == "InOneModule" else "bf16")


@pytest.mark.parametrize("mode", ["watch", "repair"])
@pytest.mark.wording
def test_both_give_up_at_the_same_step_with_the_same_checkpoint(on_ranks: Ranks, tmp_path: Path, mode: str) -> None:
    settings = {"guard": mode, "precision": "fp32", "train.steps": 60, "data.samples": 400}
    one, other = on_ranks(run_on, str(tmp_path), "Tiny", settings, 1e5)
    assert one == other
    assert one["code"] == 80, one
    newest = list_generations(tmp_path / "run" / CHECKPOINTS)[0]
    assert newest.attempt == 30
    assert newest.name in one["said"]


def launched(rank: int) -> list[str]:
    from halfstep.train.give_up import _add_launcher

    return _add_launcher(["halfstep", "train", "mine.yaml"])


def test_the_command_starts_as_many_processes_again(on_ranks: Ranks) -> None:
    assert on_ranks(launched) == [["torchrun", "--nproc-per-node", "2", "-m", "halfstep", "train", "mine.yaml"]] * 2
