"""The twenty faults while a checkpoint is uploaded and restored: how each ends, and no checkpoint is lost or torn."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfstep.errors import StoreFailed
from tests.store.calls import content
from tests.store.conftest import InStore
from tests.support.store_proxy import Planned

GENERATIONS = "halfstep.train.remote_generations"
SHORT, LONG = 4.0, 12.0
LARGE = 9 * 2**20
"""Bytes of a file that is uploaded in parts, and read in two ranges."""
GET, PUT, POST = "GET", "PUT", "POST"
FILE, COMMIT, OWNER = "rank-00000.safetensors", "COMMIT.json", "OWNER.json"
ANY = "checkpoints/"


class Fault(NamedTuple):
    """A fault, and how the call that meets it ends: `ok`, or the kind of its failure."""

    name: str
    plan: tuple[Planned, ...]
    outcome: str
    patience: float = LONG


UPLOADS = [
    *(Fault(f"{code} once", (Planned(PUT, code, ANY),), "ok") for code in ("503", "500", "429", "404", "403")),
    Fault("503 for ever", (Planned(PUT, "503*", ANY),), "unreachable", SHORT),
    Fault("503 for ever for one file", (Planned(PUT, "503*", "rank-00000.json"),), "unreachable", SHORT),
    Fault("stall for ever", (Planned(PUT, "stall*", ANY),), "unreachable", SHORT),
    Fault("drip for ever", (Planned(GET, "drip*", OWNER),), "unreachable", SHORT),
    Fault("reset before the answer", (Planned(PUT, "reset", ANY),), "ok"),
    Fault("reset in the body", (Planned(GET, "reset-in-body", OWNER),), "ok"),
    Fault("close in the body", (Planned(GET, "close-in-body", OWNER),), "ok"),
    Fault("stall in the body", (Planned(GET, "stall-in-body", OWNER),), "ok"),
    Fault("length lies", (Planned(GET, "length-lies", OWNER),), "ok"),
    Fault("wrong bytes", (Planned(GET, "wrong-bytes", OWNER),), "ok"),
    Fault("wrong bytes for ever", (Planned(GET, "wrong-bytes*", OWNER),), "taken"),
    Fault("range ignored", (Planned(GET, "whole*", OWNER),), "no-ranges", SHORT),
    Fault("commit done, then reset", (Planned(PUT, "done-then-reset", COMMIT),), "ok"),
    Fault("commit done, then 503", (Planned(PUT, "done-then-503", COMMIT),), "ok"),
    Fault("commit done, then no answer for ever", (Planned(PUT, "done-then-late*", COMMIT),), "ok"),
    Fault("commit answered, and not done", (Planned(PUT, "not-done", COMMIT),), "ok"),
    Fault("owner done, then reset", (Planned(PUT, "done-then-reset", OWNER),), "ok"),
    Fault("file done, then 503", (Planned(PUT, "done-then-503", "MANIFEST"),), "ok"),
    Fault("file answered, and not done", (Planned(PUT, "not-done", "MANIFEST"),), "ok"),
    Fault("multipart finished, no answer", (Planned(POST, "done-then-late*", "uploadId="),), "ok"),
    Fault("listing that lags", (), "ok"),
]
RESTORES = [
    *(Fault(f"{code} once", (Planned(GET, code, FILE),), "ok") for code in ("503", "500", "429", "404", "403")),
    Fault("503 for ever", (Planned(GET, "503*", FILE),), "unreachable", SHORT),
    Fault("stall for ever", (Planned(GET, "stall*", FILE),), "unreachable", SHORT),
    Fault("drip for ever", (Planned(GET, "drip*", FILE),), "unreachable", SHORT),
    Fault("reset before the answer", (Planned(GET, "reset", FILE),), "ok"),
    Fault("reset in the body", (Planned(GET, "reset-in-body", FILE),), "ok"),
    Fault("close in the body", (Planned(GET, "close-in-body", FILE),), "ok"),
    Fault("stall in the body", (Planned(GET, "stall-in-body", FILE),), "ok"),
    Fault("length lies", (Planned(GET, "length-lies", FILE),), "ok"),
    Fault("wrong bytes", (Planned(GET, "wrong-bytes", FILE),), "ok"),
    Fault("wrong bytes in the commit", (Planned(GET, "wrong-bytes", COMMIT),), "ok"),
    Fault("wrong bytes for ever", (Planned(GET, "wrong-bytes*", FILE),), "damaged"),
    Fault("range ignored", (Planned(GET, "whole*", FILE),), "no-ranges", SHORT),
    Fault("object replaced between two ranges", (Planned(GET, "503", FILE),), "damaged"),
    Fault("listing that lags", (), "ok"),
]
pytestmark = pytest.mark.full


def written(folder: Path, number: int) -> str:
    """Write a run folder with a checkpoint whose largest file has two parts; return the checkpoint's name."""
    name = f"step-{number:08d}.{number:04x}"
    place = folder / "checkpoints" / name
    place.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("task: tiny\n")
    state = json.dumps({"position": {"journal_sizes": {}}}).encode()
    contents = {FILE: content(LARGE, number), "rank-00000.json": state}
    seals = {one: [len(text), hashlib.sha256(text).hexdigest()] for one, text in contents.items()}
    contents["MANIFEST.json"] = json.dumps({"files": seals}).encode()
    for one, text in contents.items():
        (place / one).write_bytes(text)
    return name


def claimed(in_store: InStore, launch: str = "1" * 16, number: int = 0) -> dict[str, Any]:
    request = {"launch": launch, "known": {"run": "0" * 16, "number": number}, "recipe": ""}
    found: dict[str, Any] = in_store.process.call(
        f"{GENERATIONS}:claim", {"address": in_store.address, "patience": LONG, **request}
    )
    return found


def upload(
    in_store: InStore, lease: dict[str, Any], folder: Path, name: str, patience: float = LONG, keep: int = 2
) -> str | None:
    request = {"folder": str(folder), "name": name, "keep": keep, "skipped": [], "withdrawn": []}
    found: str | None = in_store.process.call(
        f"{GENERATIONS}:upload", {"lease": {**lease, "patience": patience}, **request}
    )
    return found


def restore(in_store: InStore, folder: Path, patience: float = LONG) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    request = {"address": in_store.address, "patience": patience, "folder": str(folder)}
    found: dict[str, Any] = in_store.process.call(f"{GENERATIONS}:restore", request)
    return found


def named(fault: Fault) -> str:
    return fault.name.replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("fault", UPLOADS, ids=named)
def test_each_fault_of_an_upload_ends_as_stated(in_store: InStore, tmp_path: Path, fault: Fault) -> None:
    lease = claimed(in_store)
    before = written(tmp_path, 1)
    first = upload(in_store, lease, tmp_path, before)
    assert first is not None
    name = written(tmp_path, 2)
    in_store.proxy.seen.clear()
    in_store.proxy.plan[:] = fault.plan
    in_store.proxy.hidden |= set() if fault.plan else {first.rpartition("/")[2]}
    (outcome, given), began = ("ok", in_store.address), time.monotonic()
    try:
        upload(in_store, lease, tmp_path, name, fault.patience)
    except StoreFailed as failure:
        outcome, given = failure.kind, failure.given
    assert in_store.address in given
    assert outcome == fault.outcome
    assert time.monotonic() - began < 3 * fault.patience + 10.0
    assert len(in_store.proxy.seen) < 100, "requests are bounded"
    assert not any(not one.fault.endswith("*") for one in in_store.proxy.plan), "the fault was met"
    in_store.proxy.plan.clear()
    in_store.proxy.hidden.clear()
    found = in_store("audit")
    assert found["torn"] == []
    assert first in found["whole"], "no checkpoint is lost"
    assert any(name in one for one in found["whole"]) == (outcome == "ok")
    # A fault that passes: the same upload, again.
    upload(in_store, lease, tmp_path, name)
    assert in_store("audit") == {"whole": [first, first.replace(before, name)], "torn": []}
    assert restore(in_store, tmp_path / "elsewhere")["name"] == name


@pytest.mark.parametrize("fault", RESTORES, ids=named)
def test_each_fault_of_a_restore_ends_as_stated(in_store: InStore, tmp_path: Path, fault: Fault) -> None:
    lease, name = claimed(in_store), written(tmp_path, 1)
    key = upload(in_store, lease, tmp_path, name)
    assert key is not None
    in_store.proxy.seen.clear()
    in_store.proxy.plan[:] = fault.plan
    if not fault.plan:
        in_store.proxy.hidden.add(key.rpartition("/")[2])
    if "replaced" in fault.name:
        in_store("put", key=f"{key}/{FILE}", size=LARGE, seed=7)
    (outcome, given), began, folder = ("ok", in_store.address), time.monotonic(), tmp_path / "elsewhere"
    try:
        restore(in_store, folder, fault.patience)
    except StoreFailed as failure:
        outcome, given = failure.kind, failure.given
    assert in_store.address in given
    assert outcome == fault.outcome
    assert time.monotonic() - began < 3 * fault.patience + 10.0
    assert len(in_store.proxy.seen) < 100, "requests are bounded"
    in_store.proxy.plan.clear()
    assert (folder / "recipe.yaml").exists() == (outcome == "ok"), "a run folder is complete or none"
    if outcome != "ok" and "replaced" not in fault.name:
        restore(in_store, folder)
    if "replaced" not in fault.name:
        assert (folder / "checkpoints" / name / FILE).read_bytes() == content(LARGE, 1)


@pytest.mark.parametrize("fault", ["503*", "403*"])
def test_a_checkpoint_whose_commit_cannot_be_removed_keeps_its_files(
    in_store: InStore, tmp_path: Path, fault: str
) -> None:
    lease = claimed(in_store)
    first = upload(in_store, lease, tmp_path, written(tmp_path, 1))
    in_store.proxy.plan[:] = [Planned(POST, fault, COMMIT)]
    with pytest.raises(StoreFailed):
        upload(in_store, lease, tmp_path, name := written(tmp_path, 2), SHORT, keep=1)
    found = in_store("audit")
    assert (first in found["whole"], len(found["whole"]), found["torn"]) == (True, 2, [])
    in_store.proxy.plan.clear()
    upload(in_store, lease, tmp_path, written(tmp_path, 3), keep=1)
    assert name not in str(in_store("audit"))
