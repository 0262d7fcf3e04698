"""A bench of a recipe from end to end: interrupted, gone on with, refused, and what its processes leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import FolderTaken, HalfstepError, WrongUse
from halfstep.measure.bench.bench import bench
from halfstep.measure.bench.comparison import RunFailed
from halfstep.measure.bench.page import Bench, write_bench_report
from halfstep.runs.bench_recipe import RecipeCandidate, RunTimeLimit, run_measured_process

SHORT = ("train.steps=3", "data.samples=24", "train.batch_size=4", "data.size=16")


def short(folder: Path, **more: Any) -> Bench:
    return bench("classification_tiny", settings=SHORT, precisions=["bfloat16"], seeds=2, folder=folder, **more)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Bench, Path]:
    """A bench that is interrupted after two of its runs, and the same again."""
    folder = tmp_path_factory.mktemp("bench")

    def stop(done: int, of: int) -> None:
        assert of == 6  # memory of two arms, and two seeds of each
        if done == 4:
            raise KeyboardInterrupt

    return short(folder, progress=stop), short(folder), folder


@pytest.mark.full
def test_an_interrupted_bench_goes_on_where_it_was(both: tuple[Bench, Bench, Path]) -> None:
    first, second, folder = both
    assert first.interrupted
    assert not second.interrupted
    before, after = ({row.name: row.runs for row in found.rows} for found in (first, second))
    assert [len(runs) for runs in before.values()] == [1, 1]
    assert [len(runs) for runs in after.values()] == [2, 2]
    for name in ("fp32", "bf16"):
        assert after[name][0] == before[name][0]  # its seconds, too: it was not run again
    assert not list(folder.glob("runs/*/checkpoints"))


@pytest.mark.full
def test_the_figures_are_those_of_the_runs(both: tuple[Bench, Bench, Path]) -> None:
    _, found, folder = both
    assert [row.name for row in found.rows] == ["fp32", "bf16"]
    for row in found.rows:
        for run in row.runs:
            place = folder / "runs" / f"{row.name}-seed-{run.seed}"
            result = json.loads((place / "result.json").read_text())
            assert run.metric == result["metrics"]["top1"]
            assert run.conditions["precision"]["chosen"] == row.name
            assert f"{row.name}: 100 %" in run.observed
            assert run.curve[-1][1] == result["metrics"]["loss"]
            assert run.peak_bytes is not None
            assert run.peak_bytes > 50 * 2**20
        assert row.memory is not None
        assert row.memory.measured is not None
        assert row.memory.parts is not None
        assert row.memory.measured == pytest.approx(row.memory.predicted, rel=0.5)
    losses = [run.curve[-1][1] for row in found.rows for run in row.runs]
    assert len(set(losses)) == 4  # another seed, and another precision, is another run


@pytest.mark.full
def test_the_report_is_three_files(both: tuple[Bench, Bench, Path]) -> None:
    _, found, folder = both
    files = write_bench_report(found, folder)
    assert [path.name for path in files] == ["bench.json", "bench.md", "bench.svg"]
    kept = json.loads(files[0].read_text(), parse_constant=pytest.fail)
    assert kept["settings"] == list(SHORT)
    assert kept["rows"][1]["parity"]["verdict"] == "can't tell"  # of two seeds
    assert kept["conditions"]["flags"]
    assert "| bf16 |" in files[1].read_text()


@pytest.mark.full
def test_another_recipe_or_version_is_not_taken_for_the_same(both: tuple[Bench, Bench, Path]) -> None:
    _, found, folder = both
    kept = folder / "runs" / "fp32-seed-1.json"
    identity = {key: value for key, value in json.loads(kept.read_text())["identity"].items() if key != "seed"}
    assert identity["recipe"]["train"]["steps"] == 3
    assert {"torch", "halfstep", "device"} <= set(identity)
    same = RecipeCandidate("classification_tiny", ("train.steps=never",), folder, "fp32", identity)
    assert same(1) == found.rows[0].runs[0]
    before = kept.read_bytes()
    other = RecipeCandidate("classification_tiny", ("train.steps=never",), folder, "fp32", {**identity, "torch": "1.0"})
    with pytest.raises(RunFailed, match="never"):
        other(1)
    assert kept.read_bytes() == before


@pytest.mark.wording
@pytest.mark.full
def test_another_setting_does_not_destroy_what_is_there(both: tuple[Bench, Bench, Path]) -> None:
    _, _, folder = both
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FolderTaken, match="another recipe, setting") as error:
        bench("classification_tiny", settings=["train.steps=2"], precisions=["bf16"], seeds=2, folder=folder)
    assert error.value.do == "--out NEW"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.wording
@pytest.mark.parametrize(
    ("settings", "more", "said"),
    [
        (["--bf16"], {}, "among the settings"),
        (["precision=bf16"], {}, "precision among"),
        (["train.seed=3"], {}, "train.seed among"),
        (["run.dir=here"], {}, "run.dir among"),
        (["train.no_such=3"], {}, "no_such"),
        ([], {"seeds": 0}, "0 seeds"),
        ([], {"price_per_hour": float("nan")}, "price of nan"),
        ([], {"precisions": ["fp31"]}, "fp31"),
        ([], {"arms": {"more": ["train.no_such=3"]}}, "no_such"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(
    settings: list[str], more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(HalfstepError, match=said):
        bench("classification_tiny", settings=settings, folder=tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


@pytest.mark.wording
def test_a_case_takes_no_settings_for_its_arms() -> None:
    with pytest.raises(WrongUse, match="arms with settings"):
        bench("tests.support.cases:linear", arms={"more": ["train.steps=3"]})


def test_a_process_ends_with_the_bench(tmp_path: Path) -> None:
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, here = signal.signal(signal.SIGALRM, interrupt), Path.cwd()
    os.chdir(tmp_path)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_measured_process([sys.executable, "-c", code], tmp_path / "log")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(here)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_process_that_hangs_is_ended_and_says_so(tmp_path: Path) -> None:
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    with pytest.raises(RunFailed, match="did not end within"):
        run_measured_process(
            [sys.executable, "-c", code.replace("'pid'", repr(str(tmp_path / "pid")))], tmp_path / "log", 2.0
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_patience_is_ten_times_the_slowest_run_and_at_least_ten_minutes() -> None:
    time_limit = RunTimeLimit()
    assert time_limit.limit is None
    time_limit.learn(None)
    assert time_limit.limit is None
    time_limit.learn(3.0)
    assert time_limit.limit == 600.0
    time_limit.learn(100.0)
    time_limit.learn(50.0)
    assert time_limit.limit == 1000.0


@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends a process with its parent")
def test_a_process_ends_even_where_the_bench_was_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    inner = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    outer = (
        "import pathlib, sys; from halfstep.runs.bench_recipe import run_measured_process; "
        f"run_measured_process([sys.executable, '-c', {inner!r}], pathlib.Path({str(tmp_path / 'log')!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", outer])
    try:
        assert _soon(lambda: pid.exists() and pid.read_text())
    finally:
        parent.kill()
        parent.wait()
    assert _soon(lambda: not _lives(int(pid.read_text())))


def _soon(true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(true())


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_was_killed_says_so(tmp_path: Path) -> None:
    code, _ = run_measured_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log")
    assert code == -9
    hungry = "x = bytearray(300 * 2**20); x[::4096] = b'1' * len(x[::4096])"
    code, most = run_measured_process([sys.executable, "-c", hungry], tmp_path / "log")
    assert code == 0
    assert most is None or most > 300 * 2**20
