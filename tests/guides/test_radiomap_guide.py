"""The settings and commands of the radio-map guide: a script and a launcher that must agree."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import halfstep
from halfstep.cli import main
from halfstep.journal.jsonl import read_events
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe

SCRIPT = """
trainer:
  amp: True         # ✅ Updated: Automatic Mixed Precision enabled
  fp16: False       # ✅ Correct: FP16 managed by AMP
  lr: 1e-5          # ✅ Optimized learning rate for stability
"""
BEFORE = SCRIPT.replace("amp: True ", "amp: False")
APPLIED = """
# configs/radio_train_m.yaml
amp: True    # Enabled for BF16 mixed precision
fp16: False  # Managed by AMP
"""
LAUNCHER = """
mixed_precision: bf16     # BF16 mixed precision enabled
distributed_type: MULTI_GPU  # Multi-GPU training
gpu_ids: 1,2             # Using GPUs 1 and 2
"""
SMALL = [
    *("data.size=16", "data.samples=16", "data.val=0.25", "model.autoencoder_widths=[8,8]", "model.widths=[8,16]"),
    *("model.layers=1", "model.attention_levels=0", "model.condition_width=4", "model.sample_steps=2"),
    *("train.epochs=2", "train.batch_size=4", "train.microbatches=1", "schedule.warmup_steps=0", "train.seed=0"),
    *("run.pictures=1", "run.log_every=1", "num_workers=0"),
]
"""What makes a run take seconds on a CPU; nothing of it is in the guide."""


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    Path("configs").mkdir()
    Path("configs/radio_train_m.yaml").write_text(read_recipe("radiomap").text + SCRIPT)
    Path("default_config.yaml").write_text(LAUNCHER)


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main.build(), ["doctor", *words], env={"COLUMNS": "120"}, prog_name="halfstep")


def resolve(*words: str) -> Any:
    return resolve_run_recipe(read_recipe("configs/radio_train_m.yaml"), words).recipe


def test_the_settings_mean_what_the_guide_says() -> None:
    recipe = resolve()
    assert recipe.precision == "bf16"
    assert recipe.optimizer.lr == 1e-5
    assert recipe.train.clip_norm == 0.5
    assert recipe.model.condition == "image"


def test_the_changes_that_it_applied() -> None:
    Path("configs/radio_train_m.yaml").write_text(read_recipe("radiomap").text + APPLIED)
    assert resolve().precision == "bf16"
    Path("configs/radio_train_m.yaml").write_text("task: diffusion\ntrain: {steps: 1}\n" + APPLIED)
    assert resolve().precision == "bf16"


def test_the_recipe_alone_has_the_guides_settings() -> None:
    recipe = resolve_run_recipe(read_recipe("radiomap")).recipe
    assert (recipe.precision, recipe.optimizer.lr, recipe.train.clip_norm) == ("bf16", 1e-5, 0.5)


def test_the_status_check_of_the_guide() -> None:
    done = doctor("configs/radio_train_m.yaml", "--accelerate", "default_config.yaml")
    assert done.exit_code == 0, done.output
    page = done.output[done.output.index("=== Configuration Status Check ===") :]
    assert "✅ Configuration is properly aligned" in page
    assert "AMP: enabled (in bf16)" in page
    assert "FP16: disabled" in page
    assert "Learning Rate: 1e-5" in page
    assert "Gradient Clipping: 0.5" in page


@pytest.mark.wording
def test_the_problem_that_it_had_before() -> None:
    Path("configs/before.yaml").write_text(BEFORE)
    assert "amp: False" in BEFORE
    done = doctor("configs/before.yaml", "--accelerate", "default_config.yaml")
    assert done.exit_code == 78
    assert "configs/before.yaml, line 3" in done.output
    assert "default_config.yaml, line 2" in done.output
    assert "Configuration is not aligned: precision mismatch" in done.output
    Path("configs/before.yaml").write_text(SCRIPT)
    assert doctor("configs/before.yaml", "--accelerate", "default_config.yaml").exit_code == 0


@pytest.mark.wording
def test_the_launchers_settings_are_pointed_at_where_it_keeps_them() -> None:
    """As in ~/.cache/huggingface/accelerate/default_config.yaml."""
    Path("hf/accelerate").mkdir(parents=True)
    Path("hf/accelerate/default_config.yaml").write_text(LAUNCHER)
    found = "".join(doctor("configs/radio_train_m.yaml").output.split())
    assert "default_config.yamlexistsandwasnotcompared" in found
    assert f"do:add--accelerate{Path.cwd()}/hf/accelerate/default_config.yaml" in found


def test_it_trains_and_its_learning_rate_is_found_in_the_log() -> None:
    run = halfstep.fit("configs/radio_train_m.yaml", settings=[*SMALL, "run.dir=radiodiff_Vae"], quiet=True)
    assert run.precision == "bf16"
    assert run.steps >= 1
    assert math.isfinite(run.metrics["loss"])
    found = subprocess.run('grep "lr:" radiodiff_Vae/train.log | tail -10', shell=True, capture_output=True, text=True)
    rates = [float(line.partition("lr: ")[2].split()[0]) for line in found.stdout.splitlines()]
    told = [event["lr"] for event in read_events(run.dir / "journal.jsonl") if event["event"] == "epoch"]
    assert rates == pytest.approx(told, rel=0.01)
    assert len(rates) == 2
    assert 0 < max(rates) <= 1e-5
    assert all("img/s" in line for line in found.stdout.splitlines())
