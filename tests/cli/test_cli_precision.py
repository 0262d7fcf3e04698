"""The words for precision, typed: what runs on which device, and what the first line says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.journal.jsonl import read_events
from halfstep.precision import probe, select
from tests.support.devices import named

SHORT = ["train.steps=1", "data.samples=8", "train.batch_size=4", "run.pictures=0"]
OFF, ON = "Mixed precision training is off: ", "Mixed precision training: "


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words])


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let choices be made for a device that is not here; what is chosen then runs on the CPU."""
    monkeypatch.setattr(select, "describe_device", lambda _: named(device))


@pytest.mark.parametrize(
    ("device", "words", "first", "finding"),
    [
        ("Xeon with AMX", "--amp", f"{ON}bf16 (bfloat16), requested as amp", None),
        ("Tesla T4", "use_amp=True", f"{ON}fp16 (float16), requested as amp", None),
        (
            "NVIDIA GeForce GTX 1650",
            "--amp",
            f"{OFF}fp32 instead of the requested amp",
            "precision.substituted",
        ),
        ("Xeon with AMX", "--bf16", f"{ON}bf16 (bfloat16), as requested", None),
        ("Core i7", "--bf16", f"{OFF}fp32 instead of the requested bf16", "precision.substituted"),
        (
            "Core i7",
            "--bf16 train.strict=true",
            f"{ON}bf16 (bfloat16), as requested; slow on this device",
            "precision.slow",
        ),
    ],
)
def test_the_first_line_says_what_runs(
    device: str, words: str, first: str, finding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device, monkeypatch)
    done = halfstep("train", "segmentation_tiny", *SHORT, *words.split(), f"run.dir={tmp_path}")
    assert done.exit_code == 0, done.output
    log = (tmp_path / "train.log").read_text()
    assert log.splitlines()[1] == first
    assert f"observed: {first.removeprefix(OFF).removeprefix(ON)[:4]}: 100 %" in log
    (start,) = (event for event in read_events(tmp_path / "journal.jsonl") if event["event"] == "start")
    assert [found["id"] for found in start["findings"]] == ([finding] if finding else [])


@pytest.mark.wording
def test_evaluate_and_predict_say_first_what_they_fall_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert halfstep("train", "segmentation_tiny", *SHORT, "--fp32", f"run.dir={tmp_path}").exit_code == 0
    on("Core i7", monkeypatch)
    for command in ("evaluate", "predict"):
        done = halfstep(command, tmp_path, "--bf16")
        assert "warning precision.substituted: fp32 is used instead of bf16" in done.stderr.splitlines()[0]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("Core i7", "precision=tf32"),
        ("Core i7", "--amp"),
        ("NVIDIA GeForce GTX 1650", "--fp16"),
        ("A100", "precision=fp8"),
    ],
)
def test_strict_refuses_what_cannot_run_as_named(
    device: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(device, monkeypatch)
    done = halfstep("train", "segmentation_tiny", *SHORT, *words.split(), "train.strict=true", f"run.dir={tmp_path}")
    assert done.exit_code == 78
    assert f"on {device} is refused" in done.output
    assert "fp32" in done.output.partition("allowed: ")[2]
    assert not (tmp_path / "last.safetensors").exists()


@pytest.mark.wording
def test_doctor_strict_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    on("Core i7", monkeypatch)
    monkeypatch.setattr("halfstep.precision.hardware.describe_device", lambda _: named("Core i7"))
    monkeypatch.setattr("halfstep.precision.probe.measure_speedups", lambda *_, **__: probe.Measurements({}, {}, 0.0))
    for words, precision, finding in (
        ([], "fp32", "precision.substituted"),
        (["--strict"], "bf16", "precision.slow"),
    ):
        report = json.loads(halfstep("doctor", "--precision", "bf16", "--json", *words).stdout)
        assert report["choice"]["precision"] == precision
        assert finding in [found["id"] for found in report["findings"]]
    done = halfstep("doctor", "--precision", "tf32", "--strict")
    assert done.exit_code == 78
    assert "allowed: fp32 on this device" in done.output
