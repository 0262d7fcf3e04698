"""Send the journal to an MLflow server, from a separate thread, so that no step waits for it."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from halfstep.errors import MissingExtra, WrongUse
from halfstep.files import read_json, write_json
from halfstep.journal.events import END, EPOCH, START, Event
from halfstep.journal.trackers import MLFLOW_FILE, ScalarConverter, TrackerScalars
from halfstep.recipe.strict_yaml import iterate_dotted_keys

SECONDS, ATTEMPTS = 10, 4
"""The timeout of one request, and the further attempts where the server does not answer or is out of order."""
for _name, _value in {
    # MLflow reads these at import or at each request. Its own defaults: 120 s, 7 attempts, 2 s, usage reports are sent.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(ATTEMPTS),
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}.items():
    os.environ.setdefault(_name, _value)
# The line that MLflow prints at the end of a run contains the password of the address.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

try:
    # The names, not the module: a folder `mlflow` in the working directory can be imported too, but is empty.
    from mlflow.entities import Metric, Param, RunInfo, RunTag
    from mlflow.exceptions import RestException
    from mlflow.tracking import MlflowClient
except ImportError as missing:
    raise MissingExtra(
        "tracker mlflow, which is not installed",
        allowed="none, and tensorboard, wandb or mlflow, if installed",
        do="pip install 'halfstep[mlflow]', or run.tracker=tensorboard",
    ) from missing

TRACKING_URI = "MLFLOW_TRACKING_URI"
EXPERIMENT = "halfstep"
MOST = 1000
"""The maximum number of pending messages; a sender that far behind does not catch up."""
MOST_METRICS, LONGEST = 500, 6000
"""The maximum number of metrics per message, and of characters of a parameter; MLflow's limits are 1000 and 6000."""
PAUSE, CLOSING = 5.0, 30.0
"""The seconds between two messages with metrics, and those that the end of a run waits for the last one."""
PROXIED = "mlflow-artifacts:"
"""The prefix with which a server names artifacts that it proxies."""
_STATUS = {"finished": "FINISHED", "early_stopping": "FINISHED", "failed": "FAILED", "gave_up": "FAILED"}


class SendQueue:
    """A queue that is processed in order by one thread. The first failure ends it, and is raised on the next call."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], None]) -> None:
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
                self._failure = RuntimeError(f"the last messages were not accepted within {seconds:.0f} s")
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


class MLflow:
    """A listener that writes a run to an MLflow server; steps repeated after an interruption appear twice."""

    def __init__(self, folder: Path) -> None:
        address = read_tracking_uri()
        self._folder, self._client = folder, MlflowClient(tracking_uri=address)
        self._uri = remove_credentials(address)
        self._scalars = ScalarConverter()
        self._queue = SendQueue("mlflow")
        self._metrics: list[Metric] = []
        self._sent = time.monotonic()
        self._run: RunInfo = None

    def on_event(self, event: Event) -> None:
        """Queue what the server should get of an event."""
        scalars, picture = self._scalars.on_event(event), self._scalars.picture(event)
        kind = event["event"]
        if kind == START:
            self._add(partial(self._begin, event))
        elif scalars is not None:
            self._metrics += _build_mlflow_metrics(scalars)
            if kind == EPOCH or len(self._metrics) >= MOST_METRICS or time.monotonic() > self._sent + PAUSE:
                self._send_metrics()
        elif picture is not None:
            self._add(partial(self._send_file, picture.file))
        elif kind == END:
            self._send_metrics()
            status = _STATUS.get(event["reason"], "KILLED")
            self._add(lambda: self._client.set_terminated(self._run.run_id, status))

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
            self._add(lambda: self._client.log_batch(self._run.run_id, metrics=metrics, synchronous=True))

    def _add(self, work: Callable[[], None]) -> None:
        self._queue.add(partial(self._call_plainly, work))

    # The rest runs in the thread that sends.

    def _call_plainly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            raise RuntimeError(f"{self._uri} {_describe_failure(error)}") from None

    def _begin(self, start: Event) -> None:
        self._run = self._find_resumed_run(start) or self._create_run(start)
        page = f"{self._uri}/#/experiments/{self._run.experiment_id}/runs/{self._run.run_id}"
        write_json(self._folder / MLFLOW_FILE, {"server": self._uri, "run": self._run.run_id, "page": page})
        self._send_file("recipe.yaml")

    def _find_resumed_run(self, start: Event) -> RunInfo | None:
        """Return the run of an earlier launch if the server still has it; its parameters cannot be changed."""
        # The run id is only valid on the server that assigned it.
        saved = read_json(self._folder / MLFLOW_FILE)
        if not start.get("resumed") or not isinstance(saved, dict) or saved.get("server") != self._uri:
            return None
        run = str(saved.get("run"))
        try:
            self._client.update_run(run, status="RUNNING")
            self._client.log_batch(run, tags=[RunTag("halfstep.resumed", str(start["resumed"]))], synchronous=True)
            return self._client.get_run(run).info
        except RestException:
            return None

    def _create_run(self, start: Event) -> RunInfo:
        tags = {
            "mlflow.source.name": start["command"],
            "mlflow.source.type": "LOCAL",
            "halfstep.dir": start["dir"],
            "halfstep.precision": start["precision"]["chosen"],
            "halfstep.version": start["versions"]["halfstep"],
        }
        cut = {key: str(value)[:LONGEST] for key, value in tags.items()}
        run = self._client.create_run(self._experiment(), tags=cut, run_name=start["label"]).info
        parameters = [Param(key, str(value)[:LONGEST]) for key, value in iterate_dotted_keys(start["recipe"])]
        self._client.log_batch(run.run_id, params=parameters, synchronous=True)
        return run

    def _experiment(self) -> str:
        if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return number
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _send_file(self, name: str) -> None:
        """Upload a file of the run's folder if this server proxies artifacts."""
        # Other stores, such as S3, need credentials that this process may not have; another server gets none of ours.
        place = urlsplit(self._run.artifact_uri)
        if self._run.artifact_uri.startswith(PROXIED) and place.netloc in ("", urlsplit(self._uri).netloc):
            inside = str(Path(name).parent)
            self._client.log_artifact(self._run.run_id, str(self._folder / name), None if inside == "." else inside)


def read_tracking_uri() -> str:
    """Return the server in MLFLOW_TRACKING_URI; raise WrongUse if there is none."""
    uri = os.environ.get(TRACKING_URI, "")
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        given = f"{TRACKING_URI} is {uri[:80]!r}" if uri else f"{TRACKING_URI} is not set"
        raise WrongUse(
            f"tracker mlflow, and {given}",
            allowed="the address of a tracking server, http://... or https://...",
            do=f"mlflow server --port 5000, and {TRACKING_URI}=http://127.0.0.1:5000 before the command; "
            "or run.tracker=tensorboard",
        )
    return uri.rstrip("/")


def remove_credentials(text: str) -> str:
    """Return an address, or a text with addresses, without the names and passwords in them."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def _describe_failure(error: BaseException) -> str:
    """Return the reason in one line: the server's message, or the innermost error, such as a refused connection."""
    while not isinstance(error, RestException) and (inner := error.__cause__ or error.__context__):
        error = inner
    said = "refuses" if isinstance(error, RestException) else "cannot be used"
    return f"{said}: {remove_credentials(' '.join(str(error).split()))[:200] or type(error).__name__}"


def _build_mlflow_metrics(scalars: TrackerScalars) -> list[Metric]:
    now = round(time.time() * 1000)
    return [Metric(key, value, now, scalars.attempt) for key, value in scalars.values.items()]
