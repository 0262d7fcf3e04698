"""Send the journal to MLflow through its REST API; the mlflow package is not needed."""

from __future__ import annotations

import base64
import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit, urlunsplit

from halfstep.errors import WrongUse
from halfstep.files import read_json, write_json
from halfstep.journal.events import END, EPOCH, START, Event
from halfstep.journal.trackers import MLFLOW_FILE, EventScalars, Picture, Scalars
from halfstep.recipe.strict_yaml import flat

# -- sending ----------------------------------------------------------------------------------------------------------
# Send over the network in a separate thread, so that no step waits for it.


Work = Callable[[], None]
MOST = 1000
"""The maximum number of pending messages; a sender that far behind does not catch up."""


class SendQueue:
    """A queue that is processed in order by one thread. The first failure ends it, and is raised on the next call."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.Queue[Work | None] = queue.Queue(MOST)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Work) -> None:
        """Queue some work; raise an earlier failure, or RuntimeError if too much is pending."""
        self._raise_failure()
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            self._failure = RuntimeError(f"{MOST} messages wait to be sent, so no more are")
            self._raise_failure()

    def finish(self, seconds: float) -> None:
        """Wait at most so many seconds for the pending work; raise RuntimeError if it is not done by then."""
        if self._failure is None:
            try:
                self._waiting.put(None, timeout=seconds)
                self._thread.join(seconds)
            except queue.Full:
                pass
            if self._thread.is_alive() and self._failure is None:
                self._failure = RuntimeError(f"the last messages were not taken within {seconds:.0f} s")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while self._failure is None and (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as failure:
                # Raised later by the training thread; nothing above this thread would handle it.
                self._failure = failure


# -- mlflow rest ------------------------------------------------------------------------------------------------------
# Call MLflow's REST API, version 2.0, with the standard library: the mlflow package would add 90 others.


TRACKING_URI = "MLFLOW_TRACKING_URI"
SECONDS = 10.0
"""The timeout of one request."""
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""The pauses before each further attempt; after the last one the request fails."""
TOO_MANY, LATER = 429, 500
"""The status codes after which a request is repeated: 429, and all from 500 on."""
MOST_BYTES = 10_000_000
"""The maximum number of bytes that are read of a response."""


class Refused(RuntimeError):
    """A response that would be the same on every attempt."""

    def __init__(self, text: str, status: int) -> None:
        self.status = status
        super().__init__(text)


class RestClient:
    """A tracking server by its address; a name and a password in the address are used, but never shown."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise no_server(uri)
        host = parts.netloc.rpartition("@")[2]
        self.uri = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self.host = host
        self._authorization = _authorization(parts.username, parts.password)

    def get(self, what: str, **query: str) -> dict[str, Any]:
        """Send a GET request and return the JSON of the response."""
        return self._json(urllib.request.Request(f"{self._api(what)}?{urlencode(query)}"))

    def post(self, what: str, **fields: Any) -> dict[str, Any]:
        """Send a POST request with JSON fields and return the JSON of the response."""
        body = json.dumps(fields, allow_nan=False).encode()
        return self._json(urllib.request.Request(self._api(what), body, {"Content-Type": "application/json"}))

    def put_artifact(self, path: str, content: bytes) -> None:
        """Upload a file through the server; only for servers that proxy artifacts."""
        address = f"{self.uri}/api/2.0/mlflow-artifacts/artifacts/{quote(path)}"
        kind = {"Content-Type": "application/octet-stream"}
        self._answer(urllib.request.Request(address, content, kind, method="PUT"))

    def _api(self, what: str) -> str:
        return f"{self.uri}/api/2.0/mlflow/{what}"

    def _json(self, request: urllib.request.Request) -> dict[str, Any]:
        answer = self._answer(request)
        try:
            found = json.loads(answer or b"{}")
        except ValueError:
            raise Refused(f"{self.uri} answers, but not as MLflow does", 0) from None
        return found if isinstance(found, dict) else {}

    def _answer(self, request: urllib.request.Request) -> bytes:
        if self._authorization:
            # Unredirected: another server must not receive the credentials.
            request.add_unredirected_header("Authorization", self._authorization)
        for pause in (*PAUSES, None):
            try:
                with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                    content: bytes = answer.read(MOST_BYTES)
                    return content
            except urllib.error.HTTPError as error:
                with error:
                    if pause is None or not (error.code == TOO_MANY or error.code >= LATER):
                        raise Refused(f"{self.uri} refuses: {_message(error)}", error.code) from None
            except (OSError, http.client.HTTPException) as error:
                if pause is None:
                    why = getattr(error, "reason", None) or error
                    raise RuntimeError(f"{self.uri} cannot be reached: {why}") from None
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def client_from_environment(environment: Mapping[str, str] = os.environ) -> RestClient:
    """Return the server in MLFLOW_TRACKING_URI, as MLflow's own tools do; raise WrongUse if it is not set."""
    return RestClient(environment.get(TRACKING_URI, ""))


def no_server(uri: str) -> WrongUse:
    """Return the error for a missing or unusable server address."""
    given = f"{TRACKING_URI} is {uri[:80]!r}" if uri else f"{TRACKING_URI} is not set"
    return WrongUse(
        f"tracker mlflow, and {given}",
        allowed="the address of a tracking server, http://... or https://...",
        do=f"mlflow server --port 5000, and {TRACKING_URI}=http://127.0.0.1:5000 before the command; "
        "or run.tracker=tensorboard",
    )


def _authorization(name: str | None, password: str | None) -> str:
    """Return the Authorization header: a name and a password, or a token, as MLflow's own client reads them."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    name = unquote(name) if name else os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(password) if password else os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if name and password:
        return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"
    return f"Bearer {token}" if token else ""


def _message(error: urllib.error.HTTPError) -> str:
    """Return the server's message, on one line."""
    try:
        message = json.loads(error.read(MOST_BYTES)).get("message")
    except (ValueError, OSError, AttributeError):
        message = None
    return f"{error.code} {' '.join(str(message or error.reason).split())[:200]}"


# -- mlflow -----------------------------------------------------------------------------------------------------------


EXPERIMENT = "halfstep"
MOST_METRICS, MOST_PARAMETERS, LONGEST = 500, 100, 6000
"""The maximum numbers per request, and characters of a parameter; MLflow's own limits are 1000, 100 and 6000."""
PAUSE, CLOSING = 5.0, 30.0
"""The seconds between two messages with metrics, and those that the end of a run waits for the last one."""
NOT_FOUND = 404
PROXIED = "mlflow-artifacts:"
"""The prefix with which a server names artifacts that it proxies."""
_STATUS = {"finished": "FINISHED", "early_stopping": "FINISHED", "failed": "FAILED", "gave_up": "FAILED"}


class MLflow:
    """A listener that writes a run to an MLflow server; steps repeated after an interruption appear twice."""

    def __init__(self, folder: Path, rest: RestClient | None = None) -> None:
        self._folder, self._rest = folder, rest or client_from_environment()
        self._scalars = EventScalars()
        self._queue = SendQueue("mlflow")
        self._metrics: list[dict[str, Any]] = []
        self._sent = time.monotonic()
        self._run, self._place = "", ""

    def on_event(self, event: Event) -> None:
        """Queue what the server should get of an event."""
        scalars, picture = self._scalars.on_event(event), self._scalars.picture(event)
        kind = event["event"]
        if kind == START:
            self._queue.add(partial(self._begin, event))
        elif scalars is not None:
            self._metrics += _metrics(scalars)
            if kind == EPOCH or len(self._metrics) >= MOST_METRICS or time.monotonic() > self._sent + PAUSE:
                self._send_metrics()
        elif picture is not None:
            self._queue.add(partial(self._send_picture, picture))
        elif kind == END:
            self._send_metrics()
            self._queue.add(partial(self._end, _STATUS.get(event["reason"], "KILLED")))

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without sending it."""
        self._scalars.on_event(event)

    def close(self) -> None:
        """Send the remaining metrics and wait for them, within a limit."""
        self._send_metrics()
        self._queue.finish(CLOSING)

    def _send_metrics(self) -> None:
        # The list is replaced, not cleared: the sending thread still holds the old one.
        metrics, self._metrics, self._sent = self._metrics, [], time.monotonic()
        if metrics:
            self._queue.add(partial(self._log, metrics=metrics))

    # -- in the thread that sends -----------------------------------------------------------------------------------

    def _begin(self, start: Event) -> None:
        try:
            info = (self._resumed_run(start) or self._new_run(start))["info"]
            self._run, self._place = str(info["run_id"]), str(info.get("artifact_uri") or "")
            page = f"{self._rest.uri}/#/experiments/{info['experiment_id']}/runs/{self._run}"
        except (LookupError, TypeError):
            raise RuntimeError(f"{self._rest.uri} answers, but not as MLflow does") from None
        write_json(self._folder / MLFLOW_FILE, {"server": self._rest.uri, "run": self._run, "page": page})
        self._send_file("recipe.yaml", (self._folder / "recipe.yaml").read_bytes())

    def _resumed_run(self, start: Event) -> Mapping[str, Any] | None:
        """Return the run of an earlier launch if the server still has it; its parameters cannot be changed."""
        # The run id is only valid on the server that assigned it.
        saved = read_json(self._folder / MLFLOW_FILE)
        if not start.get("resumed") or not isinstance(saved, dict) or saved.get("server") != self._rest.uri:
            return None
        run = str(saved.get("run"))
        try:
            self._rest.post("runs/update", run_id=run, status="RUNNING")
            self._rest.post("runs/log-batch", run_id=run, tags=[_tag("halfstep.resumed", start["resumed"])])
            found: Mapping[str, Any] = self._rest.get("runs/get", run_id=run)["run"]
            return found
        except Refused:
            return None

    def _new_run(self, start: Event) -> Mapping[str, Any]:
        created: Mapping[str, Any] = self._rest.post(
            "runs/create",
            experiment_id=self._experiment(),
            run_name=start["label"],
            start_time=_now(),
            tags=list(_tags(start)),
        )["run"]
        parameters = [_tag(key, value) for key, value in flat(start["recipe"])]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            some = parameters[first : first + MOST_PARAMETERS]
            self._rest.post("runs/log-batch", run_id=created["info"]["run_id"], params=some)
        return created

    def _experiment(self) -> str:
        number = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if number:
            return number
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        try:
            return str(self._rest.get("experiments/get-by-name", experiment_name=name)["experiment"]["experiment_id"])
        except Refused as refused:
            if refused.status != NOT_FOUND:
                raise
        return str(self._rest.post("experiments/create", name=name)["experiment_id"])

    def _log(self, **what: Any) -> None:
        self._rest.post("runs/log-batch", run_id=self._run, **what)

    def _send_picture(self, picture: Picture) -> None:
        self._send_file(picture.file, (self._folder / picture.file).read_bytes())

    def _send_file(self, name: str, content: bytes) -> None:
        """Upload a file if the server proxies artifacts."""
        # Other stores, such as S3, need credentials that this process may not have.
        root = self._place.removeprefix(PROXIED)
        if self._place.startswith(PROXIED):
            host, _, path = root.removeprefix("//").partition("/") if root.startswith("//") else ("", "", root)
            if host in ("", self._rest.host):
                self._rest.put_artifact(f"{path.strip('/')}/{name}", content)

    def _end(self, status: str) -> None:
        self._rest.post("runs/update", run_id=self._run, status=status, end_time=_now())


def _metrics(scalars: Scalars) -> Iterator[dict[str, Any]]:
    now = _now()
    for key, value in scalars.values.items():
        # JSON cannot represent non-finite numbers; MLflow reads these words, as protocol buffers define them.
        number = value if abs(value) < float("inf") else {"nan": "NaN", "inf": "Infinity"}.get(str(value), "-Infinity")
        yield {"key": key, "value": number, "timestamp": now, "step": scalars.attempt}


def _tags(start: Event) -> Iterator[dict[str, str]]:
    told = {
        "mlflow.source.name": start["command"],
        "mlflow.source.type": "LOCAL",
        "halfstep.dir": start["dir"],
        "halfstep.precision": start["precision"]["chosen"],
        "halfstep.version": start["versions"]["halfstep"],
    }
    return (_tag(key, value) for key, value in told.items())


def _tag(key: str, value: Any) -> dict[str, str]:
    return {"key": key, "value": str(value)[:LONGEST]}


def _now() -> int:
    """Return the time in milliseconds, as MLflow expects it."""
    return round(time.time() * 1000)
