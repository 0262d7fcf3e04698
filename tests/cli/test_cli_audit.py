"""`halfstep audit`: the verdict first, one command last, the same as JSON, a picture, and an end on Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

from halfstep import island
from halfstep.cli.main import build
from halfstep.measure.audit import audit as auditing
from halfstep.measure.audit.page import group_modules
from halfstep.measure.audit.report import ModuleRow, RangeOfValues

CASE = "tests.support.cases:linear"
PLANTED = "tests.cli.test_cli_audit:planted"


class Planted(nn.Module):
    """Timesteps that go into a layer as they are, and an island that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 16)
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
        self.calm = nn.Linear(16, 4)

    def forward(self, t: Tensor) -> Tensor:
        return self.calm(self.blocks(self.time(t[:, None].float())))


def planted() -> tuple[nn.Module, Any, Any]:
    model = Planted()
    island(model, "calm")
    return (
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        (
            torch.arange(993, 1001),
            torch.arange(8) % 4,
        ),
    )


def run(*words: str) -> Any:
    return CliRunner().invoke(build(), ["audit", *words])


@pytest.mark.wording
@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_page(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = run(PLANTED, "--precision", "bf16")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("bf16: 100 % of the work outside islands in bf16, as requested; 2 findings")
    assert lines[-1] == f"  $ halfstep audit {PLANTED} --precision fp32"
    assert max(map(len, lines)) <= int(columns)
    text = " ".join(done.stdout.split())
    assert "993 becomes 992; of 8 different ones 3 are left" in text
    assert "tests/cli/test_cli_audit.py:" in text
    assert "calm not needed bf16 has room" in text
    assert "blocks.* Linear x5" in text
    assert ("gradients" in text.split("Modules")[1].split("Islands")[0]) == (columns == "120")
    assert "\x1b" not in done.stdout


def test_every_module_is_listed_on_request() -> None:
    text = run(PLANTED, "--precision", "bf16", "--all").stdout
    assert all(f"blocks.{n} " in text for n in range(5))
    assert "x5" not in text


def test_the_command_prints_one_json_object_and_draws(tmp_path: Path) -> None:
    done = run(PLANTED, "--precision", "bf16", "--json", "--picture", str(tmp_path / "formats.svg"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [one["id"] for one in report["findings"]] == ["integers-rounded", "island-not-needed"]
    assert report["findings"][0]["module"] == "time"
    assert report["findings"][0]["line"].startswith("tests/cli/test_cli_audit.py:")
    assert report["modules"][0]["computed"] == {"bf16": 1.0}
    assert report["islands"][0]["needed"] is False
    drawn = ElementTree.parse(tmp_path / "formats.svg")
    assert any("calm: fp32 100 %" in (title.text or "") for title in drawn.iter("{http://www.w3.org/2000/svg}title"))


def test_a_device_that_is_not_here() -> None:
    report = json.loads(run(PLANTED, "--precision", "fp16", "--device", "t4", "--json").stdout)
    assert report["run"] is False
    assert report["device"] == "NVIDIA Tesla T4"
    assert report["findings"] == []
    assert report["next"] == f"halfstep estimate {PLANTED} --device t4"
    assert "by CUDA's rules, not run" in run(PLANTED, "--precision", "fp16", "--device", "t4").stdout


def test_a_healthy_case_is_sent_on(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(CASE, "--precision", "fp16", "--json").stdout)
    assert report["findings"] == []
    assert report["verdict"] == "100 % of the work in fp16, as requested; no problems found"
    assert report["next"] == f"halfstep plan {CASE}"
    assert report["loss_scale"] == 65536


def test_a_recipe_in_its_own_precision() -> None:
    report = json.loads(run("segmentation_tiny", "precision=bf16", "--json").stdout)
    assert report["precision"] == "bf16"
    assert report["findings"] == []
    assert report["next"] == "halfstep train segmentation_tiny --bf16"


def test_ctrl_c_prints_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(auditing, "judge_island", interrupted)
    done = run(PLANTED, "--precision", "bf16", "--json")
    assert done.exit_code == 130
    report = json.loads(done.stdout)
    assert report["interrupted"] is True
    assert report["modules"]
    assert report["islands"] == []
    monkeypatch.setattr(auditing, "run_watched_step", interrupted)
    done = run(PLANTED, "--precision", "bf16")
    assert done.exit_code == 130
    assert done.stdout.startswith("interrupted")


def test_ctrl_c_before_anything_is_known_is_still_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(json.loads(run(CASE, "--precision", "bf16", "--json").stdout))

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for early in ("halfstep.cli.audit.subject", "halfstep.measure.subject.Subject.open"):
        with monkeypatch.context() as patch:
            patch.setattr(early, interrupted)
            done = run(CASE, "--json", "--precision", "fp16")
        assert done.exit_code == 130
        report = json.loads(done.stdout)
        assert set(report) == known
        assert report["interrupted"] is True
        assert report["next"] == f"halfstep audit {CASE} --precision fp16"


@pytest.mark.wording
def test_wrong_words_are_told(tmp_path: Path) -> None:
    done = run(CASE, "--picture", str(tmp_path / "formats.png"))
    assert done.exit_code == 78
    assert "an .svg file" in done.stderr
    assert f"do: --picture {tmp_path / 'formats.svg'}" in " ".join(done.stderr.split())
    assert run(CASE, "--precision", "bf61").exit_code == 78
    assert run(CASE, "train.batch_size=4").exit_code == 78
    assert run(CASE, "--device", "rtx9999").exit_code == 78


def test_modules_that_differ_by_a_number_are_one_row() -> None:
    def row(module: str, bits: float | None, format: str = "bf16") -> ModuleRow:
        numbers = None if bits is None else RangeOfValues(1.0, bits, bits / 10)
        return ModuleRow(
            module=module, kind="Linear", stored={"fp32": 1}, computed={format: 1.0}, saved={}, flops={}, share=0.1,
            island=None, forward=numbers, backward=None,
        )  # fmt: skip

    rows = [row("a.0.b", 3.0), row("a.1.b", 1.0), row("a.2.b", 2.0, "fp32"), row("a.x.b", None), row("a12.b", None)]
    found = group_modules(rows)
    assert [one.pattern for one in found] == ["a.*.b", "a.2.b", "a.x.b", "a12.b"]
    assert (found[0].headroom_bits("forward"), found[0].underflow("forward")) == (1.0, 0.3)
    assert (found[2].headroom_bits("forward"), found[2].underflow("forward")) == (None, None)
    assert found[0].share == pytest.approx(0.2)


def infinite() -> tuple[nn.Module, Any, Tensor]:
    return nn.Linear(4, 4), lambda model, x: (model(x) * 1e6).square().sum() * float("inf"), torch.ones(2, 4)


@pytest.mark.parametrize(("precision", "following"), [("fp16", "bf16"), ("bf16", "fp32"), ("fp32", None)])
def test_an_error_is_an_exit_code_and_another_command(precision: str, following: str | None) -> None:
    case = "tests.cli.test_cli_audit:infinite"
    done = run(case, "--precision", precision)
    assert done.exit_code == 80, done.output
    assert "not-finite" in done.stdout or "overflow" in done.stdout
    wider = f"halfstep audit {case} --precision {following}" if following else "halfstep doctor ."
    assert done.stdout.splitlines()[-1] == f"  $ {wider}"
    assert run(case, "--precision", precision, "--json").exit_code == 80
