"""Recipes of large language models: three updates with the sizes cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("peft")

from typer.testing import CliRunner

import halfstep
from halfstep.cli.main import build
from halfstep.files import read_json

CUT = [
    *("model.width=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "model.vocabulary=640"),
    *("data.name=python", "data.samples=4", "data.vocabulary=512", "data.length=32", "train.steps=3"),
    *("train.batch_size=2", "schedule.warmup_steps=1", "train.strict=true", "num_workers=0"),
]


@pytest.mark.parametrize("recipe", ["llama_8b", "qwen_lora_7b"])
def test_three_updates_with_the_sizes_cut(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    halfstep.fit(recipe, settings=[*CUT, f"run.dir={run}"], quiet=True)
    result = read_json(run / "result.json")
    assert result["steps"] == 3
    assert math.isfinite(result["metrics"]["loss"])


@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        ("llama_8b", 1),
        pytest.param("llama_8b", 8, marks=pytest.mark.full),
        pytest.param("qwen_lora_7b", 1, marks=pytest.mark.full),
        pytest.param("qwen_lora_7b", 8, marks=pytest.mark.full),
    ],
)
def test_an_estimate_on_many_gpus_with_the_sizes_cut(recipe: str, world: int) -> None:
    words = ["estimate", recipe, "--device", "h100", "--world", str(world), "--json", *CUT]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output
    assert "not verified" in done.output
