"""`halfstep doctor s3://...`: one page about a store, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.doctor import store_check
from tests.store.conftest import InStore
from tests.support.commands import Command
from tests.support.store_proxy import Planned
from tests.support.store_servers import free_port


def doctor(*words: object) -> tuple[int, str, str]:
    return Command("doctor", *words).ended()


def test_a_store_that_is_well(in_store: InStore, tmp_path: Path) -> None:
    code, out, err = doctor(in_store.address, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["problem"] is None
    assert found["honours_conditions"] is True
    assert found["answers_ranges"] is True
    assert found["objects"] == 0
    assert abs(found["clock_skew"]) < 60.0
    assert 0.0 < found["read_seconds"] < 60.0
    assert in_store("keys") == [], "nothing is left behind"
    code, out, _ = doctor(in_store.address, "--report", tmp_path / "store.md")
    assert code == 0
    assert "this store can hold checkpoints" in out
    assert "put-bucket-lifecycle-configuration" in out
    assert "206" in (tmp_path / "store.md").read_text()


def test_ranges_that_are_ignored_are_a_problem(in_store: InStore) -> None:
    in_store.proxy.plan[:] = [Planned("GET", "whole*", "/probe-")]
    code, out, _ = doctor(in_store.address, "--json")
    assert code == 74
    assert (json.loads(out)["kind"], json.loads(out)["answers_ranges"]) == ("no-ranges", False)


def test_a_store_that_refuses(in_store: InStore) -> None:
    in_store.proxy.plan[:] = [Planned("*", "403*")]
    code, out, _ = doctor(in_store.address, "--json")
    assert (code, json.loads(out)["kind"]) == (74, "denied")


def test_a_store_that_removes_nothing(in_store: InStore) -> None:
    in_store.proxy.plan[:] = [Planned("POST", "403*", "/probe-")]
    code, out, _ = doctor(in_store.address, "--json")
    assert (code, json.loads(out)["kind"], json.loads(out)["honours_conditions"]) == (74, "denied", True)


def with_little_patience() -> None:
    store_check.check_store.__defaults__ = (2.0,)


@pytest.mark.wording
def test_a_store_that_is_not_there(in_store: InStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    code, out, _ = Command("doctor", in_store.address, before=with_little_patience).ended()
    assert code == 74
    assert "cannot be reached" in out


@pytest.mark.wording
def test_options_of_other_reports_are_refused() -> None:
    code, _, err = doctor("s3://bkt/a", "--gpus")
    assert code == 78
    assert "--gpus cannot be combined with the address of a store" in err
