"""A server that speaks as much of MLflow's REST interface as a run needs, and remembers what it was sent."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

API = "/api/2.0/mlflow/"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"
RUN = {
    "info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/1/r1/artifacts"}
}
ANSWERS: dict[str, Any] = {
    "experiments/create": {"experiment_id": "1"},
    "runs/create": {"run": RUN},
    "runs/get": {"run": RUN},
    "runs/search": {"runs": []},
    "runs/update": {"run_info": RUN["info"]},
}


class Recorder:
    """Listens on a free port of this machine while the block lasts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> dict[str, list[float]]:
        found = defaultdict(list)
        for metric in self._sent("metrics", "runs/log-metric"):
            found[metric["key"]].append(float(metric["value"]))
        return dict(found)

    def parameters(self) -> dict[str, str]:
        return {one["key"]: one["value"] for one in self._sent("params", "runs/log-parameter")}

    def statuses(self) -> list[str]:
        return [body["status"] for name, body in self.calls if name == "runs/update" and "status" in body]

    def _sent(self, batch: str, single: str) -> list[dict[str, Any]]:
        found = []
        for name, body in self.calls:
            found += body.get(batch, []) if name == "runs/log-batch" else [body] if name == single else []
        return found

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        path = unquote(urlsplit(path).path)
        if path.startswith(ARTIFACTS):
            self.files[path.removeprefix(ARTIFACTS)] = body
            return 200, {}
        name = path.removeprefix(API)
        self.calls.append((name, json.loads(body or b"{}")))
        if name == "experiments/get-by-name":
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
        return 200, ANSWERS.get(name, {})


def handler_of(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = recorder.answer(self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_PATCH = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
