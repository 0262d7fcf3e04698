"""Every command line of the ResNet-50 guide, adapted only in the program's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import halfstep
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from tests.support import forked_python

COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "FP16": (
        "--data_dir /path/to/imagenet100 --mixed_precision --precision_type fp16 --batch_size 64",
        {"precision": "fp16", "train.batch_size": 64, "data.path": "/path/to/imagenet100"},
    ),
    "BF16": (
        "--data_dir /path/to/imagenet100 --mixed_precision --precision_type bf16 --batch_size 64",
        {"precision": "bf16", "train.batch_size": 64},
    ),
    "high performance": (
        "--data_dir /mnt/ebs-volume/imagenet100 --mixed_precision --precision_type fp16 --batch_size 64 "
        "--epochs 100 --lr 0.1 --num_workers 8",
        {"precision": "fp16", "train.epochs": 100, "optimizer.lr": 0.1, "train.num_workers": 8},
    ),
    "memory optimized": (
        "--data_dir /mnt/ebs-volume/imagenet100 --mixed_precision --precision_type fp16 --batch_size 128 "
        "--epochs 100 --lr 0.15 --num_workers 8",
        {"precision": "fp16", "train.batch_size": 128, "optimizer.lr": 0.15},
    ),
    "ultra stable": (
        "--data_dir /mnt/ebs-volume/imagenet100 --mixed_precision --precision_type bf16 --batch_size 64 "
        "--epochs 100 --lr 0.1 --num_workers 8",
        {"precision": "bf16", "train.batch_size": 64, "train.epochs": 100},
    ),
    "time, FP32": ("--data_dir /path --epochs 1", {"precision": "fp32", "train.epochs": 1}),
    "time, FP16": ("--data_dir /path --epochs 1 --mixed_precision", {"precision": "fp16", "train.epochs": 1}),
    "out of memory": ("--batch_size 32 --mixed_precision", {"precision": "fp16", "train.batch_size": 32}),
    "out of memory, again": (
        "--batch_size 64 --mixed_precision --precision_type fp16",
        {"precision": "fp16", "train.batch_size": 64},
    ),
    "NaN, BF16": ("--precision_type bf16", {"precision": "bf16"}),
    "NaN, lower rate": ("--lr 0.05 --mixed_precision", {"precision": "fp16", "optimizer.lr": 0.05}),
    "more workers": ("--num_workers 16", {"train.num_workers": 16}),
    "gradient scaling": (
        "loss_scale.init_scale=65536 loss_scale.growth_factor=2.0 loss_scale.backoff_factor=0.5 "
        "loss_scale.growth_interval=2000",
        {"loss_scale.init_scale": 2.0**16, "loss_scale.growth_interval": 2000},
    ),
    "AdamW": ("optimizer.name=adamw optimizer.lr=0.001", {"optimizer.name": "adamw", "optimizer.lr": 0.001}),
    "SGD": (
        "optimizer.name=sgd optimizer.lr=0.1 optimizer.momentum=0.9",
        {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
    ),
}
SMALL = ["model.name=resnet10t", "data.size=32", "train.epochs=1", "train.seed=0", "schedule.warmup_steps=0"]
"""What makes any of these runs take seconds on a CPU; nothing of it is in the guide."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes in ImageNet's layout."""
    root, draw = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("n01440764", "n01443537"):
            (root / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = draw.integers(0, 255, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number}.jpg")
    return root


def value(recipe: Any, key: str) -> Any:
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_means_what_the_guide_says(name: str) -> None:
    line, expected = COMMANDS[name]
    found = resolve_run_recipe(read_recipe("imagenet100"), line.split())
    assert {key: value(found.recipe, key) for key in expected} == expected


TRAINED = ("BF16", "time, FP32", "gradient scaling")
"""Command lines that differ in what they train; the others are resolved above, and trained with --full."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in TRAINED else pytest.mark.full) for n in COMMANDS])
def test_a_command_line_trains(name: str, data: Path, tmp_path: Path) -> None:
    """The line itself, then what makes it small."""
    line, expected = COMMANDS[name]
    words = [str(data) if word.startswith("/") else word for word in line.split()]
    more = ["--data_dir", str(data)] if "--data_dir" not in words else []
    settings = [*words, *more, *SMALL, "batch_size=2", "num_workers=0", f"run.dir={tmp_path / 'run'}"]
    run = halfstep.fit("imagenet100", settings=settings, quiet=True)
    assert run.precision == expected.get("precision", "fp32")
    assert run.steps + sum(run.skipped.values()) == 4
    assert {"loss", "top1"} <= run.metrics.keys()


@pytest.mark.full
def test_the_command_itself(data: Path, tmp_path: Path) -> None:
    line = f"train imagenet100 --data_dir {data} --mixed_precision --precision_type bf16 --batch_size 2"
    command = [sys.executable, "-m", "halfstep", *line.split(), *SMALL, "num_workers=0", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bf16" in done.stdout


@pytest.mark.slow
def test_the_guides_script_runs(data: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "train_imagenet100.py"
    line = f"--data_dir {data} --mixed_precision --precision_type bf16 --batch_size 4 --epochs 1 --lr 0.1"
    command = [sys.executable, str(script), *line.split(), "--num_workers", "0", "--image_size", "32"]
    done = forked_python.run(command, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout
    assert "bf16: 100 %" in done.stdout
