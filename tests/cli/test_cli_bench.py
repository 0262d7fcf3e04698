"""`halfstep bench` as a person types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.bench import interrupt_on_signals
from halfstep.cli.main import build
from halfstep.draw.terminal import show_page
from halfstep.measure.bench.bench import run_bench_arms
from halfstep.measure.bench.comparison import BenchMetric, RunFailed, RunResult
from halfstep.measure.bench.page import Bench, build_bench_page, suggest_bench_command

CASE = "tests.support.cases:linear"


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("bench") / "out"
    done = halfstep("bench", CASE, "--precisions", "bf16,tf32", "--seeds", 1, "--out", folder, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout, parse_constant=pytest.fail), folder


@pytest.mark.full
def test_a_case_is_raced_and_its_loss_compared(benched: tuple[dict[str, Any], Path]) -> None:
    report, _ = benched
    base, lower, refused = report["rows"]
    assert [row["name"] for row in report["rows"]] == ["fp32", "bf16", "tf32"]
    assert report["metric"] == {"name": "loss", "higher_is_better": False}
    assert lower["gain"]["pairs"] == 60
    assert lower["gain"]["low"] <= lower["gain"]["times"] <= lower["gain"]["high"]
    assert base["runs"][0]["metric"] == pytest.approx(lower["runs"][0]["metric"], rel=0.05)
    assert base["runs"][0]["curve"][-1][1] < base["runs"][0]["curve"][0][1]
    assert base["memory"]["measured"] > 4 * (64 * 128 + 128 * 10) * 4  # weights, gradients and two of AdamW
    assert "tf32" in refused["failed"]
    assert refused["runs"] == []
    assert report["interrupted"] is False


@pytest.mark.full
def test_the_files_are_written(benched: tuple[dict[str, Any], Path]) -> None:
    report, folder = benched
    assert report["files"] == [str(folder / f"bench.{ending}") for ending in ("json", "md", "svg")]
    assert json.loads((folder / "bench.json").read_text())["verdicts"] == report["verdicts"]
    assert "**tf32**: failed" in (folder / "bench.md").read_text()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bf16"], "instead of RECIPE"),
        (["classification_tyni"], "classification_tiny"),
        (["classification_tiny", "--bf16"], "--precisions"),
        (["classification_tiny", "--precisions", "fp31"], "fp31"),
        (["tests.support.cases:no_such"], "no_such"),
        ([CASE, "train.steps=3"], "settings change a RECIPE"),
        (["classification_tiny", "--seeds", -1], "-1 seeds"),
    ],
)
def test_what_cannot_be_is_refused_in_three_lines(
    words: list[object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = halfstep("bench", *words)
    assert done.exit_code == 78, done.output
    assert said in done.stderr
    assert "do:" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the child in /proc")
@pytest.mark.slow
def test_ctrl_c_prints_what_there_is_and_ends_with_130(tmp_path: Path) -> None:
    words = ["bench", CASE, "--json", "--out", str(tmp_path)]
    child = subprocess.Popen([sys.executable, "-m", "halfstep", *words], stdout=subprocess.PIPE, text=True)
    try:
        _wait_for_child_of(child.pid)
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    report = json.loads(said)
    assert report["interrupted"] is True
    assert [row["runs"] for row in report["rows"]] == [[], []]
    assert child.returncode == 130
    assert (tmp_path / "bench.md").exists()


def _wait_for_child_of(process: int, words: bytes = b"halfstep") -> int:
    """Until the first arm has begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                command = path.with_name("cmdline").read_bytes()
            except OSError:
                continue
            # Between fork and exec a child has the command line of its parent, which is not yet waiting for it.
            if int(fields[1]) == process and words in command and b"halfstep\0bench" not in command:
                return int(path.parent.name)
        time.sleep(0.1)
    pytest.fail("no arm was started")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the child in /proc")
@pytest.mark.full
def test_a_system_that_stops_it_leaves_no_training_behind(tmp_path: Path) -> None:
    small = ["train.steps=100000", "data.samples=24", "train.batch_size=4", "data.size=16"]
    words = ["bench", "classification_tiny", *small, "--precisions", "fp32", "--json", "--out", str(tmp_path)]
    child = subprocess.Popen([sys.executable, "-m", "halfstep", *words], stdout=subprocess.PIPE, text=True)
    try:
        run = _wait_for_child_of(child.pid, b"halfstep\0train")
        child.terminate()
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert json.loads(said)["interrupted"] is True
    assert child.returncode == 130
    deadline = time.monotonic() + 20  # the system may take a moment to clear it away
    while Path(f"/proc/{run}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{run}").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="has no such signal")
def test_signals_stop_as_ctrl_c_does_and_only_meanwhile() -> None:
    names = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(which) for which in names]
    for which in names:
        with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
            signal.raise_signal(which)
    assert [signal.getsignal(which) for which in names] == before


@pytest.mark.wording
@pytest.mark.parametrize("below", [[], ["deeper"]])
def test_a_file_for_a_folder_is_refused_beforehand(below: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = halfstep("bench", CASE, "--out", tmp_path.joinpath("file", *below))
    assert done.exit_code == 73, done.output
    assert "which is a file" in done.stderr
    assert "--out NEW" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.wording
def test_a_bench_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text('{"name": "other:case"}')
    done = halfstep("bench", CASE, "--out", tmp_path)
    assert done.exit_code == 73, done.output
    assert "a bench of other:case" in done.stderr


def test_a_baseline_that_failed_is_no_success(tmp_path: Path) -> None:
    done = halfstep("bench", "tests.support.cases:broken", "--precisions", "fp32", "--out", tmp_path)
    assert done.exit_code == 70, done.output
    assert "fp32: failed" in done.stdout
    assert done.stdout.splitlines()[-1] == "do: fix the failure of fp32, then run the same command again"
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["failed"]


def made(**speeds: float) -> Bench:
    def arm(speed: float, converted: str = "") -> Any:
        def run(seed: int) -> RunResult:
            if speed == 0.0:
                raise RunFailed("no\x1b[31m room")
            wobble = 1 + seed / 1000 * speed / 100
            facts = {"precision": {"converted": dict.fromkeys(converted, "fp8")}}
            return RunResult(
                seed, 0.9 + seed / 1e4, 3.0, 1.0, speed * wobble, 2, ((1.0, 2.0),), 2**30, conditions=facts
            )

        return run

    arms = {"fp32": arm(100.0), **{name: arm(speed, "ab" * (name == "fp8")) for name, speed in speeds.items()}}
    metric = BenchMetric("top1", higher_is_better=True)
    return run_bench_arms(arms, name="some_recipe", seeds=[1, 2, 3], metric=metric, conditions={}, settings=["a.b=c d"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_has_the_verdict_first(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show_page(build_bench_page(made(bf16=170.0, fp16=0.0), [Path("bench.md")]))
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("bf16: 1.70x as fast")
    assert "fp16: failed: no\\x1b[31m room" in page.replace("\n", " ")
    assert lines[-1] == "do: halfstep train some_recipe 'a.b=c d' precision=bf16"
    assert "\x1b" not in page


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({"bf16": 170.0, "fp8": 120.0}, "eligible (2 layers), slower than bf16 (0.71x, 0.70 to 0.71), same accuracy"),
        ({"bf16": 120.0, "fp8": 170.0}, "eligible (2 layers), faster than bf16 (1.42x, 1.42 to 1.42), same accuracy"),
        ({"bf16": 0.0, "fp8": 170.0}, "eligible (2 layers), faster than fp32 (1.70x, 1.70 to 1.71), same accuracy"),
        ({"fp8": 0.0}, ""),
    ],
)
@pytest.mark.wording
def test_fp8_is_judged_against_bf16(speeds: dict[str, float], said: str) -> None:
    lines = [line for line in made(**speeds).asides if line.startswith("fp8: ")]
    assert [line.partition(" (difference")[0] for line in lines] == [f"fp8: {said}"] * bool(said)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_verdict_on_fp8_of_a_case(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    done = halfstep("bench", CASE, "--precisions", "bf16,fp8", "--seeds", 3, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    text = " ".join((tmp_path / "bench.md").read_text().split())
    assert "fp8: eligible (1 layer), slower than bf16 (" in text
    assert "same loss (" in text.partition("fp8: eligible")[2]


def test_what_to_type_next_follows_from_what_is_known() -> None:
    assert suggest_bench_command(made(bf16=50.0)) == "halfstep train some_recipe 'a.b=c d' precision=fp32"
    assert suggest_bench_command(made(bf16=100.0)).endswith(
        "bench some_recipe 'a.b=c d' --precisions fp32,bf16 --seeds 5"
    )
    assert suggest_bench_command(made(bf16=120.0, fp16=150.0)).endswith("precision=fp16")
    assert os.linesep not in suggest_bench_command(made(bf16=0.0))
    assert suggest_bench_command(made(bf16=100.0, fp16=0.0)).endswith("--precisions fp32,bf16 --seeds 5")


def test_what_to_type_next_is_nothing_that_failed() -> None:
    again = ", then run the same command again"
    assert (
        suggest_bench_command(replace(made(bf16=120.0), rows=made(bf16=0.0).rows[::-1]))
        == f"fix the failure of bf16{again}"
    )
    whole = made(bf16=120.0)
    lost = replace(whole.baseline, runs=(replace(whole.baseline.runs[0], metric=float("nan")),))
    assert (
        suggest_bench_command(replace(whole, rows=(lost, *whole.rows[1:])))
        == f"make fp32 train to a finite top1 first{again}"
    )
    late = replace(whole.rows[1], failed="no room")
    assert suggest_bench_command(replace(whole, rows=(whole.baseline, late))).endswith("precision=fp32")
    assert "continues where it stopped" in suggest_bench_command(replace(whole, interrupted=True))
    assert "continues" not in suggest_bench_command(replace(whole, name="my:case", interrupted=True))
