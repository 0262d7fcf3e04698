"""Stores that ignore conditions (s3rver) or ranges (rclone), and several ranks; they take long."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfstep.data import shards as shards_module
from halfstep.errors import StoreFailed
from halfstep.store.process import StoreProcess
from tests.store.conftest import InStore
from tests.store.test_remote import assert_same_weights, events, fit, interrupted, notes
from tests.store.test_samples import assert_same, trained, uploaded
from tests.support.commands import Command
from tests.support.indexed_task import launched, write_shards
from tests.support.ranks import Ranks
from tests.support.store_servers import BUCKET, RCLONE, S3RVER, free_port, rclone, s3rver, variables

pytestmark = pytest.mark.full


class Place:
    """An address, for `fit` of the other tests."""

    address = f"s3://{BUCKET}/run"


@pytest.mark.skipif(not S3RVER.exists(), reason="HALFSTEP_S3RVER names no folder of `npm install s3rver`")
def test_a_store_that_ignores_conditions_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in variables(port).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "objects").mkdir()
    with s3rver(tmp_path / "objects", port):
        found = json.loads(Command("doctor", Place.address, "--json").ended()[1])
        assert (found["problem"], found["honours_conditions"], found["answers_ranges"]) == (None, False, True)
        fit(tmp_path / "alone", None)
        interrupted(tmp_path / "first", Place())  # type: ignore[arg-type]
        told = notes(tmp_path / "first", "warning")
        assert [text for text in told if "ignores conditions" in text] == told
        assert len(told) == 1
    # The server forgets nothing that it has answered.
    with s3rver(tmp_path / "objects", port):
        fit(tmp_path / "second", Place())  # type: ignore[arg-type]
    assert_same_weights(tmp_path / "alone", tmp_path / "second")


def until_killed(folder: Path, address: str, settings: dict[str, Any], step: int) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for data workers, as in a process that was not spawned
    shards_module.CHUNK_BYTES = 1
    trained(folder, address, kill_at=step, **settings)


@pytest.mark.skipif(not S3RVER.exists(), reason="HALFSTEP_S3RVER names no folder of `npm install s3rver`")
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_and_checkpoints_in_such_a_store_are_those_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Ids, losses and weights over an epoch's end; the second half on an empty disk."""
    port, address = free_port(), f"s3://{BUCKET}/a set/träin"
    for name, value in {**variables(port), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 1)
    local = write_shards(tmp_path / "set", 4, 300)
    (tmp_path / "objects").mkdir()
    settings = {"train__num_workers": workers, "run__log_every": 1}
    here = trained(tmp_path / "here", local, **settings)
    with s3rver(tmp_path / "objects", port):
        process = StoreProcess()
        for path in sorted(local.glob("*.tar")):
            process.call("tests.store.calls:put_path", {"address": address, "key": path.name, "path": str(path)})
        process.close()
        code, _, err = Command("data", "index", address, "--json").ended()
        assert code == 0, err
        settings |= {"store__cache": 0.0004, "checkpoint__remote": f"s3://{BUCKET}/a run/ü"}
        given = (tmp_path / "first", address, settings, 70)
        killed = multiprocessing.get_context("spawn").Process(target=until_killed, args=given)
        killed.start()
        killed.join(200.0)
        assert killed.exitcode == -signal.SIGKILL
        there = trained(tmp_path / "there", address, **settings)
    assert (here["code"], there["code"], there["said"]) == (0, 0, "")
    assert [here["ids"][len(here["ids"]) - len(there["ids"]) :], len(here["ids"])] == [there["ids"], 130]
    assert 50 < len(there["ids"]) < 130, "it continued from the store"
    assert here["losses"] == there["losses"]
    assert len(here["losses"]) == 130
    assert_same(tmp_path / "here", tmp_path / "there")


@pytest.mark.skipif(RCLONE is None, reason="HALFSTEP_RCLONE names no folder with rclone 1.75")
def test_a_store_that_answers_ranges_with_200_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rclone() as port:
        for name, value in variables(port).items():
            monkeypatch.setenv(name, value)
        code, out, _ = Command("doctor", Place.address, "--json").ended()
        assert (code, json.loads(out)["kind"]) == (74, "no-ranges")
        with pytest.raises(StoreFailed) as caught:
            fit(tmp_path / "first", Place())  # type: ignore[arg-type]
        assert (caught.value.kind, caught.value.exit_code) == ("no-ranges", 74)
        # Samples, too: the index reads ranges.
        process = StoreProcess()
        for path in sorted(write_shards(tmp_path / "set", 2, 20).glob("*.tar")):
            process.call("tests.store.calls:put_path", {"address": Place.address, "key": path.name, "path": str(path)})
        process.close()
        code, _, err = Command("data", "index", Place.address).ended()
        assert code == 74
        assert "does not answer ranges with 206" in err


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 1])
def test_two_ranks_continue_from_the_store_alone_also_as_one(in_store: InStore, tmp_path: Path, ranks: int) -> None:
    def train(folder: str, count: int, *more: str) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        words = ["-m", "halfstep", "train", "segmentation_tiny", "--fp32", "train.num_workers=0", "train.seed=5"]
        settings = ["data.samples=32", "train.global_batch=8", "checkpoint.every_steps=2", f"run.dir={folder}", *more]
        command = [sys.executable, *launcher, *words, *settings]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    remote = f"checkpoint.remote={in_store.address}"
    assert train("alone", 2, "train.steps=10").returncode == 0
    done = train("first", 2, remote, "train.steps=6")
    assert done.returncode == 0, done.stderr
    for key in in_store("commits")[:1]:
        in_store("delete", key=f"{key}/COMMIT.json")
    done = train("second", ranks, remote, "train.steps=10", "--accept-recipe-change")
    assert done.returncode == 0, done.stderr
    begun = events(tmp_path / "second", "start")[-1]["resumed"]
    assert begun["attempt"] > 0
    reasons = [reason for reason in begun["reasons"] if "ranks" in reason]
    assert bool(reasons) == (ranks == 1)


def with_small_chunks(rank: int, *given: Any) -> dict[str, Any]:
    shards_module.CHUNK_BYTES = 1
    return launched(rank, *given)


def samples(found: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    return [[number for one in found for number in one["ids"][step]] for step in range(len(found[0]["ids"]))]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 1])
def test_two_ranks_share_a_cache_and_continue_from_the_store_alone(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Bitwise on two ranks; on one, the same samples, and the same weights but for the order of sums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 1)
    local, steps = write_shards(tmp_path / "set", 4, 300), 200
    address = uploaded(in_store, local)
    settings = {"data.window": 4, "train.seed": 7, "train.steps": steps, "train.global_batch": 8, "train.batch_size": 4}
    settings |= {"train.num_workers": 1, "run.log_every": 1, "store.patience": 30.0, "store.cache": 0.0004}
    stored = {**settings, "data.path": address, "checkpoint.remote": f"{address}-run"}
    job = Ranks(2)
    try:
        whole = job(with_small_chunks, str(tmp_path / "whole"), {**settings, "data.path": str(local)})
        job.begin(with_small_chunks, str(tmp_path / "first"), stored, False, 150)
        assert [one.failure for one in job.outcomes()] == ["ended by SIGKILL"] * 2
        shutil.rmtree(tmp_path / "first")
        given = (str(tmp_path / "second"), {**stored, "train.batch_size": 8 // ranks})
        again = job(with_small_chunks, *given) if ranks == 2 else [launched(0, *given)]
    finally:
        job.stop()
    assert [one["code"] for one in (*whole, *again)] == [0] * (2 + ranks)
    left = len(again[0]["ids"])
    assert 0 < left < steps, "it continued from the store"
    assert samples(whole)[steps - left :] == samples(again)
    one, other = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "second"))
    if ranks == 2:
        assert all(torch.equal(one[key], other[key]) for key in one)
    else:
        assert all(torch.allclose(one[key].double(), other[key].double(), rtol=1e-4, atol=1e-6) for key in one)
    kept = (tmp_path / "cache" / "halfstep" / "chunks").glob("[0-9a-f]*")
    assert 0 < sum(path.stat().st_size for path in kept) <= 400_000
    assert in_store("audit", address=f"{address}-run")["torn"] == []
