"""Twenty faults of an object store, and how each must end. The table is the promise; the proxy makes the faults."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfstep.errors import StoreFailed
from tests.store.calls import SIZE, content
from tests.store.conftest import InStore
from tests.store.test_remote import fit, generations_in, interrupted, local
from tests.support.store_proxy import Planned

SHORT, LONG = 4.0, 12.0
"""Seconds of patience: for faults that stay, and for faults that pass. A request has a quarter of it."""
MEGABYTE = 2**20
GET, PUT, POST = "GET", "PUT", "POST"


class Fault(NamedTuple):
    """A fault, the call that meets it, and how that ends: the kind of the failure, or `ok`."""

    name: str
    plan: tuple[Planned, ...]
    call: str
    outcome: str
    requests: int
    """The most requests of the method of the fault."""
    patience: float = LONG


READ = "read"
TABLE = [
    Fault("503 once", (Planned(GET, "503"),), READ, "ok", 2),
    Fault("500 once", (Planned(GET, "500"),), READ, "ok", 2),
    Fault("429 once", (Planned(GET, "429"),), READ, "ok", 2),
    Fault("404 once", (Planned(GET, "404"),), READ, "ok", 2),
    Fault("403 once", (Planned(GET, "403"),), READ, "ok", 2),
    Fault("503 for ever", (Planned(GET, "503*"),), READ, "unreachable", 60, SHORT),
    Fault("stall for ever", (Planned(GET, "stall*"),), READ, "unreachable", 20, SHORT),
    Fault("drip for ever", (Planned(GET, "drip*"),), READ, "unreachable", 20, SHORT),
    Fault("reset before the answer", (Planned(GET, "reset"),), READ, "ok", 2),
    Fault("reset in the body", (Planned(GET, "reset-in-body"),), READ, "ok", 2),
    Fault("close in the body", (Planned(GET, "close-in-body"),), READ, "ok", 2),
    Fault("stall in the body", (Planned(GET, "stall-in-body"),), READ, "ok", 2),
    Fault("length lies for ever", (Planned(GET, "length-lies*"),), READ, "short", 20, SHORT),
    Fault("length lies once", (Planned(GET, "length-lies"),), READ, "ok", 2),
    Fault("range ignored", (Planned(GET, "whole*"),), READ, "no-ranges", 4, SHORT),
    Fault("object replaced between two ranges", (), "read_replaced", "changed", 2),
    Fault("put done, then reset", (Planned(PUT, "done-then-reset"),), "create", "ok", 2),
    Fault("put done, then 503", (Planned(PUT, "done-then-503"),), "create", "ok", 2),
    Fault("multipart finished, no answer", (Planned(POST, "done-then-late*", "uploadId="),), "put_file", "ok", 8),
]
"""Wrong bytes and a listing that lags have no failure of a request: their tests are below."""


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.name.replace(" ", "-"))
@pytest.mark.wording
def test_each_fault_ends_as_stated(in_store: InStore, fault: Fault) -> None:
    calls: dict[str, dict[str, Any]] = {
        READ: {"key": "data", "start": 1000, "size": SIZE},
        "read_replaced": {"key": "data"},
        "create": {"key": "commit", "text": "mine"},
        "put_file": {"key": "large", "size": 9 * MEGABYTE},
    }
    in_store("put", key="data", size=SIZE + 5000)
    in_store.proxy.seen.clear()
    in_store.proxy.plan[:] = fault.plan
    began = time.monotonic()
    try:
        found, outcome = in_store(fault.call, patience=fault.patience, **calls[fault.call]), "ok"
    except StoreFailed as failure:
        outcome, found = failure.kind, failure.given
    assert outcome == fault.outcome
    if outcome != "ok":
        assert found.startswith(in_store.address), "bucket and key are named"
        assert "xml" not in found.lower()
    assert time.monotonic() - began < 2 * fault.patience + 5.0
    method = fault.plan[0].method if fault.plan else GET
    assert 1 <= in_store.proxy.requests(method, "data" if method == GET else "") <= fault.requests
    in_store.proxy.plan.clear()
    if fault.call == READ and outcome == "ok":
        assert found == hashlib.sha256(content(SIZE + 5000)[1000 : 1000 + SIZE]).hexdigest()
    if fault.call == "create":
        assert found is True
        assert in_store("text", key="commit") == "mine"
    if fault.call == "put_file":
        whole = hashlib.sha256(content(9 * MEGABYTE)).hexdigest()
        assert in_store("read", key="large", start=0, size=9 * MEGABYTE) == whole


def test_wrong_bytes_are_asked_for_again_and_a_checkpoint_of_wrong_bytes_is_skipped(
    in_store: InStore, tmp_path: Path
) -> None:
    interrupted(tmp_path / "first", in_store)
    newest = generations_in(in_store)[0]
    in_store.proxy.plan[:] = [Planned(GET, "wrong-bytes", f"{newest}/rank-00000.safetensors")]
    fit(tmp_path / "again", in_store)
    assert not in_store.proxy.plan, "the fault was met"
    notes = [event["text"] for event in _notes(tmp_path / "again")]
    assert any(f"restored {local(newest)}" in text for text in notes), notes

    interrupted(tmp_path / "other", in_store, remote="b")
    place = f"{in_store.address}/b"
    newest, before = generations_in(in_store, place)[:2]
    in_store.proxy.plan[:] = [Planned(GET, "wrong-bytes*", f"{newest}/rank-00000.safetensors")]
    fit(tmp_path / "third", in_store, remote="b")
    notes = [event["text"] for event in _notes(tmp_path / "third")]
    assert any(f"{newest} is skipped: rank-00000.safetensors" in text for text in notes), notes
    assert any(f"restored {local(before)}" in text for text in notes), notes


def test_a_listing_that_lags_hides_no_checkpoint(in_store: InStore, tmp_path: Path) -> None:
    interrupted(tmp_path / "first", in_store)
    newest = generations_in(in_store)[0]
    in_store.proxy.hidden.add(newest.rpartition("/")[2])
    fit(tmp_path / "again", in_store)
    notes = [event["text"] for event in _notes(tmp_path / "again")]
    assert any(f"restored {local(newest)}" in text for text in notes), notes


def _notes(folder: Path) -> list[dict[str, Any]]:
    from tests.train.test_loop import events

    return events(folder / "run", "note")
