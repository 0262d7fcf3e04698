"""The numbers of a run as Prometheus reads them: every line in its text format, and no file half written."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import BadRecipe
from halfstep.journal import prometheus
from halfstep.journal.prometheus import METRICS, Prometheus
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.status import Launch, RankStatus, name_status_file
from tests.journal.told import end, epoch, resumed, saved, speed, start, step

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
PAIR = rf'({LABEL})="((?:[^"\\\n]|\\["\\n])*)"'
LINE = re.compile(rf"({NAME})\{{({PAIR}(?:,{PAIR})*)?\}} (NaN|[+-]Inf|[+-]?[0-9.eE+-]+)")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Read the exposition format, version 0.0.4, as strictly as it is written down; no timestamps, as node_exporter."""
    try:
        from prometheus_client.parser import text_string_to_metric_families as families
    except ImportError:
        families = None
    assert text.endswith("\n")
    found: Samples = {}
    about: dict[str, set[str]] = {}
    now = ""
    for line in text.splitlines():
        if line.startswith("#"):
            kind, name, rest = re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line).groups()  # type: ignore[union-attr]
            assert kind not in about.setdefault(name, set()), "once a metric"
            assert kind == "HELP" or rest == "gauge"
            about[name].add(kind)
            now = name
            continue
        match = LINE.fullmatch(line)
        assert match, line
        assert match[1] == now, "the lines of a metric stand together, after its type"
        assert about[now] == {"HELP", "TYPE"}
        pairs = frozenset((key, re.sub(r"\\(.)", _unescaped, value)) for key, value in re.findall(PAIR, match[2] or ""))
        assert (now, pairs) not in found, "each line once"
        found[now, pairs] = float(line.rpartition(" ")[2])
    if families is not None:
        theirs = {(s.name, frozenset(s.labels.items())): s.value for f in families(text) for s in f.samples}
        assert theirs.keys() == found.keys()
    return found


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def values(path: Path) -> dict[str, Any]:
    """Each metric without the labels that all have: a number, or numbers by their one other label."""
    found: dict[str, Any] = {}
    for (name, pairs), value in parsed(path.read_text()).items():
        own = {key: value for key, value in pairs if key not in ("run", "job")}
        if len(own) == 1:
            found.setdefault(name, {})[next(iter(own.values()))] = value
        else:
            found[name] = value
    return found


def told(path: Path, *events: Any) -> dict[str, Any]:
    listener = Prometheus(path)
    for event in events:
        listener.on_event(event)
    listener.close()
    return values(path)


def test_what_a_run_is_watched_by(tmp_path: Path) -> None:
    path = tmp_path / "other" / METRICS
    steps = [step(1), step(2, "gradient_overflow"), step(3, loss=float("nan"), loss_scale=2.0**15)]
    before = time.time()
    found = told(path, start(job="77"), *steps, saved(3), epoch(1), speed())
    assert found["halfstep_running"] == found["halfstep_info"] == 1
    assert (found["halfstep_step"], found["halfstep_attempts"], found["halfstep_planned_attempts"]) == (3, 3, 40)
    assert math.isnan(found["halfstep_loss"])
    assert found["halfstep_loss_scale"] == 2.0**15
    assert found["halfstep_skipped_steps"] == {"gradient_overflow": 1}
    assert found["halfstep_metric"] == {"loss": 0.2567, "iou": 0.6234}
    assert found["halfstep_samples_per_second"] == 123.4
    assert found["halfstep_memory_bytes"] == {"host": 3 * 2**30}, "what is not known is not there"
    assert found["halfstep_last_save_attempt"] == 3
    assert before <= found["halfstep_last_save_timestamp_seconds"] <= time.time()
    assert 'job="77"' in path.read_text()
    assert os.listdir(path.parent) == [METRICS], "no draft is left"


def test_the_end_is_told_and_a_run_that_goes_on_has_its_checkpoint(tmp_path: Path) -> None:
    assert told(tmp_path / METRICS, start(), step(1), end())["halfstep_running"] == 0
    before = resumed(15)
    folder = tmp_path / "checkpoints" / before["checkpoint"]
    folder.mkdir(parents=True)
    os.utime(folder, (1e9, 1e9))
    again = Prometheus(tmp_path / METRICS)
    for event in (start(), step(14, "loss_not_finite"), saved(15)):
        again.restore_event(event)
    again.on_event(start(dir=str(tmp_path), resumed=before))
    again.on_event(speed())
    found = values(tmp_path / METRICS)
    assert (found["halfstep_last_save_attempt"], found["halfstep_last_save_timestamp_seconds"]) == (15, 1e9)
    assert found["halfstep_skipped_steps"] == {"loss_not_finite": 1}, "of the whole run"


def test_names_that_break_lines_stay_in_their_label(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    odd = 'a"b\\c\nd{}= 1'
    told(path, start(dir=odd, label=odd), step(1), speed())
    labels = {key: value for _, pairs in parsed(path.read_text()) for key, value in pairs}
    assert (labels["run"], labels["label"]) == (odd, odd)


def failed_save(times: int) -> dict[str, Any]:
    return {"event": "note", "time": 1.0, "text": "no checkpoint", "level": "warning", "failed_saves": times}


def bad_sample() -> dict[str, Any]:
    return {"event": "bad_sample", "time": 1.0, "rank": 0, "name": "a.png", "reason": "short", "index": 3}


def test_what_operators_are_warned_of(tmp_path: Path) -> None:
    path, before = tmp_path / METRICS, time.time()
    listener = Prometheus(path)
    for event in (start(), bad_sample(), start(), bad_sample()):
        listener.restore_event(event)
    listener.on_event(start(dir=str(tmp_path), batch={"per_device": 4, "devices": 1, "microbatches": 1, "total": 4}))
    heartbeat = values(path)["halfstep_heartbeat_timestamp_seconds"]
    assert before - 0.01 < heartbeat < time.time() + 0.01, "before the first step"
    for event in (step(1), bad_sample(), failed_save(1), failed_save(2)):
        listener.on_event(event)
    found = values(path)
    assert (found["halfstep_failed_saves_in_a_row"], found["halfstep_bad_samples"]) == (2, 3), "at once"
    assert found["halfstep_restarts"] == 2, "launches before this one"
    assert 0 < found["halfstep_disk_free_bytes"] < 2**60
    assert "halfstep_exit_code" not in found
    assert "halfstep_rank_behind" not in found, "of a single rank"
    for event in (saved(3), speed()):
        listener.on_event(event)
    assert values(path)["halfstep_failed_saves_in_a_row"] == 0
    listener.close()
    told(path, start(restarts=7), step(1), speed())
    assert values(path)["halfstep_restarts"] == 7, "the journal of a run without a checkpoint forgets its launches"


def test_the_heartbeat_goes_on_between_events_and_stops_with_the_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "PERIOD", 0.02)
    path = tmp_path / METRICS
    listener = Prometheus(path)
    listener.on_event(start(dir=str(tmp_path)))
    first = values(path)["halfstep_heartbeat_timestamp_seconds"]
    until = time.monotonic() + 20
    while values(path)["halfstep_heartbeat_timestamp_seconds"] == first:
        assert time.monotonic() < until
        time.sleep(0.01)
    listener.close()
    listener._thread.join(20)
    assert not listener._thread.is_alive()
    assert values(path)["halfstep_running"] == 1, "as of a process that was killed: only its heartbeat is old"


def test_the_first_exit_code_is_kept_whoever_says_it(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    for events, close in (((), False), ((end(),), True)):  # by the watchdog, while the run goes on; after its end
        listener, status = Prometheus(path), RankStatus(tmp_path, Launch("a"))
        status.on_end = listener.ended
        for event in (start(dir=str(tmp_path)), step(1), *events):
            listener.on_event(event)
        assert "halfstep_exit_code" not in values(path), "of this launch"
        if close:
            listener.close()
        status.ended(76, "hung")
        status.ended(0, "finished")
        assert (values(path)["halfstep_exit_code"], values(path)["halfstep_running"]) == (76, 0)
        listener.close()


def test_a_rank_that_is_silent_is_behind_by_the_clock_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(prometheus.time, "monotonic", lambda: now)
    (tmp_path / name_status_file(1)).write_text('{"beat": 1}')
    (tmp_path / name_status_file(2)).write_text('{"beat": 1}')
    ranks = prometheus.RankHeartbeats(tmp_path, 3)
    assert ranks.behind() == {1: 0.0, 2: 0.0}
    now += 30
    (tmp_path / name_status_file(1)).write_text('{"beat": 2}')
    assert ranks.behind() == {1: 0.0, 2: 30.0}
    now += 30
    assert ranks.behind() == {1: 30.0, 2: 60.0}
    path = tmp_path / METRICS
    batch = {"per_device": 4, "devices": 3, "microbatches": 1, "total": 12}
    assert told(path, start(dir=str(tmp_path), batch=batch))["halfstep_rank_behind"] == {"1": 0, "2": 0}


def test_a_full_disk_does_not_end_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / METRICS
    listener = Prometheus(path)
    listener.on_event(start(dir=str(tmp_path)))
    for number in (errno.ENOSPC, errno.EACCES):
        with monkeypatch.context() as broken:
            broken.setattr(Path, "write_text", _raising(OSError(number, os.strerror(number))))
            if number == errno.ENOSPC:
                listener.on_event(failed_save(1))
            else:
                with pytest.raises(OSError, match="denied"):
                    listener.on_event(speed())
            listener.ended(74)
    assert "halfstep_exit_code" not in values(path), "it could not be written"
    listener.on_event(speed())
    found = values(path)
    assert (found["halfstep_failed_saves_in_a_row"], found["halfstep_exit_code"]) == (1, 74)
    listener.close()


def _raising(error: OSError) -> Any:
    def raising(*given: Any, **named: Any) -> None:
        raise error

    return raising


@pytest.mark.wording
@pytest.mark.parametrize(("asked", "is_good"), [("true", True), ("a/b.prom", True), ("b.txt", False), ("2", False)])
def test_a_file_that_nobody_would_read_is_refused(asked: str, is_good: bool) -> None:
    found = read_recipe("segmentation_tiny")
    if is_good:
        assert resolve_run_recipe(found, [f"run.prometheus={asked}"]).recipe.run.prometheus in (True, asked)
    else:
        with pytest.raises(BadRecipe, match=r"run\.prometheus"):
            resolve_run_recipe(found, [f"run.prometheus={asked}"])
