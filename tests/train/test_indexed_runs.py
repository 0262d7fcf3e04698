"""Runs on indexed sets: the same samples at any number of ranks and workers, kept orders, and data that is verified."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import halfstep
from faults.bad_images import BOMBS, DAMAGED
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.data import choose_order, order
from halfstep.data.dataset import BadSample, complete_source
from halfstep.data.shards import Shards
from halfstep.journal.jsonl import read_events
from halfstep.train.environment import AutoChoices
from tests.support.indexed_task import GLOBAL, STEPS, Indexed, launched, write_shards
from tests.support.ranks import Ranks

WINDOW = 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("sets") / "set", 4, 150)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    started: dict[int, Ranks] = {}

    def launch(size: int, *given: Any) -> list[dict[str, Any]]:
        running = started.setdefault(size, Ranks(size))
        running.begin(launched, *given)
        return [one.value or {"code": one.failure} for one in running.outcomes()]

    yield launch
    for one in started.values():
        one.stop()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def cut(run: Path, after: int) -> None:
    """Leave what a launch that was killed after so many steps leaves."""
    (run / "result.json").unlink(missing_ok=True)
    for one in list_generations(run / CHECKPOINTS):
        if one.attempt > after:
            shutil.rmtree(one.path)


def steps(found: list[dict[str, Any]]) -> list[list[int]]:
    assert [one["code"] for one in found] == [0] * len(found), found
    return [[number for one in found for number in one["ids"][step]] for step in range(len(found[0]["ids"]))]


# -- the same samples -------------------------------------------------------------------------------------------------


FEW_WORLDS, WORLDS = ((1, 2), (2, 0), (4, 0)), tuple((size, workers) for size in (1, 2, 4) for workers in (0, 2))
"""Ranks, and workers of each."""


@pytest.mark.parametrize(
    ("window", "worlds"),
    [
        (WINDOW, FEW_WORLDS),
        *(pytest.param(window, WORLDS, marks=pytest.mark.full) for window in (WINDOW, "auto", None)),
    ],
)
def test_a_step_has_the_same_samples_with_any_ranks_and_workers(
    tmp_path: Path, shards: Path, ranks: Any, window: Any, worlds: Any
) -> None:
    asked = {"data.path": str(shards), "data.window": window}
    whole = steps([launched(0, str(tmp_path / "one"), asked)])
    assert len(whole) == STEPS
    for size, workers in worlds:
        more = {**asked, "train.batch_size": GLOBAL // size, "train.num_workers": workers}
        folder = str(tmp_path / f"of-{size}-{workers}")
        assert steps(ranks(size, folder, more) if size > 1 else [launched(0, folder, more)]) == whole


def test_a_killed_run_goes_on_with_two_ranks_and_then_with_one(tmp_path: Path, shards: Path, ranks: Any) -> None:
    asked = {"data.path": str(shards), "data.window": WINDOW, "train.global_batch": GLOBAL}
    whole, run = steps([launched(0, str(tmp_path / "whole"), asked)]), tmp_path / "run"
    last = 0
    for size, kill_at in ((1, 17), (2, 33), (1, None)):
        found = ranks(size, str(run), {**asked, "train.batch_size": GLOBAL // size}, False, kill_at)
        assert found[0]["code"] == ("ended by SIGKILL" if kill_at else 0)
        logs = [Path(f"{run}-{rank}.ids") for rank in range(size)]
        each = [dict(map(json.loads, log.read_text().splitlines())) for log in logs]
        for log in logs:
            log.unlink()
        seen = {step: [n for one in each for n in one[step]] for step in set.intersection(*map(set, each))}
        # The newest save may not have been complete.
        assert (min(seen) > 0) == (last > 0)
        assert min(seen) <= last
        assert (last := max(seen)) >= (kill_at - 1 if kill_at else STEPS - 1)
        assert seen == {step: whole[step] for step in seen}


@pytest.mark.wording
def test_a_run_keeps_the_order_that_it_began_with(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run = {"data.path": str(shards)}, tmp_path / "run"
    monkeypatch.setattr(choose_order, "FEW", 100)
    monkeypatch.setattr(order, "FEW", 100)
    began = launched(0, str(run), asked)
    assert began["order"] == "feistel"
    cut(run, 20)
    monkeypatch.setattr(choose_order, "FEW", 10**9)  # a newer version, with other defaults
    later = launched(0, str(run), asked)
    assert (later["order"], later["ids"]) == ("feistel", began["ids"][20:])
    cut(run, 20)
    refused = launched(0, str(run), {**asked, "data.window": WINDOW})
    assert refused["code"] == 79
    assert "data.window: null -> 12" in refused["said"]


def test_a_checkpoint_from_before_goes_on_with_randperm(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run, as_dict = {"data.path": str(shards)}, tmp_path / "run", AutoChoices.as_dict
    with monkeypatch.context() as patch:
        patch.setattr(AutoChoices, "as_dict", lambda self: {k: v for k, v in as_dict(self).items() if k != "order"})
        patch.setattr(choose_order, "FEW", 10**9)
        began = launched(0, str(run), asked)
    assert (began["code"], began["order"]) == (0, "randperm")
    cut(run, 20)
    monkeypatch.setattr(choose_order, "FEW", 100)
    later = launched(0, str(run), asked)
    assert (later["code"], later["order"], later["ids"]) == (0, "randperm", began["ids"][20:])


@pytest.mark.wording
def test_a_window_needs_an_index(tmp_path: Path) -> None:
    with pytest.raises(halfstep.HalfstepError, match=r"data\.window=5 for data without an index"):
        choose_order.choose_order(complete_source([0] * 9), 5, 4)


# -- bad samples ------------------------------------------------------------------------------------------------------


def replaced(run: Path) -> set[str]:
    return {event["name"] for event in read_events(run / "journal.jsonl") if event["event"] == "bad_sample"}


@pytest.mark.parametrize("window", [None, WINDOW])
def test_damaged_images_and_bombs_in_shards_are_replaced_and_named(tmp_path: Path, window: int | None) -> None:
    """F07 and F08: one step after another, and the worker lives on."""
    bad = {7 * n: make() for n, make in enumerate([*DAMAGED.values(), *BOMBS.values()])}
    root = write_shards(tmp_path / "set", 2, 7 * len(bad), bad)
    asked = {"data.path": str(root), "data.window": window, "data.bad_samples": len(bad), "train.num_workers": 1}
    more = {"train.steps": None, "train.epochs": 1, "schedule.warmup_steps": 0}
    found = launched(0, str(tmp_path / "run"), {**asked, **more})
    assert (found["code"], found["said"]) == (0, "")
    source = Shards(root)
    train = [source.name(n) for n in bad]
    assert replaced(tmp_path / "run") <= set(train)
    assert len(replaced(tmp_path / "run")) > len(bad) // 2, "those that are not held out for validation"
    few = launched(0, str(tmp_path / "few"), {**asked, **more, "data.bad_samples": 2})
    assert few["code"] == 65


def flip(path: Path, sample: int = 3) -> None:
    """One bit of an image; the size and the times stay."""
    source, status = Shards(path), path.stat()
    content = bytearray(path.read_bytes())
    content[source.index.row(sample).image + 20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_all_wrong_bytes_are_found_with_verify_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_shards(tmp_path / "set", 2, 60)
    source = {verify: Shards(root, verify=verify) for verify in ("all", "sampled", "off")}  # type: ignore[arg-type]
    flip(root / "s-01.tar", 5)
    for one in source.values():  # as if the file system noted no times
        monkeypatch.setattr(one, "is_as_before", lambda shard, now: True)
        one.read(64)
    with pytest.raises(BadSample, match="differ from those indexed"):
        source["all"].read(65)
    name = source["all"].name(65)
    assert name.endswith("s-01.tar/000065")


# -- data that changed ------------------------------------------------------------------------------------------------


def _remove(shard: Path) -> None:
    shard.unlink()


def _add(shard: Path) -> None:
    shutil.copy(shard, shard.with_name("s-new.tar"))


def _rename(shard: Path) -> None:
    shard.rename(shard.with_name("s-new.tar"))


def _lengthen(shard: Path) -> None:
    write_shards(shard.parent / "other", 1, 151)
    shutil.move(shard.parent / "other" / "s-00.tar", shard)
    shutil.rmtree(shard.parent / "other")


CHANGES = {"removed": _remove, "added": _add, "edited": flip, "renamed": _rename, "longer": _lengthen}


@pytest.fixture(scope="module")
def stump(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    run = tmp_path_factory.mktemp("stump") / "run"
    assert launched(0, str(run), {"data.path": str(shards), "train.steps": 20})["code"] == 0
    cut(run, 10)
    return run


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.wording
def test_a_run_goes_on_with_no_other_shards_unless_accepted(
    tmp_path: Path, stump: Path, shards: Path, change: str
) -> None:
    """F10."""
    run, root = Path(shutil.copytree(stump, tmp_path / "run")), Path(shutil.copytree(shards, tmp_path / "set"))
    asked = {"data.path": str(root), "train.steps": 20}
    assert len(launched(0, str(shutil.copytree(run, tmp_path / "same")), asked)["ids"]) == 10, "a copy is the same"
    CHANGES[change](root / "s-02.tar")
    refused = launched(0, str(run), asked)
    assert refused["code"] == 79
    assert ("s-new.tar" if change in ("added", "renamed") else "s-02.tar") in refused["said"]
    assert launched(0, str(run), asked, True)["code"] == 0


@pytest.mark.wording
def test_verify_with_data_reads_all_shards_and_names_the_sample(tmp_path: Path, stump: Path, shards: Path) -> None:
    root = Path(shutil.copytree(shards, tmp_path / "set"))
    run = Path(shutil.copytree(stump, tmp_path / "run"))
    launched(0, str(run), {"data.path": str(root), "train.steps": 20})
    report = halfstep.verify(run, data=True, task=Indexed)
    assert report.error is None
    assert report.data is not None
    assert (report.data.shards, report.data.samples, report.data.changes) == (4, 600, [])
    assert "as it was indexed" in json.dumps(report.checked_page().blocks, default=str)
    before = (root / "s-02.tar").stat()
    flip(root / "s-02.tar")
    report = halfstep.verify(run, data=True, task=Indexed)
    assert before.st_mtime_ns == (root / "s-02.tar").stat().st_mtime_ns
    assert report.error is not None
    assert report.error.exit_code == 65
    assert "s-02.tar" in str(report.error)
    assert "000303" in str(report.error)
