"""Every setting and command of the U-Net guide, adapted only in the program's name."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import halfstep
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe

SMALL = ["model.width=4", "model.depth=2", "data.crop=16", "data.tile=16", "data.overlap=4", "run.pictures=0"]
"""What makes any of these runs take seconds on a CPU; nothing of it is in the guide."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images with masks, as the guide's reader has them."""
    root = tmp_path_factory.mktemp("unet")
    draw = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (root / folder).mkdir()
    for number in range(10):
        mask = np.zeros((16, 16), np.uint8)
        mask[4 : 6 + number, 3:11] = 255
        image = draw.integers(0, 80, (16, 16, 3), np.uint8) + mask[..., None] // 2
        Image.fromarray(image).save(root / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
    return root


def resolve(settings: dict[str, Any] | list[str], recipe: str = "unet") -> Any:
    return resolve_run_recipe(read_recipe(recipe), settings).recipe


def train(data: Path, folder: Path, settings: dict[str, Any], recipe: str = "unet") -> halfstep.Run:
    small = dict(pair.split("=") for pair in SMALL)
    small = {key: yaml.safe_load(value) for key, value in small.items()}
    limits = {"train.steps": 2, "data.path": str(data), "run.dir": str(folder), "train.seed": 0, "compile_model": False}
    return halfstep.fit(recipe, settings={**small, **settings, **limits, "num_workers": 0}, quiet=True)


SNIPPETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quick start: one line": ({"use_amp": True}, {"precision": "bf16"}),
    "configuration": ({"use_amp": False, "amp_dtype": "bfloat16"}, {"precision": "fp32"}),
    "bfloat16": ({"use_amp": True, "amp_dtype": "bfloat16"}, {"precision": "bf16"}),
    "float16": ({"use_amp": True, "amp_dtype": "float16"}, {"precision": "fp16"}),
    "best performance": (
        {"batch_size": 16, "compile_model": True, "use_amp": True, "amp_dtype": "bfloat16"},
        {"precision": "bf16", "train.batch_size": 16, "train.compile": True},
    ),
    "maximum batch size": (
        {"batch_size": 32, "use_amp": True, "amp_dtype": "bfloat16"},
        {"precision": "bf16", "train.batch_size": 32},
    ),
    "older GPU": (
        {"batch_size": 8, "use_amp": True, "amp_dtype": "float16"},
        {"precision": "fp16", "train.batch_size": 8},
    ),
    "maximum stability": ({"batch_size": 8, "use_amp": False}, {"precision": "fp32", "train.batch_size": 8}),
    "more memory": ({"batch_size": 16, "use_amp": True}, {"precision": "bf16", "train.batch_size": 16}),
    "less memory": ({"batch_size": 8, "use_amp": False}, {"precision": "fp32", "train.batch_size": 8}),
    "more workers": ({"num_workers": 4}, {"train.num_workers": 4}),
    "higher learning rate": ({"learning_rate": 1.5e-3}, {"optimizer.lr": 1.5e-3}),
    "fast config": (
        {"use_amp": True, "amp_dtype": "bfloat16", "compile_model": True},
        {"precision": "bf16", "train.compile": True},
    ),
    "stable config": ({"use_amp": False, "compile_model": False}, {"precision": "fp32", "train.compile": False}),
    "fast iteration": (
        {"batch_size": 16, "num_epochs": 50, "use_amp": True, "amp_dtype": "bfloat16", "compile_model": True},
        {"precision": "bf16", "train.batch_size": 16, "train.epochs": 50, "train.compile": True},
    ),
    "best quality": (
        {
            "batch_size": 8,
            "num_epochs": 100,
            "use_amp": True,
            "amp_dtype": "bfloat16",
            "early_stopping_patience": 20,
        },
        {"precision": "bf16", "train.batch_size": 8, "train.epochs": 100, "evaluate.patience": 20},
    ),
    "4 GB": (
        {"batch_size": 4, "use_amp": True, "amp_dtype": "bfloat16"},
        {"precision": "bf16", "train.batch_size": 4},
    ),
    "debugging": (
        {"batch_size": 2, "num_epochs": 5, "use_amp": False},
        {"precision": "fp32", "train.batch_size": 2, "train.epochs": 5},
    ),
}
PRESETS = {
    "fast iteration": "unet_fast_experiment",
    "best quality": "unet_best_quality",
    "4 GB": "unet_4gb",
    "debugging": "unet_debugging",
    "fast config": "unet_fast",
    "stable config": "unet_stable",
}


def value(recipe: Any, key: str) -> Any:
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_means_what_the_guide_says(name: str) -> None:
    settings, expected = SNIPPETS[name]
    recipe = resolve(settings)
    assert {key: value(recipe, key) for key in expected} == expected


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_as_a_yaml_file_means_the_same(name: str, tmp_path: Path) -> None:
    settings, expected = SNIPPETS[name]
    own = {"batch_size": 8, "num_epochs": 100, "amp_dtype": "bfloat16"} | settings
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"task": "segmentation", **own}))
    recipe = resolve({}, str(path))
    assert {key: value(recipe, key) for key in expected} == expected


@pytest.mark.parametrize("name", PRESETS)
def test_the_guides_presets_are_recipes(name: str) -> None:
    recipe, (_, expected) = resolve({}, PRESETS[name]), SNIPPETS[name]
    assert {key: value(recipe, key) for key in expected} == expected


@pytest.mark.parametrize("name", ["quick start: one line", "float16", "maximum stability"])
def test_a_snippet_trains(name: str, data: Path, tmp_path: Path) -> None:
    settings, expected = SNIPPETS[name]
    run = train(data, tmp_path / "run", settings | {"batch_size": 2})
    assert run.precision == expected["precision"]
    assert run.steps + sum(run.skipped.values()) == 2
    log = (run.dir / "train.log").read_text()
    assert "Epoch 1 Summary:" in log
    assert "Train Loss:" in log
    assert "Val IoU:" in log


def test_the_guides_script_runs(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python train_unet.py`, with `use_amp` on."""
    script = Path(__file__).parents[2] / "examples" / "train_unet.py"
    module = runpy.run_path(str(script))
    small = {key: yaml.safe_load(value) for key, value in (pair.split("=") for pair in SMALL)}
    module["config"].update(small | {"num_epochs": 1, "batch_size": 2, "num_workers": 0})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_unet.py", str(data)])
    module["main"]()
    assert (tmp_path / "runs" / "unet" / "best.safetensors").exists()


@pytest.mark.full
def test_the_command_line_of_the_summary(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfstep", "train", "unet", "use_amp=True", "--data_dir", str(data), *SMALL]
    more = ["train.steps=1", "batch_size=2", "num_workers=0", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bf16 (bfloat16)" in done.stdout
