"""Rows of the fault matrix with samples or checkpoints in a store: the same end as with local files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from faults.bad_images import BOMBS, DAMAGED, encoded, picture
from faults.payloads import MANIFEST, PAYLOADS, STATE
from halfstep.data import shards as shards_module
from halfstep.errors import HalfstepError, StoreFailed
from halfstep.train import remote_generations
from tests.store.conftest import InStore
from tests.store.test_generations_faults import claimed, restore, upload, written
from tests.store.test_remote import fit, generations_in, interrupted
from tests.store.test_samples import assert_same, trained, uploaded
from tests.support import indexed_task
from tests.support.indexed_task import write_shards

pytestmark = pytest.mark.full
ODD = 5
"""The side of a picture that the task below notices."""
MARK = "HALFSTEP_TEST_MARK"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shards_module, "CHUNK_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def told(found: dict[str, Any], root: str, run: Path) -> dict[str, list[Any]]:
    """Return what a run's journal has of its samples by kind, without the places of the data and the run."""
    keys = ("attempt", "applied", "reason", "loss", "ids", "quarantined", "name", "replacement", "text")
    kinds: dict[str, list[Any]] = {}
    # A checkpoint in the background and a sample of a worker are recorded when they are ready.
    for line in found["lines"]:
        if line["event"] not in ("step", "bad_sample", "note"):
            continue
        kept = json.dumps({key: line[key] for key in keys if key in line})
        kinds.setdefault(line["event"], []).append(json.loads(kept.replace(root, "ROOT").replace(str(run), "RUN")))
    return kinds


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_and_bombs_are_replaced_and_named(in_store: InStore, tmp_path: Path, workers: int) -> None:
    """F07 and F08."""
    bad = {7 * n: make() for n, make in enumerate([*DAMAGED.values(), *BOMBS.values()])}
    root = write_shards(tmp_path / "set", 2, 7 * len(bad), bad)
    address = uploaded(in_store, root)
    settings = {"data__bad_samples": len(bad), "train__num_workers": workers, "train__steps": 40, "run__log_every": 1}
    here, there = (trained(tmp_path / name, path, **settings) for name, path in (("here", root), ("there", address)))
    assert (here["code"], there["code"], there["said"]) == (0, 0, "")
    assert here["ids"] == there["ids"]
    assert told(here, str(root), tmp_path / "here") == told(there, address, tmp_path / "there")
    assert "ROOT/s-00.tar/000014" in str(told(there, address, tmp_path / "there"))
    assert_same(tmp_path / "here", tmp_path / "there")
    few = [
        trained(tmp_path / f"few-{n}", path, **{**settings, "data__bad_samples": 2})
        for n, path in enumerate((root, address))
    ]
    assert [one["code"] for one in few] == [65, 65]


def _poisoned(self: Any, part: Any, sample: dict[str, Any]) -> dict[str, Any]:
    image = sample["image"].float().mean((1, 2)) / 255
    return {**sample, "image": image * float("nan") if sample["image"].shape[-1] == ODD else image}


def test_a_sample_that_is_not_finite_skips_one_step(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06."""
    monkeypatch.setattr(indexed_task.Indexed, "transform", _poisoned)
    root = write_shards(tmp_path / "set", 2, 100, {n: encoded(picture(n, ODD)) for n in (11, 150)})
    address, settings = uploaded(in_store, root), {"train__num_workers": 2, "run__log_every": 1}
    here, there = (trained(tmp_path / name, path, **settings) for name, path in (("here", root), ("there", address)))
    assert (here["code"], there["code"], there["said"]) == (0, 0, "")
    skipped = [line for line in there["lines"] if line["event"] == "step" and not line["applied"]]
    assert 1 <= len(skipped) <= 2, "those that are not held out for validation"
    assert told(here, str(root), tmp_path / "here") == told(there, address, tmp_path / "there")
    assert_same(tmp_path / "here", tmp_path / "there")


def _killing(self: Any, part: Any, sample: dict[str, Any]) -> dict[str, Any]:
    mark = Path(os.environ[MARK])
    if sample["image"].shape[-1] == ODD and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {**sample, "image": sample["image"].float().mean((1, 2)) / 255}


def test_a_worker_that_is_killed_costs_no_bit(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F09."""
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    monkeypatch.setattr(indexed_task.Indexed, "transform", _killing)
    root = write_shards(tmp_path / "set", 2, 300, {n: encoded(picture(n, ODD)) for n in range(1, 600, 50)})
    address, settings = uploaded(in_store, root), {"train__num_workers": 2, "run__log_every": 1}
    (tmp_path / "mark").touch()
    here = trained(tmp_path / "here", root, **settings)
    (tmp_path / "mark").unlink()
    lost = trained(tmp_path / "there", address, **settings)
    there = trained(tmp_path / "there", address, **settings)
    assert (here["code"], lost["code"], there["code"], there["said"]) == (0, 76, 0, "")
    assert here["losses"] == there["losses"]
    assert_same(tmp_path / "here", tmp_path / "there")


def test_other_shards_are_refused_unless_accepted(in_store: InStore, tmp_path: Path) -> None:
    """F10: a shard is written again, with its index, between two launches."""
    root = write_shards(tmp_path / "set", 4, 100)
    address, settings = uploaded(in_store, root), {"train__steps": 20}
    for name, path in (("here", root), ("there", address)):
        assert trained(tmp_path / name, path, **settings)["code"] == 0
        (tmp_path / name / "result.json").unlink()
        for one in sorted((tmp_path / name / "checkpoints").iterdir())[2:]:
            shutil.rmtree(one)
    write_shards(tmp_path / "other", 4, 100, {205: encoded(picture(99))})
    shutil.copy(tmp_path / "other" / "s-02.tar", root / "s-02.tar")
    in_store("put_path", key="s-02.tar", path=str(root / "s-02.tar"))
    in_store("index_set")
    found = [trained(tmp_path / name, path, **settings) for name, path in (("here", root), ("there", address))]
    assert [one["code"] for one in found] == [79, 79]
    assert all("s-02.tar" in one["said"] for one in found)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_checkpoint_that_would_run_code_is_refused(in_store: InStore, tmp_path: Path, name: str) -> None:
    """F39: with digests that fit, in manifest and commit."""
    payload, canary = PAYLOADS[name], tmp_path / "canary"
    interrupted(tmp_path / "first", in_store)
    folder = tmp_path / "first" / "run"
    for one in (folder / "checkpoints").iterdir():
        (one / payload.place).write_bytes(payload.content(canary))
        if payload.place != MANIFEST:
            manifest = json.loads((one / MANIFEST).read_text())
            text = (one / payload.place).read_bytes()
            if payload.place in manifest["files"]:
                manifest["files"][payload.place] = [len(text), hashlib.sha256(text).hexdigest()]
            (one / MANIFEST).write_text(json.dumps(manifest))
    for one in generations_in(in_store):
        commit = json.loads(in_store("text", key=f"{one}/COMMIT.json"))["content"]
        for path in (folder / "checkpoints" / one.split("/")[1].rsplit("-", 2)[0]).iterdir():
            in_store("put_path", key=f"{one}/{path.name}", path=str(path))
            text = path.read_bytes()
            commit["files"][path.name] = [len(text), hashlib.sha256(text).hexdigest()]
        sealed = tmp_path / "commit"
        sealed.write_bytes(remote_generations._add_seal(commit))
        in_store("put_path", key=f"{one}/COMMIT.json", path=str(sealed))
    with pytest.raises(HalfstepError) as caught:
        fit(tmp_path / "second", in_store)
    assert caught.value.exit_code in (65, 77)
    assert not canary.exists()


def hostile(commit: dict[str, Any]) -> dict[str, Any]:
    """Commits that nobody wrote, with seals that fit."""
    seal = commit["files"][STATE]
    files, beside = commit["files"], commit["beside"]
    return {
        "path": {**commit, "files": {**files, "../../../rank-00000.json": seal}},
        "absolute": {**commit, "files": {**files, "/tmp/halfstep-hostile": seal}},
        "other file": {**commit, "beside": {**beside, "../evil": [seal]}},
        "journal as a path": {**commit, "beside": {**beside, ".bashrc": [seal]}},
        "other name": {**commit, "name": "../../step-00000001.0001"},
        "no recipe": {**commit, "beside": {}},
        "no manifest": {**commit, "files": {STATE: seal}},
        "sizes": {**commit, "files": {**files, STATE: [10**18, seal[1]]}},
        "negative": {**commit, "files": {**files, STATE: [-1, seal[1]]}},
        "text": {**commit, "files": {**files, STATE: ["1", seal[1]]}},
        "digest": {**commit, "files": {**files, STATE: [seal[0], "../../x"]}},
        "list": {**commit, "files": []},
        "nothing": {**commit, "files": None},
        "number": 7,
        "form": {**commit, "form": 2},
        "run": {**commit, "beside": {**beside, "recipe.yaml": "abc"}},
    }


def test_a_commit_that_was_made_to_harm_is_skipped_in_words(in_store: InStore, tmp_path: Path) -> None:
    """F40: nothing outside of the folder, soon, and the checkpoint before it is taken."""
    lease, before = claimed(in_store), written(tmp_path, 1)
    upload(in_store, lease, tmp_path, before)
    newest = upload(in_store, lease, tmp_path, written(tmp_path, 2))
    good = in_store("text", key=f"{newest}/COMMIT.json").encode()
    texts = {name: remote_generations._add_seal(one) for name, one in hostile(json.loads(good)["content"]).items()}
    texts |= {"cut": good[:-9], "empty": b"", "deep": b"[" * 100_000, "none": b"\0" * 1000, "big": b" " * 2**24}
    for name, text in texts.items():
        (tmp_path / "commit").write_bytes(text)
        in_store("put_path", key=f"{newest}/COMMIT.json", path=str(tmp_path / "commit"))
        folder = tmp_path / "elsewhere" / name / "run"
        folder.parent.mkdir(parents=True)
        found = restore(in_store, folder)
        assert (found["name"], list(found["skipped"])) == (before, [newest]), name
        assert sorted(path.name for path in folder.parent.iterdir()) == ["run"]
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "recipe.yaml", "remote.json"]
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [before]
    assert not Path("/tmp/halfstep-hostile").exists()


OWNERS = {"number": ["x", 1.5, None], "run": [7, None], "newest": [3, ["x"]], "launch": [None, {}], "recipe": [None, 7]}


@pytest.mark.parametrize("field", OWNERS)
def test_an_owner_that_was_made_to_harm_is_refused_in_words(in_store: InStore, tmp_path: Path, field: str) -> None:
    """F40."""
    upload(in_store, claimed(in_store), tmp_path, written(tmp_path, 1))
    good = json.loads(in_store("text", key="OWNER.json"))["content"]
    for value in OWNERS[field]:
        (tmp_path / "owner").write_bytes(remote_generations._add_seal({**good, field: value}))
        in_store("put_path", key="OWNER.json", path=str(tmp_path / "owner"))
        for call in (lambda: claimed(in_store, "2" * 16, 1), lambda: restore(in_store, tmp_path / "elsewhere")):
            with pytest.raises(StoreFailed, match="did not write") as caught:
                call()
            assert caught.value.kind == "taken"
