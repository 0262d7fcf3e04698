"""The numbers of a run as Prometheus reads them: every line in its text format, and no file half written."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import BadRecipe
from halfstep.journal.prometheus import METRICS, Prometheus
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolved_recipe
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


@pytest.mark.parametrize(("asked", "is_good"), [("true", True), ("a/b.prom", True), ("b.txt", False), ("2", False)])
def test_a_file_that_nobody_would_read_is_refused(asked: str, is_good: bool) -> None:
    found = read_recipe("segmentation_tiny")
    if is_good:
        assert resolved_recipe(found, [f"run.prometheus={asked}"]).recipe.run.prometheus in (True, asked)
    else:
        with pytest.raises(BadRecipe, match=r"run\.prometheus"):
            resolved_recipe(found, [f"run.prometheus={asked}"])
