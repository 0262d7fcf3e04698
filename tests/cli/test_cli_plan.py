"""`halfstep plan` as it is typed."""

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

from halfstep.cli import main
from halfstep.measure.plan import plan as planning
from halfstep.measure.plan.page import Plan
from halfstep.measure.plan.search import BatchGrowth
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from halfstep.recipe.sources import read_recipe
from tests.measure.plan.clockwork import World, planned
from tests.measure.plan.test_plan_choice import FAST

CONDITIONS = {
    "device": "a CPU with AMX", "place": "cpu", "driver": "", "halfstep": "0", "torch": "2", "python": "3",
    "threads": 1, "cores": 2, "load": 0.1, "flags": {"mkldnn.matmul": "none"}, "arms": "clockwork",
}  # fmt: skip


def call(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(main.build(), list(words), env={"COLUMNS": str(width)}, prog_name="halfstep")


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Commands get a plan of clockwork arms, and a folder of their own."""
    monkeypatch.chdir(tmp_path)
    changed: dict[str, Any] = {}

    def quick(given: object, **_named: object) -> Plan:
        return replace(planned(World(FAST, noise=0.02)), **{"conditions": CONDITIONS, "name": "clockwork", **changed})

    monkeypatch.setattr(planning, "plan", quick)
    return changed


@pytest.mark.full
def test_a_real_plan_of_a_case_as_json() -> None:
    result = call("plan", "tests.support.cases:linear", "--json", "--seconds", "60")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["choice"]["speed"]["seconds"] > 0
    assert report["interrupted"] is False
    assert report["written"] is None
    assert report["conditions"]["arms"] == "each setting in a separate process"
    assert report["ladder"][0]["setting"]["precision"] == "fp32"
    assert report["ladder"][0]["peak"] > 0


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_and_begins_with_the_choice(clockwork: Any, width: int) -> None:
    result = call("plan", "classification_tiny", width=width)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("bf16, channels last  3.")
    assert "\x1b" not in result.output
    printed, _, commands = result.output.partition("nothing was written")
    assert max(map(len, printed.splitlines())) <= width
    assert "halfstep plan classification_tiny --yes --write runs/plan-classification_tiny.yaml" in commands
    assert "halfstep train classification_tiny precision=bf16 train.channels_last=true" in commands
    for word in ("parity", "runner-up", "strict fp32", "95 % interval"):
        assert word in result.output
    assert not Path("runs").exists()


@pytest.mark.wording
def test_yes_writes_a_complete_recipe_once(clockwork: Any) -> None:
    result = call("plan", "classification_tiny", "--yes", "--json", "train.epochs=3")
    assert result.exit_code == 0, result.output
    file = Path(json.loads(result.stdout)["written"])
    assert file == Path("runs/plan-classification_tiny.yaml")
    raw = read_recipe(str(file)).raw
    assert raw["precision"] == "bf16"
    assert raw["train"]["channels_last"] is True
    assert raw["train"]["batch_size"] == 16
    assert raw["train"]["epochs"] == 3
    assert call("train", str(file), "--show").exit_code == 0
    before = file.read_bytes()
    again = call("plan", "classification_tiny", "--yes")
    assert again.exit_code == 73
    assert "already exists" in again.stderr
    assert file.read_bytes() == before


def test_on_a_terminal_it_asks_and_never_replaces_unasked(clockwork: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.cli.plan.has_terminal", lambda: True)

    def answered(answer: str) -> str:
        return CliRunner().invoke(main.build(), ["plan", "classification_tiny"], input=answer).output

    file = Path("runs/plan-classification_tiny.yaml")
    assert "Write runs/plan-classification_tiny.yaml? [Y/n]" in answered("n\n")
    assert not file.exists()
    assert "wrote runs/plan-classification_tiny.yaml" in answered("\n")
    file.write_text("mine")
    assert "Replace runs/plan-classification_tiny.yaml? [y/N]" in answered("\n")
    assert file.read_text() == "mine"
    answered("y\n")
    assert read_recipe(str(file)).raw["precision"] == "bf16"


def test_ctrl_c_at_the_question_is_a_no(clockwork: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.cli.plan.has_terminal", lambda: True)
    result = CliRunner().invoke(main.build(), ["plan", "classification_tiny"], input="")  # as click tells Ctrl-C
    assert result.exit_code == 130
    assert "nothing was written; to write the recipe, type" in result.output
    assert not Path("runs").exists()


@pytest.mark.wording
def test_commands_repeat_the_options_and_offer_a_free_name(clockwork: Any) -> None:
    words = ["--seconds", "25", "--device", "cpu", "--grow-batch"]
    file = Path("runs/plan-classification_tiny.yaml")
    wanted = f"halfstep plan classification_tiny {' '.join(words)} --yes --write"
    assert f"{wanted} {file}" in call("plan", "classification_tiny", *words).output
    file.parent.mkdir()
    file.write_text("mine")
    assert f"{wanted} runs/plan-classification_tiny-2.yaml" in call("plan", "classification_tiny", *words).output
    taken = call("plan", "classification_tiny", "--yes")
    assert "give --write runs/plan-classification_tiny-2.yaml" in taken.stderr
    clockwork["interrupted"] = True
    assert (
        f"halfstep plan classification_tiny {' '.join(words)}\n" in call("plan", "classification_tiny", *words).output
    )


def test_a_larger_batch_is_announced_and_its_warm_up_fits_the_run(clockwork: Any) -> None:
    speed = Speed(1.0, 6.0, 5.9, 6.1, 31)
    clockwork["growth"] = BatchGrowth(2, StepSetting("bf16", batch=32), speed, 0.0002, "square root scaling", 500)
    clockwork["growth_ended"] = "64 samples: not measured: no time was left"
    result = call("plan", "classification_tiny", "--grow-batch", "--yes", "train.epochs=40")
    assert result.exit_code == 0, result.output
    text = Path("runs/plan-classification_tiny.yaml").read_text()
    raw = read_recipe("runs/plan-classification_tiny.yaml").raw
    warm_up = raw["schedule"]["warmup_steps"]
    assert 1 <= warm_up < 500
    words = f"changes the optimization: batch 16 -> 32, learning rate 0.0002, {warm_up} updates of warm-up"
    assert text.splitlines()[1] == f"# {words}"
    assert words in " ".join(result.output.split())
    short = call("plan", "classification_tiny", "--grow-batch", "train.steps=30")
    assert (
        "schedule.warmup_steps=3 " in f"{short.output.replace(chr(10), ' ')} " or "3 updates of warm-up" in short.output
    )
    clockwork["growth"] = None
    assert "larger batch" in call("plan", "classification_tiny", "--grow-batch").output


def test_other_work_on_the_machine_is_told(clockwork: Any) -> None:
    clockwork["conditions"] = {**CONDITIONS, "load": 3.1}
    assert "load 3.1 on 2 cores before measuring began" in " ".join(call("plan", "classification_tiny").output.split())


@pytest.mark.wording
def test_links_and_other_endings_are_refused_before_anything_is_measured(clockwork: Any) -> None:
    Path("elsewhere.yaml").write_text("precious")
    Path("link.yaml").symlink_to("elsewhere.yaml")
    result = call("plan", "classification_tiny", "--yes", "--write", "link.yaml")
    assert result.exit_code == 73
    assert "is a link" in result.stderr
    assert Path("elsewhere.yaml").read_text() == "precious"
    assert call("plan", "classification_tiny", "--write", "plan.pt").exit_code == 78
    assert call("plan", "tests.support.cases:linear", "--yes").exit_code == 78
    assert call("plan", "no_such_recipe").exit_code == 78


def test_a_case_gets_lines_of_python(clockwork: Any) -> None:
    output = call("plan", "tests.support.cases:linear").output
    assert 'stepper = halfstep.Stepper(model, optimizer, precision="bf16")' in output
    assert "to(memory_format=torch.channels_last)" in output
    assert "nothing was written" not in output


def test_an_interrupted_plan_is_printed_and_ends_with_130(clockwork: Any) -> None:
    clockwork["interrupted"] = True
    result = call("plan", "classification_tiny", "--yes")
    assert result.exit_code == 130
    assert "interrupted: this is the best of what had been measured" in result.output
    assert not Path("runs").exists()
    report = json.loads(call("plan", "classification_tiny", "--json").stdout)
    assert report["interrupted"] is True


def test_ctrl_c_before_the_search_ends_with_130_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(*_given: object, **_named: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", early)
    result = call("plan", "tests.support.cases:linear", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["interrupted"] is True


def has_an_arm(process: int) -> bool:
    """Whether a child of the process measures: others come and go while torch is imported, before anything can end."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return any(b"halfstep.measure" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)
    except FileNotFoundError:  # it ended meanwhile
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see when the first arm is there")
@pytest.mark.full
def test_ctrl_c_ends_a_real_plan_with_what_it_has() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "halfstep", "plan", "tests.support.cases:linear", "--json", "--seconds", "600"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not has_an_arm(started.pid):
        time.sleep(0.1)
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 130
    report = json.loads(output)
    assert report["interrupted"] is True
    assert report["choice"]["setting"]["precision"] in ("fp32", "bf16")
