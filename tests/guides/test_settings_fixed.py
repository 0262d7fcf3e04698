"""The radio-map report's "solution applied": contradicting settings are changed in their files, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import main
from halfstep.doctor.checkup import check_settings
from halfstep.doctor.fixing import make_settings_agree
from halfstep.errors import HalfstepError, WrongUse
from halfstep.json_data import convert_to_json_data
from halfstep.recipe.sources import read_recipe

SCRIPT = "trainer:\n  amp: False   # off for now\n  fp16: False\n  lr: 1e-5\n"
LAUNCHER = "mixed_precision: bf16\ndistributed_type: MULTI_GPU\ngpu_ids: 1,2\n"


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    Path("train.yaml").write_text(SCRIPT)
    Path("launch.yaml").write_text(LAUNCHER)


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main.build(), ["doctor", *words], env={"COLUMNS": "80"}, prog_name="halfstep")


def fix(precision: str, recipe: str = "./train.yaml", **more: Any) -> list[Any]:
    return make_settings_agree(precision, recipe, accelerate="./launch.yaml", variables={}, **more)


def test_the_guides_solution_is_applied_and_listed() -> None:
    done = doctor("./train.yaml", "--accelerate", "launch.yaml", "--fix", "bf16")
    assert done.exit_code == 0, done.output
    assert Path("train.yaml").read_text() == SCRIPT.replace("amp: False", "amp: True")
    assert Path("launch.yaml").read_text() == LAUNCHER
    page = " ".join(done.output.split())
    assert "Changes applied ./train.yaml, line 2 - amp: False # off for now + amp: True # off for now" in page
    assert "Files modified: ./train.yaml" in page
    assert "✅ Configuration is properly aligned: everything asks for bf16" in page
    assert "Final Status: ready" in page
    again = doctor("./train.yaml", "--accelerate", "launch.yaml", "--fix", "bf16", "--json")
    assert json.loads(again.stdout)["changed"] == []


def test_the_other_way_out() -> None:
    (change,) = fix("fp32")
    assert (change.file, change.before, change.after) == (
        "./launch.yaml",
        "mixed_precision: bf16",
        "mixed_precision: 'no'",
    )
    assert Path("train.yaml").read_text() == SCRIPT


@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "script",
    [
        "use_amp: False\namp_dtype: float16\n",
        "use_amp: True\namp_dtype: float16\n",
        "trainer:\n  precision: 16-mixed\n",
        "'fp16': True  # as before\r\nlr: 1\r\n",
        "mixed_precision: fp16\n",
        "precision: fp16\n",
    ],
)
@pytest.mark.wording
def test_whatever_is_written_it_agrees_afterwards_or_is_as_before(script: str, wanted: str) -> None:
    Path("train.yaml").write_bytes(script.encode())
    refused = None
    try:
        fix(wanted)
    except HalfstepError as told:
        refused = told
    if refused:
        assert "write there:" in refused.do or "--fix" in refused.do
        assert Path("train.yaml").read_bytes() == script.encode()
        assert Path("launch.yaml").read_text() == LAUNCHER
        return
    status = check_settings("./train.yaml", accelerate="./launch.yaml", variables={}).status
    assert status.aligned
    assert status.precision == wanted


def test_a_setting_among_others_on_its_line_is_changed_alone() -> None:
    Path("train.yaml").write_text("trainer: {amp: False, lr: 1e-5}\n")
    fix("bf16")
    assert Path("train.yaml").read_text() == "trainer: {amp: True, lr: 1e-5}\n"


@pytest.mark.wording
def test_a_line_that_says_a_word_twice_is_left_to_the_person() -> None:
    text = "trainer: {amp: False, model: {amp: 3}}\n"
    Path("train.yaml").write_text(text)
    with pytest.raises(WrongUse, match="cannot change") as told:
        fix("bf16")
    assert told.value.do == "write there: amp: True"
    assert Path("train.yaml").read_text() == text


@pytest.mark.wording
def test_recipes_that_ship_and_variables_are_not_written() -> None:
    with pytest.raises(WrongUse, match="cannot change"):
        make_settings_agree("bf16", "unet_stable", accelerate="./launch.yaml", variables={})
    with pytest.raises(WrongUse, match="export ACCELERATE_MIXED_PRECISION"):
        make_settings_agree("bf16", accelerate="./launch.yaml", variables={"ACCELERATE_MIXED_PRECISION": "fp16"})


@pytest.mark.parametrize("word", ["fp8", "auto", "fp31"])
def test_only_a_precision_can_be_asked_for(word: str) -> None:
    with pytest.raises(HalfstepError):
        fix(word)
    assert Path("train.yaml").read_text() == SCRIPT


@pytest.mark.wording
def test_settings_that_agree_on_another_are_not_touched() -> None:
    Path("train.yaml").write_text("precision: bf16\n")
    with pytest.raises(WrongUse, match="no settings conflict"):
        fix("fp16")


@pytest.mark.skipif(os.name == "nt", reason="has no such permissions")
def test_permissions_and_links_stay() -> None:
    Path("real.yaml").write_text(SCRIPT)
    Path("real.yaml").chmod(0o640)
    Path("train.yaml").unlink()
    Path("train.yaml").symlink_to("real.yaml")
    fix("bf16")
    assert Path("train.yaml").is_symlink()
    assert "amp: True" in Path("real.yaml").read_text()
    assert Path("real.yaml").stat().st_mode & 0o777 == 0o640


def test_a_format_that_sleeps_beside_a_switch_is_part_of_the_line_to_type() -> None:
    Path("train.yaml").write_text("use_amp: False\namp_dtype: float16\n")
    report = convert_to_json_data(check_settings("./train.yaml", accelerate="./launch.yaml", variables={}))
    first = report["conflicts"][0]["ways"][0]
    assert first["precision"] == "bf16"
    assert [line.strip() for line in first["write"].splitlines()] == ["use_amp: True", "amp_dtype: bfloat16"]


@pytest.mark.wording
def test_the_checklist_of_the_report() -> None:
    """Aligned, NaN handling, clipping, learning rate, synchronization; and the launcher's GPUs."""
    Path("radio.yaml").write_text(read_recipe("radiomap").text)
    done = doctor("./radio.yaml", "--accelerate", "launch.yaml")
    page = " ".join(done.output.split())
    assert "NaN Handling: guard: watch" in page
    assert "Gradient Clipping: 0.5" in page
    assert "Learning Rate: 1e-5" in page
    assert "Final Status: ready: halfstep train ./radio.yaml" in page
    assert "gpu_ids 1,2" in page
    assert "do: CUDA_VISIBLE_DEVICES=1,2 torchrun --nproc_per_node=2 -m halfstep train ./radio.yaml" in page


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("guard: repair\n", "guard: repair"),
        ("guard: {mode: repair}\n", "guard: repair"),
        ("guard: {mode: off}\n", "off: such steps are skipped"),
        ("guard: {spikes: warn}\n", "guard: watch"),
    ],
)
def test_the_guard_is_told_as_it_is_written(written: str, said: str) -> None:
    Path("mine.yaml").write_text("task: diffusion\n" + written)
    assert said in check_settings("./mine.yaml", variables={}).status.nan_handling
