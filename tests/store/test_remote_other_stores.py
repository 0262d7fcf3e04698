"""Stores that ignore conditions (s3rver) or ranges (rclone), and several ranks; they take long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.errors import StoreFailed
from tests.store.conftest import InStore
from tests.store.test_remote import assert_same_weights, events, fit, interrupted, notes
from tests.support.commands import Command
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
