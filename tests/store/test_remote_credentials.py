"""Credentials of a store reach no file, no message and no object: canaries in the environment, commands that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.conftest import InStore
from tests.store.test_remote import fit
from tests.support.commands import Command
from tests.support.indexed_task import write_shards
from tests.support.store_proxy import Planned
from tests.support.store_servers import free_port

CANARIES = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY1234",
    "AWS_SECRET_ACCESS_KEY": "canary/secret+canary/secret+canary012345",
    "AWS_SESSION_TOKEN": "canarytokencanarytokencanarytoken",
}
TINY = ("train", "classification_tiny", "--fp32", "train.num_workers=0", "store.patience=1")


def commands(address: str, nowhere: str) -> list[tuple[list[str], dict[str, str], list[Planned]]]:
    """Twelve commands that fail, each with the variables and the faults that make it fail."""
    dead = {"AWS_ENDPOINT_URL": nowhere}
    refused, broken = [Planned("*", "403*")], [Planned("*", "500*")]
    remote = f"checkpoint.remote={address}"
    wrong = "checkpoint.remote=s3://AKIACANARYCANARY1234:canarytokencanarytokencanarytoken@bkt/run"
    return [
        (["doctor", address], {}, refused),
        (["doctor", address, "--json"], {}, refused),
        (["doctor", address, "--json"], {}, [Planned("PUT", "404*")]),
        (["doctor", address], {"AWS_REGION": ""}, refused),
        (["--debug", "doctor", address + "?x"], {}, []),
        (["doctor", address.replace("bkt", "no-such-bucket"), "--json"], {}, []),
        ([*TINY, remote], {}, refused),
        ([*TINY, remote, "--json"], {}, refused),
        (["--debug", *TINY, remote], dead, []),
        ([*TINY, remote], {}, broken),
        ([*TINY, wrong], {}, []),
        (["--debug", *TINY, wrong, "--json"], {}, []),
    ]


@pytest.mark.slow
def test_no_canary_is_anywhere(in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    nowhere = f"http://127.0.0.1:{free_port()}"
    shown = []
    for words, variables, faults in commands(in_store.address, nowhere):
        in_store.proxy.plan[:] = faults
        code, out, err = Command(*words, environment=variables).ended()
        assert code in ((70,) if "--debug" in words else (74, 78)), (words, code, out, err)
        shown.append(out + err)
    in_store.proxy.plan.clear()
    fit(tmp_path / "good", in_store)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    texts += [in_store("text_or_nothing", key=key).encode() for key in in_store("keys")]
    texts += [text.encode() for text in shown]
    assert len(texts) > 30
    hits = [name for name, value in CANARIES.items() for text in texts if value.encode() in text]
    assert hits == []


@pytest.mark.full
def test_no_canary_is_anywhere_where_samples_are_read(
    in_store: InStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index, the cache, the messages of failing commands and the folder of a run that reads a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    local = write_shards(tmp_path / "set", 2, 40)
    for path in sorted(local.glob("*.tar")):
        in_store("put_path", key=path.name, path=str(path))
    data, dead = in_store.address, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    refused, broken = [Planned("*", "403*")], [Planned("*", "500*")]
    wrong = "s3://AKIACANARYCANARY1234:canarytokencanarytokencanarytoken@bkt/set"
    train = (*TINY, "data.name=shards", "data.val=0.2", f"data.path={data}")
    failing: list[tuple[tuple[str, ...], dict[str, str], list[Planned]]] = [
        (("data", "index", data), {}, refused),
        (("data", "index", data, "--json"), {}, [Planned("PUT", "403*")]),
        (("data", "index", wrong), {}, []),
        (("data", "index", data + "/nothing"), {}, []),
        ((*train, "--json"), {}, []),
        (train, {}, refused),
        (train, {}, broken),
        (("--debug", *train), dead, []),
        ((*train, f"data.path={wrong}"), {}, []),
        (("recipes", "explain", "classification_tiny", data), {}, []),
    ]
    texts = []
    for words, variables, faults in failing:
        in_store.proxy.plan[:] = faults
        code, out, err = Command(*words, environment=variables).ended()
        assert code in (65, 70, 74, 78), (words, code, out, err)
        texts.append((out + err).encode())
    in_store.proxy.plan.clear()
    code, out, err = Command("data", "index", data, "--json").ended()
    assert code == 0, err
    in_store.proxy.plan[:] = [Planned("GET", "500*", ".tar")]
    code, out, err = Command(*train, f"run.dir={tmp_path / 'late'}").ended()
    assert code == 74, err
    in_store.proxy.plan.clear()
    texts.append((out + err).encode())
    code, out, err = Command(*train, "train.steps=3", f"run.dir={tmp_path / 'good'}").ended()
    assert code == 0, err
    for words in (("verify", tmp_path / "good", "--data"), ("--debug", "evaluate", tmp_path / "good", "--json")):
        code, more, wrong = Command(*words, environment=dead).ended()
        assert code in (70, 74), (words, code, more, wrong)
        texts.append((more + wrong).encode())
    texts += [(out + err).encode(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    texts += [in_store("text_or_nothing", key=key).encode() for key in in_store("keys")]
    assert len(list((tmp_path / "cache" / "halfstep" / "chunks").iterdir())) > 1
    assert [name for name, value in CANARIES.items() for text in texts if value.encode() in text] == []
