"""A run on two processes: the same weights on both, the same samples as on one, one decision about bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import halfstep
from faults import on_two
from faults.everything import Launch
from faults.refit import refit
from halfstep import distributed
from halfstep.checkpoint import commit
from halfstep.checkpoint.paths import Disk
from halfstep.errors import HalfstepError
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

pytestmark = pytest.mark.ranks


def run_on(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    recipe = Path(folder) / f"tiny-{rank}.yaml"
    recipe.write_text(RECIPE)
    try:
        run = halfstep.fit(recipe, task=Tiny, settings={"run.dir": f"{folder}/run", **settings}, quiet=True)
    except HalfstepError as error:
        return {"error": str(error), "code": error.exit_code}
    return {"steps": run.steps, "skipped": run.skipped, "metrics": run.metrics, "dir": str(run.dir)}


def test_two_processes_train_what_one_trains(on_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    both = on_ranks(run_on, str(tmp_path), {"train.batch_size": 8})
    assert both[0] == both[1]
    alone = run_on(0, str(tmp_path / "alone"), {"train.batch_size": 16})
    assert both[0]["steps"] == alone["steps"]
    assert both[0]["metrics"]["loss"] == pytest.approx(alone["metrics"]["loss"], rel=1e-5)
    one, other = (load_file(Path(found["dir"]) / "last.safetensors") for found in (both[0], alone))
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6), name
    notes = [event["text"] for event in events(tmp_path / "run", "note")]
    assert any("bitwise equal on 2 processes" in note for note in notes)
    assert events(tmp_path / "run", "start")[0]["batch"]["devices"] == 2


def test_a_sample_that_is_no_number_is_quarantined_for_all(on_ranks: Ranks, tmp_path: Path) -> None:
    found = on_ranks(run_on, str(tmp_path), {"train.batch_size": 8, "data.nan": [3, 40]})
    assert found[0] == found[1]
    assert found[0]["steps"] + sum(found[0]["skipped"].values()) == 16
    skipped = [event for event in events(tmp_path / "run", "step") if not event["applied"]]
    assert {number for event in skipped for number in event["quarantined"]} == {3, 40}
    assert {event["epoch"] for event in skipped} == {1}


def test_both_processes_stop_where_the_budget_is_spent(on_ranks: Ranks, tmp_path: Path) -> None:
    settings = {"train.batch_size": 8, "data.unreadable": [1, 2, 3, 4], "data.bad_samples": 3}
    found = on_ranks(run_on, str(tmp_path), settings)
    assert [one["code"] for one in found] == [65, 65]
    assert len({event["name"] for event in events(tmp_path / "run", "bad_sample")}) == 4


def test_a_refused_folder_ends_both_with_the_same_words(on_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("")
    found = on_ranks(run_on, str(tmp_path), {})
    assert [one["code"] for one in found] == [73, 73]
    assert found[0]["error"] in found[1]["error"]


def texts(rank: int) -> list[str]:
    return distributed.gather_texts("" if rank else "from zero: ü")


def test_every_rank_hears_every_text(on_ranks: Ranks) -> None:
    assert on_ranks(texts) == [["from zero: ü", ""]] * 2


class Uneven(Tiny):
    """A file is missing on one machine."""

    def source(self, split: Any) -> Any:
        points = super().source(split)
        if distributed.rank() == 1 and split == "train":
            points.x = points.x[:-3]
        return points


def run_unevenly(rank: int, folder: str) -> str:
    recipe = Path(folder) / f"tiny-{rank}.yaml"
    recipe.write_text(RECIPE)
    try:
        halfstep.fit(recipe, task=Uneven, settings={"run.dir": f"{folder}/run"}, quiet=True)
    except HalfstepError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.wording
def test_processes_with_different_data_are_told_so(on_ranks: Ranks, tmp_path: Path) -> None:
    assert all("rank 1 has 61 samples" in said for said in on_ranks(run_unevenly, str(tmp_path)))


def test_an_average_is_evaluated_with_the_same_statistics_on_both(on_ranks: Ranks, tmp_path: Path) -> None:
    settings = {"train.batch_size": 8, "train.ema": 0.9, "model.batchnorm": True}
    found = on_ranks(run_on, str(tmp_path), settings)
    assert found[0] == found[1]
    assert found[0]["steps"] == 16, found[0]
    best = load_file(tmp_path / "run" / "best.safetensors")
    points = Tiny(Tiny.schema.model_validate({"task": "tiny", "model": {}, "data": {}, "loss": {}})).source("val")
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).eval()
    model.load_state_dict(best)
    told = [event for event in events(tmp_path / "run", "epoch") if event["is_best"]][-1]["val"]["loss"]
    assert torch.nn.functional.mse_loss(model(points.x), points.y).item() == pytest.approx(told, rel=1e-5)


# -- interrupted and taken up ---------------------------------------------------------------------------------------


def resumed_on(rank: int, folder: str, stop_at: int | None) -> dict[str, Any]:
    return on_two.launched(rank, folder, stop_at)


@pytest.mark.slow
def test_a_run_that_one_process_stopped_goes_on_on_both_with_the_same_bits(on_ranks: Ranks, tmp_path: Path) -> None:
    whole = on_ranks(resumed_on, str(tmp_path / "whole"), None)
    stopped = on_ranks(resumed_on, str(tmp_path / "cut"), on_two.STOP_AT)
    assert [(one["code"], one["attempt"]) for one in stopped] == [(75, on_two.STOP_AT + 1)] * 2
    (end,) = events(tmp_path / "cut", "end")
    assert (end["reason"], end["checkpoint"][:13]) == ("stopped", f"step-{on_two.STOP_AT + 1:08d}")
    found = on_ranks(resumed_on, str(tmp_path / "cut"), None)
    assert [one["code"] for one in whole + found] == [0] * 4
    assert [one["began"] for one in found] == [one["saved"] for one in stopped]
    assert found[0]["began"] != found[1]["began"], "each process draws its own numbers"
    assert on_two.digests(tmp_path / "cut") == on_two.digests(tmp_path / "whole")
    assert len(on_two.digests(tmp_path / "cut")) == 2


SETTINGS = {"train.batch_size": 8, "train.ema": 0.9, "model.batchnorm": True, "checkpoint.every_steps": 3}


@pytest.mark.wording
def test_what_two_processes_saved_is_for_one_with_the_same_samples_a_step(on_ranks: Ranks, tmp_path: Path) -> None:
    found = on_ranks(stopped_on, str(tmp_path), SETTINGS)
    assert [one["code"] for one in found] == [75, 75]
    alone = run_on(0, str(tmp_path), SETTINGS)
    assert alone["code"] == 79
    assert "add train.microbatches=2" in alone["error"]
    again = on_ranks(run_on, str(tmp_path), SETTINGS)
    assert again[0] == again[1]
    assert again[0]["steps"] == 16


def stopped_on(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The first process is asked to stop, and the second one hears of it."""
    mend = Launch(5 if rank == 0 else None, "SIGTERM", guarded=False)()
    try:
        return run_on(rank, folder, settings)
    finally:
        mend()


@pytest.mark.wording
def test_a_part_that_one_process_lacks_is_missing_for_both(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(stopped_on, str(tmp_path), SETTINGS)
    refit(tmp_path / "run", lambda state: state.pop("rng"), rank=1)
    found = on_ranks(run_on, str(tmp_path), SETTINGS)
    assert [one["code"] for one in found] == [79, 79]
    assert all("lacks rng" in one["error"] for one in found)
    assert "rank 1: " in found[0]["error"]


class FullDisk(Disk):
    """Of one machine."""

    def create(self, path: Path) -> Any:
        if distributed.rank() == 1:
            raise OSError(28, "No space left on device")
        return super().create(path)


def saved_on_a_full_disk(rank: int, folder: str, background: bool) -> dict[str, Any]:
    own = commit.Disk
    commit.Disk = FullDisk  # type: ignore[misc]
    try:
        return run_on(rank, folder, {**SETTINGS, "checkpoint.background": background, "train.epochs": 12})
    finally:
        commit.Disk = own  # type: ignore[misc]


@pytest.mark.wording
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_on_one_machine_is_told_on_both(background: bool, on_ranks: Ranks, tmp_path: Path) -> None:
    found = on_ranks(saved_on_a_full_disk, str(tmp_path), background)
    assert [one.get("code") for one in found] == [74, 74], found
    assert all("No space left on device (rank 1)" in one["error"] for one in found)
    notes = [event["text"] for event in events(tmp_path / "run", "note")]
    assert sum("no checkpoint of step" in note for note in notes) >= 3
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
