"""A tracking server of MLflow's in a thread: its documented endpoints, as strict as the real one was found to be."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

API, FILES = "/api/2.0/mlflow/", "/api/2.0/mlflow-artifacts/artifacts/"
KEY = re.compile(r"[\w./ :-]{1,250}")


class Refusal(Exception):
    def __init__(self, code: int, error: str, message: str) -> None:
        self.code, self.answer = code, {"error_code": error, "message": message}


def invalid(message: str) -> Refusal:
    return Refusal(400, "INVALID_PARAMETER_VALUE", message)


class Store:
    """What was told to the server, and how it is to behave."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.broken: list[int] = []
        """Codes that the next requests are answered with."""
        self.hangs = threading.Event()
        self.artifacts = "mlflow-artifacts:/"
        self.garbage = False

    def get(self, what: str, query: dict[str, str]) -> dict[str, Any]:
        if what == "experiments/get-by-name":
            name = query["experiment_name"]
            if name not in self.experiments:
                raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Could not find experiment with name {name!r}")
            return {"experiment": {"experiment_id": self.experiments[name], "name": name}}
        if what == "runs/get":
            return {"run": {"info": self._run(query["run_id"])["info"]}}
        raise Refusal(404, "ENDPOINT_NOT_FOUND", what)

    def post(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        known = {
            "experiments/create": self._create_experiment,
            "runs/create": self._create_run,
            "runs/update": self._update,
            "runs/log-batch": self._log,
        }
        if what not in known:
            raise Refusal(404, "ENDPOINT_NOT_FOUND", what)
        return known[what](**body)

    def _create_experiment(self, name: str) -> dict[str, Any]:
        self.experiments[name] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[name]}

    def _create_run(
        self, experiment_id: str, run_name: str, start_time: int, tags: list[Any], user_id: str = ""
    ) -> dict[str, Any]:
        assert experiment_id in [*self.experiments.values(), "7"]
        run = uuid.uuid4().hex  # the client keeps what it knows of a run, by its id
        info = {
            "run_id": run,
            "user_id": user_id,
            "run_name": run_name,
            "experiment_id": experiment_id,
            "status": "RUNNING",
            "start_time": start_time,
            "artifact_uri": f"{self.artifacts}{experiment_id}/{run}/artifacts",
        }
        self.runs[run] = {"info": info, "metrics": [], "params": {}, "tags": {tag["key"]: tag["value"] for tag in tags}}
        return {"run": {"info": info}}

    def _update(
        self, run_id: str, status: str, end_time: int | None = None, run_uuid: str | None = None
    ) -> dict[str, Any]:
        if status not in ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"):
            raise invalid(f"Invalid value {status} for parameter 'status'")
        info = self._run(run_id)["info"]
        info.update({"status": status, "end_time": end_time})
        return {"run_info": info}

    def _log(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> dict[str, Any]:
        run = self._run(run_id)
        if len(metrics) > 1000 or len(params) > 100 or len(tags) > 100 or len(metrics) + len(params) + len(tags) > 1000:
            raise invalid("A batch logging request can contain at most 1000 metrics, 100 params and 100 tags")
        for metric in metrics:
            assert set(metric) == {"key", "value", "timestamp", "step"}
            assert type(metric["timestamp"]) is int
            assert type(metric["step"]) is int
            if not KEY.fullmatch(metric["key"]):
                raise invalid(f"Invalid metric name: {metric['key']!r}")
            run["metrics"].append({**metric, "value": float(metric["value"])})
        for param in params:
            if not KEY.fullmatch(param["key"]) or len(param["value"]) > 6000 or not isinstance(param["value"], str):
                raise invalid(f"Invalid parameter {param}")
            if run["params"].setdefault(param["key"], param["value"]) != param["value"]:
                raise invalid(
                    f"Changing param values is not allowed. Param with key={param['key']!r} was already logged"
                )
        run["tags"].update({tag["key"]: tag["value"] for tag in tags})
        return {}

    def _run(self, run_id: str) -> dict[str, Any]:
        if run_id not in self.runs:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Run with id={run_id} not found")
        return self.runs[run_id]


class Handler(BaseHTTPRequestHandler):
    store: Store

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {key: value[0] for key, value in parse_qs(split.query).items()}
        self._serve(lambda: self.store.get(split.path.removeprefix(API), query))

    def do_POST(self) -> None:
        body = self._body()
        self._serve(lambda: self.store.post(self.path.removeprefix(API), json.loads(body)))

    def do_PUT(self) -> None:
        body = self._body()
        self._serve(lambda: self.store.files.update({self.path.removeprefix(FILES): body}) or {})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _serve(self, answer: Any) -> None:
        self.store.requests.append((self.command, self.path, dict(self.headers)))
        if self.store.hangs.is_set():
            threading.Event().wait(2.0)
        try:
            if self.store.broken:
                raise Refusal(self.store.broken.pop(0), "INTERNAL_ERROR", "out of order")
            code, content = 200, answer()
        except Refusal as refusal:
            code, content = refusal.code, refusal.answer
        text = b"<html>a page" if self.store.garbage else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked has stopped waiting
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""


@contextmanager
def serving() -> Iterator[tuple[Store, str]]:
    """A server of its own, and its address."""
    store = Store()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
