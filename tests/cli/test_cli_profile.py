"""`halfstep profile`: the cause and the command first, the same as JSON, and an end on Ctrl-C."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from halfstep.cli.main import build
from halfstep.draw.terminal import show_page
from halfstep.measure.conditions import Conditions
from halfstep.measure.profile.causes import choose_cause, find_causes
from halfstep.measure.profile.examined import MeasuredFacts
from halfstep.measure.profile.facts import Feeding, FlopsByFormat, KernelTimes, MisalignedLayer, ProfileFacts, StepTimes
from halfstep.measure.profile.page import Profile
from halfstep.measure.profile.profile import _ProfileProcess as away

CASE = "tests.support.cases:linear"
CONDITIONS: Conditions = {
    "device": "a CPU", "torch": "2.13", "threads": 1, "cores": 2, "load": 0.1, "flags": {"mkldnn.matmul": "none"},
}  # fmt: skip
FACTS = ProfileFacts(
    asked="bf16",
    format="bf16",
    kind="cpu",
    subject=(CASE,),
    race=StepTimes(0.1, 0.05, 2.0, 1.9, 2.1, 60, own_fp32=0.099),
    kernels=KernelTimes({"host": 0.05, "narrow": 0.4, "fp32": 0.2, "copies": 0.1, "update": 0.1, "other": 0.15}),
    fp32_kernels=KernelTimes({"host": 0.02, "narrow": 0.0, "fp32": 0.78, "copies": 0.05, "update": 0.05, "other": 0.1}),
    work=FlopsByFormat({"bf16": 800, "fp32": 200}, {"head": 150, "neck\x1b[31m": 50}),
    misaligned=(MisalignedLayer(("body.0", "body.2"), "127->127", "128->128", 0.9, 0.01, 0.004, 2.2, 2.8, "Conv2d"),),
    feeding=Feeding(0.12, 0.07, 0.07, 0.0, 0, 8, 0),
)


def run(*words: str) -> Any:
    return CliRunner().invoke(build(), ["profile", *words])


def page(facts: ProfileFacts, capsys: pytest.CaptureFixture[str], **more: Any) -> list[str]:
    cause = choose_cause(facts)
    others = tuple(one for one in find_causes(facts) if one != cause)
    show_page(Profile(facts, cause, others, CONDITIONS, **more).page())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_page_begins_with_the_cause_and_what_to_type(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = page(FACTS, capsys)
    assert lines[0].startswith("too-few-workers: waiting for data takes 58% of a step")
    assert f"  $ halfstep profile {CASE} --precision bf16" in lines
    assert max(map(len, lines)) <= int(columns)
    text = "\n".join(lines)
    for words in (
        "4.55x if matrix work took no time",
        "2.00x of strict fp32",
        'layers "body.0", "body.2"',
        "head",
        "misaligned-channels",
    ):
        assert words in text
    assert "\x1b" not in text


def test_the_page_of_next_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(ProfileFacts("bf16", "bf16", "cpu", subject=(CASE,)), capsys, interrupted=True)
    assert lines[0].startswith("interrupted")
    assert lines[1].startswith("not-measured")
    lines = page(replace(FACTS, asked="fp32", format="fp32", feeding=None, misaligned=()), capsys)
    assert lines[0].startswith("already-fast: nothing is wrong, and nothing narrower than fp32 was requested")


def test_one_pair_is_no_speed_on_the_page_and_a_busy_machine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(FACTS, race=StepTimes(0.1, 0.05, 1.82, 1.82, 1.82, 1), feeding=None, misaligned=(), work=None)
    text = " ".join(" ".join(page(few, capsys)).split())
    assert "not measured well enough: 1 pair" in text
    assert "1.82x" not in text
    assert "other work disturbs" not in text
    cause = choose_cause(FACTS)
    show_page(Profile(FACTS, cause, (), {**CONDITIONS, "load": 7.5}).page())
    assert "other work disturbs" in " ".join(capsys.readouterr().out.split())


def test_the_command_prints_one_json_object() -> None:
    done = run(CASE, "--precision", "bf16", "--seconds", "1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["subject"] == CASE
    assert report["interrupted"] is False
    assert report["cause"]["command"]
    assert sum(report["facts"]["shares"].values()) == pytest.approx(1.0)
    assert report["conditions"]["flags"]


@pytest.mark.parametrize("stage", ["", "race"])
def test_ctrl_c_prints_what_there_is(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = away.ask

    def interrupted(self: away, name: str, seconds: float) -> MeasuredFacts:
        if name == stage:
            raise KeyboardInterrupt
        return asked(self, name, seconds)

    monkeypatch.setattr(away, "ask", interrupted)
    done = run(CASE, "--precision", "bf16", "--seconds", "1", "--json")
    assert done.exit_code == 130
    report = json.loads(done.stdout)
    assert report["interrupted"] is True
    assert (report["facts"]["warming"] is None) == (stage == "")
    assert report["facts"]["kernels"] is None
    assert report["cause"]["command"] == f"halfstep profile {CASE} --precision bf16 --seconds 4"
    assert report["skipped"]["padding"] == "interrupted"


@pytest.mark.wording
def test_wrong_words_are_told() -> None:
    done = run(CASE, "train.batch_size=4")
    assert done.exit_code == 78
    assert "settings change a RECIPE" in done.stderr
    done = run("--json", CASE, "--precision", "bf61")
    assert done.exit_code == 78
    assert "bf61" in done.stderr
