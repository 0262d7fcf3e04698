"""Every tiny recipe that ships, in every precision, and on two processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import halfstep
from halfstep.journal.jsonl import read_events
from halfstep.recipe.sources import list_recipe_names, read_recipe
from halfstep.runs.registry import list_task_names

TINY = [name for name in list_recipe_names() if name.endswith("_tiny")]
SMALLER = ["train.steps=3", "train.batch_size=2", "data.samples=16", "run.pictures=1", "num_workers=0"]
"""fp16 convolutions are slow on a CPU: fewer samples, and smaller ones."""
SIZES = {
    "segmentation": ["data.size=16", "data.crop=16"],
    "classification": ["data.size=32"],
    "text": ["data.length=32", "data.vocabulary=320", "data.samples=4"],
}
"""The ResNet halves an image five times. On maps of 1 × 1, torch 2.13's bf16 convolution with a stride of 2 (oneDNN,
AVX-512) takes the gradient of one column of its 3 × 3 kernel from memory that nothing has written: often 0, now and
then NaN."""


def smaller(name: str) -> list[str]:
    return [*SMALLER, *SIZES.get(read_recipe(name).raw["task"], ["data.size=16"])]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "journal.jsonl") if event["event"] == kind]


def test_every_task_has_one() -> None:
    assert len(TINY) >= 4
    assert {read_recipe(name).raw["task"] for name in TINY} == set(list_task_names())


IN_CI = {("classification_tiny", "fp32"), ("segmentation_tiny", "fp16"), *((name, "bf16") for name in TINY)}
"""Every recipe and every precision; the other combinations run with --full."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in IN_CI else pytest.mark.full)
        for name in TINY
        for precision in ("fp32", "bf16", "fp16")
    ],
)
def test_it_trains_in(name: str, precision: str, tmp_path: Path) -> None:
    if name == "text_tiny":
        pytest.importorskip("transformers")
    # In three steps a scale of 65,536 may not have found its place.
    scale = ["loss_scale.init_scale=1024"] if precision == "fp16" else []
    settings = [*smaller(name), f"--{precision}", *scale, f"run.dir={tmp_path / 'run'}"]
    run = halfstep.fit(name, settings=settings, quiet=True)
    assert run.precision == precision
    assert run.steps + sum(run.skipped.values()) == 3
    assert run.steps >= 1
    assert math.isfinite(run.metrics["loss"])
    if precision != "fp32":
        [seen] = events(run.dir, "precision_check")
        assert seen["expected"] == precision
        assert seen["share"] >= 0.9
    assert all(tensor.isfinite().all() for tensor in load_file(run.dir / "last.safetensors").values())


SCRIPT = """
import json, sys
import torch.distributed as dist
import halfstep

dist.init_process_group("gloo")
for name, settings in json.loads(sys.argv[1]).items():
    halfstep.fit(name, settings=settings, quiet=True)
dist.destroy_process_group()
"""
"""What torchrun starts: loading torch twice for each recipe would take most of the time."""


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def on_two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder with a run of every tiny recipe, each trained by the same two processes."""
    root = tmp_path_factory.mktemp("on_two")
    (root / "every.py").write_text(SCRIPT)
    runs = {name: [*smaller(name), "--bf16", f"world={request.param}", f"run.dir={root / name}"] for name in TINY}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(root / "every.py")]
    done = subprocess.run([*launch, json.dumps(runs)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TINY)
def test_two_processes_end_with_the_same_weights(name: str, on_two: Path) -> None:
    folder = on_two / name
    assert any("weights are bitwise equal on 2 processes" in note["text"] for note in events(folder, "note"))
    [begun], [seen], [end] = (events(folder, kind) for kind in ("start", "precision_check", "end"))
    assert begun["batch"]["devices"] == 2
    assert begun["precision"]["chosen"] == seen["expected"] == "bf16"
    assert seen["share"] >= 0.9
    assert end["reason"] == "finished"
    assert any(step["applied"] for step in events(folder, "step"))
    assert math.isfinite(events(folder, "epoch")[-1]["val"]["loss"])
    assert all(tensor.isfinite().all() for tensor in load_file(folder / "last.safetensors").values())
