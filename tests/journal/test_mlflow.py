"""MLflow's own client against a local server: what it receives, how failures are handled, and that no run waits."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.errors import MissingExtra, WrongUse
from halfstep.journal import mlflow
from halfstep.journal.events import Journal, Listener
from halfstep.journal.listeners import create_tracker_listeners
from halfstep.journal.trackers import MLFLOW_FILE, suggest_tracker_commands
from halfstep.recipe.strict_yaml import iterate_dotted_keys
from tests.journal.told import speed, start, step, whole_run
from tests.support.mlflow_server import Store, serving
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE

PICTURE = {"event": "saved", "time": 1.0, "kind": "picture", "file": "pictures/epoch-0001.png"}
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x02\0\0\0\x01"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_TOKEN", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TIMEOUT": 1, "MAX_RETRIES": 3, "BACKOFF_FACTOR": 0, "BACKOFF_JITTER": 0}.items():
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", str(value))
    monkeypatch.setattr(mlflow, "CLOSING", 60.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with serving() as (store, uri):
        monkeypatch.setenv(mlflow.TRACKING_URI, uri)
        yield store


class EventList:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "note":
            self.notes.append(event["text"])

    def close(self) -> None: ...


def told(folder: Path, events: list[dict[str, Any]]) -> list[str]:
    """Tell a journal with MLflow among its listeners; what was said of it."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text("task: segmentation\n")
    heard = EventList()
    every_listener: list[Listener] = [heard, *create_tracker_listeners("mlflow", folder)]
    journal = Journal(every_listener)
    for event in events:
        journal.emit(**{name: value for name, value in event.items() if name != "time"})
    journal.close()
    return heard.notes


def the_run(store: Store) -> dict[str, Any]:
    (run,) = store.runs.values()
    return run


def test_mlflow_has_what_the_journal_told(tmp_path: Path, server: Store) -> None:
    assert told(tmp_path, whole_run("fp16")) == []
    run = the_run(server)
    losses = [(metric["step"], metric["value"]) for metric in run["metrics"] if metric["key"] == "train/loss"]
    assert [attempt for attempt, _ in losses] == [10, 20, 30, 40]
    assert losses[0][1] == pytest.approx(0.6)
    iou = [(metric["step"], metric["value"]) for metric in run["metrics"] if metric["key"] == "val/iou"]
    assert iou == [(20, 0.6234), (40, 0.6234)]
    assert run["info"]["status"] == "FINISHED"
    assert run["info"]["end_time"] >= run["info"]["start_time"] > 1.6e12
    assert run["params"] == {key: str(value) for key, value in iterate_dotted_keys(start()["recipe"])}
    assert run["params"]
    assert run["tags"]["halfstep.precision"] == "fp16"
    assert server.experiments == {"halfstep": "1"}
    (path,) = server.files
    assert path.endswith("/artifacts/recipe.yaml")
    assert server.files[path] == b"task: segmentation\n"


def test_pictures_go_where_the_server_passes_files_on_and_nowhere_else(tmp_path: Path, server: Store) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "epoch-0001.png").write_bytes(PNG)
    events = [start(), step(1), PICTURE]
    assert told(tmp_path, events) == []
    assert [content for path, content in server.files.items() if path.endswith("pictures/epoch-0001.png")] == [PNG]
    server.files.clear()
    for elsewhere in ("s3://bucket/", "/srv/art/", "mlflow-artifacts://other:80/"):
        server.artifacts = elsewhere
        assert told(tmp_path, events) == []
    assert server.files == {}


def test_numbers_that_are_not_finite_arrive_as_such(tmp_path: Path, server: Store) -> None:
    told(tmp_path, [start(), step(1, "loss_not_finite", loss=math.nan, grad_norm=-math.inf), speed()])
    found = {metric["key"]: metric["value"] for metric in the_run(server)["metrics"]}
    assert math.isnan(found["train/loss"])
    assert found["train/grad_norm"] == -math.inf


def test_a_run_that_is_taken_up_again_goes_on_in_the_same_run(tmp_path: Path, server: Store) -> None:
    again = start(resumed={"attempt": 1, "checkpoint": "step-00000001.0001", "changed": []})
    told(tmp_path, [start(), step(1), speed()])
    again["recipe"] = {**again["recipe"], "about": "parameters cannot be changed there"}
    assert told(tmp_path, [again, step(2), speed()]) == []
    assert [metric["step"] for metric in the_run(server)["metrics"] if metric["key"] == "train/loss"] == [1, 2]
    server.runs.clear()  # as if somebody had deleted it
    assert told(tmp_path, [again, step(2), speed()]) == []
    assert len(server.runs) == 1


def test_names_keys_and_numbers_of_the_environment_are_used(
    tmp_path: Path, server: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = mlflow.read_tracking_uri().removeprefix("http://")
    monkeypatch.setenv(mlflow.TRACKING_URI, f"http://me:s%20cret@{address}/")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    told(tmp_path, [start()])
    assert list(server.experiments) == ["mine"]
    assert {headers["Authorization"] for _, _, headers in server.requests} == {"Basic bWU6cyBjcmV0"}
    assert "cret" not in (tmp_path / MLFLOW_FILE).read_text()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    monkeypatch.setenv(mlflow.TRACKING_URI, f"http://{address}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    told(tmp_path / "other", [start()])
    assert server.requests[-1][2]["Authorization"] == "Bearer abc"
    assert [run["info"]["experiment_id"] for run in server.runs.values()] == ["1", "7"]


def test_a_server_that_stumbles_is_asked_again(tmp_path: Path, server: Store) -> None:
    server.broken = [503, 429]
    assert told(tmp_path, [start(), step(1), speed()]) == []
    assert the_run(server)["metrics"]


@pytest.mark.parametrize("illness", ["broken", "refuses", "hangs", "garbage", "gone"])
def test_a_server_that_is_ill_is_told_of_once_and_harms_nothing(
    tmp_path: Path, server: Store, illness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if illness == "broken":
        server.broken = [500] * 100
    elif illness == "refuses":
        server.broken = [403] * 100
    elif illness == "hangs":
        server.hangs.set()
    elif illness == "garbage":
        server.garbage = True
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setenv(mlflow.TRACKING_URI, f"http://127.0.0.1:{free.getsockname()[1]}")
    began = time.monotonic()
    (note,) = told(tmp_path, whole_run("fp32"))
    assert time.monotonic() - began < 30.0
    assert note.startswith("MLflow stopped: http://127.0.0.1:")
    assert "\n" not in note
    assert not (tmp_path / MLFLOW_FILE).exists()


@pytest.mark.parametrize("illness", [None, 403, "garbage", "gone"])
def test_a_password_in_the_address_is_sent_and_never_shown(
    tmp_path: Path,
    server: Store,
    illness: int | str | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = mlflow.read_tracking_uri().removeprefix("http://")
    address = "127.0.0.1:9" if illness == "gone" else address
    monkeypatch.setenv(mlflow.TRACKING_URI, f"http://me:s%20cret@{address}")
    server.garbage = illness == "garbage"
    server.broken = [illness] * 100 if isinstance(illness, int) else []
    notes = told(tmp_path, whole_run("fp32"))
    assert bool(notes) == bool(illness)
    screen = capfd.readouterr()
    written = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert "cret" not in " ".join([*notes, *written, caplog.text, screen.out, screen.err])


FRESH = """
import os, threading
os.environ.pop("MLFLOW_DISABLE_TELEMETRY", None)
import halfstep.journal.mlflow
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None, "usage reports are on"
assert threading.active_count() == 1, threading.enumerate()
"""


def test_the_client_reports_no_usage_and_starts_no_thread() -> None:
    # A new process without the variables by which the client recognizes tests.
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME")}
    subprocess.run([sys.executable, "-c", FRESH], env=kept, check=True, timeout=120)


@pytest.mark.wording
def test_without_the_package_the_line_to_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "halfstep.journal.mlflow")
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingExtra, match=r"pip install 'halfstep\[mlflow\]'"):
        create_tracker_listeners("mlflow", tmp_path)


def test_telling_never_waits_for_the_server(tmp_path: Path, server: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "CLOSING", 0.2)
    monkeypatch.setattr(mlflow, "PAUSE", -1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    server.hangs.set()
    (tmp_path / "recipe.yaml").write_text("task: segmentation\n")
    (listener,) = create_tracker_listeners("mlflow", tmp_path)
    began = time.monotonic()
    listener.on_event(start())
    for number in range(1, 300):
        listener.on_event(step(number))
        listener.on_event(speed())
    # Below one wait of five seconds, on a machine that others use too.
    assert time.monotonic() - began < 3.5
    with pytest.raises(RuntimeError, match="not accepted within"):
        listener.close()
    assert time.monotonic() - began < 4.5


def test_messages_that_wait_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "MOST", 3)
    slow = mlflow.SendQueue("slow")
    for _ in range(3):
        slow.add(lambda: time.sleep(0.5))
    slow._waiting.put(lambda: None)  # the one that it is at has left
    with pytest.raises(RuntimeError, match="3 messages wait"):
        slow.add(lambda: None)


@pytest.mark.wording
@pytest.mark.parametrize("uri", ["", "file:///tmp/mlruns", "sqlite:///m.db", "databricks", "http://", "ftp://host"])
def test_an_address_that_is_none_is_refused_before_the_run_begins(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mlflow.TRACKING_URI, uri)
    with pytest.raises(WrongUse, match="MLFLOW_TRACKING_URI") as refused:
        mlflow.MLflow(tmp_path)
    assert "http://127.0.0.1:5000" in refused.value.do


def test_a_whole_run_is_tracked_and_says_where_to_look(tmp_path: Path, server: Store) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    settings = {"run.dir": str(tmp_path / "run"), "run.tracker": "mlflow"}
    run = halfstep.fit(tmp_path / "tiny.yaml", task=Tiny, settings=settings, quiet=True)
    kept = the_run(server)
    assert kept["info"]["status"] == "FINISHED"
    assert [m["value"] for m in kept["metrics"] if m["key"] == "val/loss"][-1] == run.metrics["loss"]
    (line,) = suggest_tracker_commands({"recipe": {"run": {"tracker": "mlflow"}}, "dir": str(run.dir)})
    assert f"/#/experiments/1/runs/{kept['info']['run_id']}" in line
    assert line in (run.dir / "train.log").read_text()


def test_the_server_of_these_tests_answers_as_the_real_one_did(server: Store) -> None:
    """`mlflow_shapes.json` has what MLflow 3.17.2 was asked, and what it said."""
    recorded = json.loads((Path(__file__).parent / "mlflow_shapes.json").read_text())["calls"]
    server.experiments["halfstep"] = "1"
    ids: dict[str, str] = {}
    for name, call in recorded.items():
        if call["method"] == "PUT":
            continue
        code, answer = asked(call, ids)
        assert code == call["code"], name
        assert answer.get("error_code") == call["answer"].get("error_code"), name
        assert keys(answer) <= keys(call["answer"]), name
        remember(ids, call["answer"], answer)


def asked(call: dict[str, Any], ids: dict[str, str]) -> tuple[int, dict[str, Any]]:
    many = [{"key": f"p{number}", "value": "1"} for number in range(101)]
    sent = {"run_id": ids["run"], "params": many} if isinstance(call["sent"], str) else call["sent"]
    query = {"experiment_name": "nobody" if call["code"] == 404 else "halfstep"}
    if call["path"].endswith("runs/get"):
        query = {"run_id": "0" * 32 if call["code"] == 404 else ids["run"]}
    own = {"run_id": ids.get("run"), "experiment_id": ids.get("experiment")}
    body = None if sent is None else json.dumps({key: own.get(key) or value for key, value in sent.items()}).encode()
    address = f"{os.environ[mlflow.TRACKING_URI]}/api/2.0/{call['path']}"
    request = urllib.request.Request(address if body else f"{address}?{urllib.parse.urlencode(query)}", body)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def remember(ids: dict[str, str], real: dict[str, Any], ours: dict[str, Any]) -> None:
    """The ids that later calls name."""
    if set(real) == {"experiment_id"}:
        ids["experiment"] = ours["experiment_id"]
    if "run" in real:
        ids["run"] = ours["run"]["info"]["run_id"]


def keys(answer: dict[str, Any], prefix: str = "") -> set[str]:
    found = {prefix + key for key in answer}
    for key, value in answer.items():
        if isinstance(value, dict):
            found |= keys(value, f"{prefix}{key}.")
    return found
