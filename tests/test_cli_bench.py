"""`halfstep bench` as a person types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli._bench_page import next_command, show
from halfstep.cli.main import build
from halfstep.measure.bench.comparing import compare
from halfstep.measure.bench.report import Bench
from halfstep.measure.bench.results import Metric, RunFailed, RunResult

CASE = "tests.support.cases:linear"


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("bench") / "out"
    done = halfstep("bench", CASE, "--precisions", "bf16,tf32", "--seeds", 1, "--out", folder, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout, parse_constant=pytest.fail), folder


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


def test_the_files_are_written(benched: tuple[dict[str, Any], Path]) -> None:
    report, folder = benched
    assert report["files"] == [str(folder / f"bench.{ending}") for ending in ("json", "md", "png")]
    assert json.loads((folder / "bench.json").read_text())["verdicts"] == report["verdicts"]
    assert "tf32: failed" in (folder / "bench.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bf16"], "where RECIPE should be"),
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


def _wait_for_child_of(process: int) -> None:
    """Until the first arm has begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
                command = path.with_name("cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == process and b"halfstep" in command:
                return
        time.sleep(0.1)
    pytest.fail("no arm was started")


def made(**speeds: float) -> Bench:
    def arm(speed: float) -> Any:
        def run(seed: int) -> RunResult:
            if speed == 0.0:
                raise RunFailed("no\x1b[31m room")
            wobble = 1 + seed / 1000 * speed / 100
            return RunResult(seed, 0.9 + seed / 1e4, 3.0, 1.0, speed * wobble, 2, ((1.0, 2.0),), 2**30)

        return run

    arms = {"fp32": arm(100.0), **{name: arm(speed) for name, speed in speeds.items()}}
    metric = Metric("top1", higher_is_better=True)
    return compare(arms, name="some_recipe", seeds=[1, 2, 3], metric=metric, conditions={}, settings=["a.b=c d"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_has_the_verdict_first(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show(made(bf16=170.0, fp16=0.0), [Path("bench.md")])
    page = capsys.readouterr().out
    lines = page.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("bf16: 1.70x as fast")
    assert "fp16: failed: no\\x1b[31m room" in page.replace("\n", " ")
    assert lines[-1] == "do: halfstep train some_recipe 'a.b=c d' precision=bf16"
    assert "\x1b" not in page


def test_what_to_type_next_follows_from_what_is_known() -> None:
    assert next_command(made(bf16=50.0)) == "do: halfstep train some_recipe 'a.b=c d' precision=fp32"
    assert next_command(made(bf16=100.0)).endswith("bench some_recipe 'a.b=c d' --seeds 5")
    assert next_command(made(bf16=120.0, fp16=150.0)).endswith("precision=fp16")
    assert os.linesep not in next_command(made(bf16=0.0))
