"""Runs whose checkpoints are copied to an object store: a new machine continues them, and no launch harms another."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import halfstep
from halfstep.errors import FolderLost, FolderTaken, NoCheckpoint, StateMismatch, Stopped, StoreFailed, WrongUse
from halfstep.train import remote
from halfstep.train.run import Run
from tests.store.conftest import InStore
from tests.support.store_proxy import Planned
from tests.support.store_servers import free_port
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

STOP = 10


class StoppedRun(Tiny):
    """Is asked to stop in its third epoch."""

    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        if self.batches == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


def fit(folder: Path, in_store: InStore | None, task: Any = Tiny, remote: str = "", **settings: Any) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(RECIPE)
    changed: dict[str, Any] = {"run.dir": str(folder / "run"), "store.patience": 20.0}
    if in_store is not None:
        changed["checkpoint.remote"] = f"{in_store.address}/{remote}".rstrip("/")
    changed |= {key.replace("__", "."): value for key, value in settings.items()}
    return halfstep.fit(folder / "tiny.yaml", task=task, settings=changed, quiet=True)


def interrupted(folder: Path, in_store: InStore, task: Any = StoppedRun, **more: Any) -> None:
    with pytest.raises(Stopped):
        fit(folder, in_store, task, **more)


def generations_in(in_store: InStore, address: str = "") -> list[str]:
    found: list[str] = in_store("commits", **({"address": address} if address else {}))
    return found


def local(key: str) -> str:
    """The name that a checkpoint in the store has on disk."""
    return key.split("/")[1].rsplit("-", 2)[0]


def notes(folder: Path, level: str) -> list[str]:
    return [event["text"] for event in events(folder / "run", "note") if event["level"] == level]


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("last.safetensors", "best.safetensors"):
        left, right = load_file(one / "run" / name), load_file(other / "run" / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_the_same_command_on_an_empty_disk_continues_the_run(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "alone", None)
    interrupted(tmp_path / "first", in_store)
    assert notes(tmp_path / "first", "warning") == []
    assert len(generations_in(in_store)) == 2
    assert in_store("audit") == {"whole": sorted(generations_in(in_store)), "torn": []}
    fit(tmp_path / "second", in_store)
    assert_same_weights(tmp_path / "alone", tmp_path / "second")
    begun = events(tmp_path / "second" / "run", "start")
    assert len(begun) == 2, "the journal of the first machine is in place"
    assert begun[1]["resumed"]["exact"]
    assert begun[1]["resumed"]["checkpoint"] == generations_in_first(tmp_path)
    assert [event["attempt"] for event in events(tmp_path / "second" / "run", "step")] == list(range(1, 17))
    assert "obstore" not in sys.modules, "the process that trains must be able to fork"
    assert len(generations_in(in_store)) == 2
    assert in_store("audit")["torn"] == []
    used = [key for key in in_store("keys") if key.startswith("kept/")]
    assert all("/0002-" in key for key in used), "what no commit needs is removed"


def generations_in_first(tmp_path: Path) -> str:
    return sorted(path.name for path in (tmp_path / "first" / "run" / "checkpoints").iterdir())[-1]


def test_a_finished_run_continues_nowhere_and_ends_at_once_elsewhere(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "first", in_store)
    fit(tmp_path / "second", in_store)
    assert_same_weights(tmp_path / "first", tmp_path / "second")
    assert [event["attempt"] for event in events(tmp_path / "second" / "run", "step")] == list(range(1, 17))


def test_a_damaged_checkpoint_is_skipped_and_named(in_store: InStore, tmp_path: Path) -> None:
    interrupted(tmp_path / "first", in_store)
    newest, before = generations_in(in_store)
    own = in_store("text", key=f"{newest}/COMMIT.json")
    kept = [key for key in in_store("keys") if key.startswith("kept/") and key.rpartition("/")[2] in own]
    journal = next(key for key in kept if key.rpartition("/")[2] not in in_store("text", key=f"{before}/COMMIT.json"))
    names = ("rank-00000.safetensors", "rank-00000.json", "MANIFEST.json", "COMMIT.json")
    for key in [*(f"{newest}/{name}" for name in names), journal]:
        for how in ("cut", "flipped", "missing"):
            content = in_store("damage", key=key, how=how)
            folder = tmp_path / f"{key.rpartition('/')[2]}-{how}"
            folder.mkdir()
            found = in_store.process.call(
                "halfstep.train.remote_generations:restore",
                {"address": in_store.address, "patience": 20.0, "folder": str(folder)},
            )
            assert found["name"] == local(before), (key, how)
            is_absent = key.endswith("COMMIT.json") and how == "missing"
            assert list(found["skipped"]) == ([] if is_absent else [newest]), (key, how)
            if key == journal or key.endswith("rank-00000.safetensors"):
                reason = found["skipped"][newest]
                assert ("were committed" in reason, "SHA-256" in reason) == (how == "cut", how == "flipped"), reason
            assert (folder / "checkpoints" / local(before) / "MANIFEST.json").exists()
            in_store("put_back", key=key, content=content)
    in_store("damage", key=f"{newest}/rank-00000.safetensors", how="flipped")
    fit(tmp_path / "second", in_store)
    told = notes(tmp_path / "second", "warning")
    assert [f"{in_store.address}/{newest} is skipped" in text for text in told] == [True], told
    assert events(tmp_path / "second" / "run", "start")[1]["resumed"]["checkpoint"] == local(before)
    assert in_store("audit")["torn"] == [], "retention does not count the damaged one"


@pytest.mark.full
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_damaged_owner_is_refused_until_it_is_removed(in_store: InStore, tmp_path: Path, place: str) -> None:
    interrupted(tmp_path / "first", in_store)
    newest = local(generations_in(in_store)[0])
    in_store("damage", key="OWNER.json", how="flipped")
    with pytest.raises(FolderTaken) as caught:
        fit(tmp_path / place, in_store)
    assert f"remove {in_store.address}/OWNER.json" in caught.value.do
    in_store("delete", key="OWNER.json")
    fit(tmp_path / place, in_store)
    assert events(tmp_path / place / "run", "start")[1]["resumed"]["checkpoint"] == newest
    assert in_store("audit")["torn"] == []


def test_a_run_is_not_restarted_where_no_checkpoint_is_intact(in_store: InStore, tmp_path: Path) -> None:
    interrupted(tmp_path / "first", in_store)
    for one in generations_in(in_store):
        in_store("damage", key=f"{one}/rank-00000.json", how="flipped")
    with pytest.raises(NoCheckpoint) as caught:
        fit(tmp_path / "second", in_store)
    assert caught.value.exit_code == 65
    assert not any(not entry.name.startswith(".") for entry in (tmp_path / "second" / "run").iterdir())


def test_a_restore_that_was_killed_starts_again(in_store: InStore, tmp_path: Path) -> None:
    interrupted(tmp_path / "first", in_store)
    folder = tmp_path / "second" / "run"
    (folder / ".restoring" / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001.0001").mkdir(parents=True)
    (folder / "journal.jsonl").write_text("half a li")
    fit(tmp_path / "second", in_store)
    assert not (folder / ".restoring").exists()
    assert [event["attempt"] for event in events(folder, "step")] == list(range(1, 17))
    (tmp_path / "third" / "run" / ".restoring").mkdir(parents=True)
    (tmp_path / "third" / "run" / "mine").write_text("mine")
    with pytest.raises(FolderTaken):
        fit(tmp_path / "third", None)


class TakenOver(Tiny):
    """While it trains, another launch of the run takes the place."""

    take: Any = None
    batches = 0

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        if self.batches == 6:
            type(self).take()
        return super().loss(model, batch)


def test_an_older_launch_ends_with_73(in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take() -> None:
        kept = json.loads((tmp_path / "first" / "run" / "remote.json").read_text())
        known = {"run": kept["run"], "number": kept["number"]}
        request = {"address": in_store.address, "patience": 20.0, "launch": "f" * 16, "known": known, "recipe": ""}
        assert in_store.process.call("halfstep.train.remote_generations:claim", request)["number"] == 2

    monkeypatch.setattr(TakenOver, "take", staticmethod(take))
    with pytest.raises(FolderLost) as caught:
        fit(tmp_path / "first", in_store, TakenOver, checkpoint__background=False, train__epochs=4000)
    assert caught.value.exit_code == 73
    assert in_store("audit")["torn"] == []
    assert all("-0001-" in one for one in generations_in(in_store))
    assert not (tmp_path / "first" / "run" / "result.json").exists()


@pytest.mark.wording
def test_the_place_of_another_run_is_refused(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "first", in_store)
    fit(tmp_path / "second", None, train__epochs=1)
    with pytest.raises(FolderTaken, match="a different run"):
        fit(tmp_path / "third", in_store, train__seed=6, run__dir=str(_begun(tmp_path / "third")))


def _begun(folder: Path) -> Path:
    """The folder of a run that was stopped, and that had no store."""
    folder.mkdir()
    (folder / "tiny.yaml").write_text(RECIPE)
    settings = {"run.dir": str(folder / "run"), "train.seed": 6}
    with pytest.raises(Stopped):
        halfstep.fit(folder / "tiny.yaml", task=StoppedRun, settings=settings, quiet=True)
    return folder / "run"


@pytest.mark.wording
def test_a_folder_behind_its_store_is_refused(in_store: InStore, tmp_path: Path) -> None:
    interrupted(tmp_path / "first", in_store)
    fit(tmp_path / "second", in_store)
    with pytest.raises(FolderTaken, match="ahead of this folder"):
        fit(tmp_path / "first", in_store)


class Failing(Tiny):
    """Fails in its first step, before there is a checkpoint."""

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        raise RuntimeError("failing")


class Unbuilt(Tiny):
    """Fails before anything is started."""

    def model(self) -> Any:
        raise RuntimeError("unbuilt")


@pytest.mark.wording
def test_a_place_before_its_first_commit_is_taken_by_the_same_run_alone(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "alone", None)
    with pytest.raises(RuntimeError, match="failing"):
        fit(tmp_path / "first", in_store, Failing)
    assert generations_in(in_store) == []
    with pytest.raises(StateMismatch, match=f"{in_store.address} was started with a different recipe") as caught:
        fit(tmp_path / "other", in_store, train__seed=6)
    assert caught.value.id == "recipe-changed"
    assert not any(not entry.name.startswith(".") for entry in (tmp_path / "other" / "run").iterdir())
    fit(tmp_path / "other", in_store, train__seed=6, remote="other")
    fit(tmp_path / "second", in_store)
    assert_same_weights(tmp_path / "alone", tmp_path / "second")
    with pytest.raises(StateMismatch, match=f"{in_store.address} was started with a different recipe"):
        fit(tmp_path / "third", in_store, train__seed=6)


def test_a_launch_that_could_not_start_leaves_the_place_to_others(in_store: InStore, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="unbuilt"):
        fit(tmp_path / "first", in_store, Unbuilt)
    assert not (tmp_path / "first" / "run").exists()
    fit(tmp_path / "second", in_store, train__seed=6)


@pytest.mark.full
def test_a_run_may_change_its_place_and_come_back(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "alone", None)
    for stop, place in ((4, "a"), (3, "b"), (3, "a")):
        task = type(f"Stopped{stop}", (StoppedRun,), {"batches": STOP - stop})
        interrupted(tmp_path / "first", in_store, task, remote=place)
    fit(tmp_path / "first", in_store, remote="b")
    assert_same_weights(tmp_path / "alone", tmp_path / "first")
    assert generations_in(in_store, f"{in_store.address}/b")[0] > generations_in(in_store, f"{in_store.address}/a")[0]
    fit(tmp_path / "second", in_store, remote="b")
    assert_same_weights(tmp_path / "alone", tmp_path / "second")


def test_the_same_disk_continues_and_uploads_nothing_twice(in_store: InStore, tmp_path: Path) -> None:
    fit(tmp_path / "alone", None)
    interrupted(tmp_path / "first", in_store)
    newest = generations_in(in_store)[0]
    in_store.proxy.seen.clear()
    fit(tmp_path / "first", in_store)
    assert in_store.proxy.requests("PUT", local(newest)) == 0
    assert_same_weights(tmp_path / "alone", tmp_path / "first")


def test_a_run_with_local_checkpoints_continues_without_its_store(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "alone", None)
    interrupted(tmp_path / "first", in_store)
    monkeypatch.setattr(remote, "AT_START", 1.0)
    monkeypatch.setattr(remote, "WARNED_AFTER", 0.0)
    with monkeypatch.context() as down:
        down.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        fit(tmp_path / "first", in_store, checkpoint__remote_wait=1.0, store__patience=1.0)
        told = notes(tmp_path / "first", "warning")
        assert sum("continues with local checkpoints" in text for text in told) == 1
        assert sum("no checkpoint could be uploaded" in text for text in told) == 1
        assert any("is missing in" in text for text in told), told
        with pytest.raises(StoreFailed) as caught:
            fit(tmp_path / "empty", in_store, store__patience=2.0)
        assert caught.value.exit_code == 74
    assert_same_weights(tmp_path / "alone", tmp_path / "first")


def test_a_store_that_comes_back_gets_the_newest_checkpoint(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WARNED_AFTER", 0.0)
    monkeypatch.setattr(remote, "PAUSES", (0.1,))
    in_store.proxy.plan[:] = [Planned("PUT", "503*", "/checkpoints/")]
    original = remote.RemoteCheckpoints.close

    def close(self: Any, journal: Any) -> None:
        in_store.proxy.plan.clear()
        original(self, journal)

    monkeypatch.setattr(remote.RemoteCheckpoints, "close", close)
    fit(tmp_path / "first", in_store, store__patience=2.0)
    newest = sorted(path.name for path in (tmp_path / "first" / "run" / "checkpoints").iterdir())[-1]
    found = [local(one) for one in generations_in(in_store)]
    assert found[0] == newest
    assert len(found) < 4, "older ones are skipped"
    assert any("uploads work again" in text for text in notes(tmp_path / "first", "info"))


def test_the_same_command_uploads_what_the_end_of_a_run_did_not(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as down:
        interrupted(tmp_path / "first", in_store)
        down.setattr(remote, "AT_START", 1.0)
        down.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        fit(tmp_path / "first", in_store, checkpoint__remote_wait=1.0, store__patience=1.0)
    newest = sorted(path.name for path in (tmp_path / "first" / "run" / "checkpoints").iterdir())[-1]
    assert local(generations_in(in_store)[0]) != newest
    fit(tmp_path / "first", in_store)
    assert f"{newest} is uploaded" in capsys.readouterr().err
    assert local(generations_in(in_store)[0]) == newest
    assert in_store("audit")["torn"] == []
    fit(tmp_path / "first", in_store)
    assert "uploaded" not in capsys.readouterr().err, "nothing is missing any more"


def test_older_checkpoints_that_cannot_be_removed_are_reported_once(in_store: InStore, tmp_path: Path) -> None:
    in_store.proxy.plan[:] = [Planned("POST", "delete-denied*", "/checkpoints/")]
    interrupted(tmp_path / "first", in_store, checkpoint__keep=2)
    fit(tmp_path / "first", in_store, checkpoint__keep=2, store__patience=2.0)
    kept = [text for text in notes(tmp_path / "first", "warning") if "older checkpoints" in text]
    assert len(kept) == 1
    newest = sorted(path.name for path in (tmp_path / "first" / "run" / "checkpoints").iterdir())[-1]
    assert local(generations_in(in_store)[0]) == newest
    assert len(generations_in(in_store)) > 2
    assert in_store("audit")["torn"] == []


@pytest.mark.full
def test_a_process_that_cannot_be_started_for_a_while_costs_no_run(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.01,))
    original, failures = remote.StoreProcess.call, [OSError(12, "Cannot allocate memory")] * 3

    def call(self: Any, function: str, request: Any) -> Any:
        if failures and function.endswith(":upload"):
            raise failures.pop()
        return original(self, function, request)

    monkeypatch.setattr(remote.StoreProcess, "call", call)
    fit(tmp_path / "first", in_store)
    assert not failures
    newest = sorted(path.name for path in (tmp_path / "first" / "run" / "checkpoints").iterdir())[-1]
    assert local(generations_in(in_store)[0]) == newest


@pytest.mark.wording
def test_an_address_with_credentials_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WrongUse) as caught:
        fit(tmp_path, None, checkpoint__remote="s3://KEY:CANARY@bkt/run")
    assert "CANARY" not in str(caught.value)
    assert not (tmp_path / "run").exists()
