"""Every command line and snippet of the guide to bf16 for video slots, adapted only in the program's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps
from halfstep.recipe.resolve import ResolvedRecipe
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from tests.support.movi import write_movi

CONFIGS = {
    "config.yaml": "slots_movi_e",
    "configs/integrated_v2_movi_e.yaml": "slots_movi_e",
    "configs/slotcontrast/movi_e.yaml": "slots_movi_e",
    "configs/integrated_v2_movi_e_lowmem.yaml": "slots_movi_e_lowmem",
}
"""The guide's files, and the recipes that stand for them here."""

COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "flag": ("configs/integrated_v2_movi_e.yaml --bf16", {"precision": "bf16"}),
    "several GPUs": (
        "configs/integrated_v2_movi_e_lowmem.yaml --bf16",
        {"precision": "bf16", "train.checkpoint_activations": True},
    ),
    "other optimizations": (
        "config.yaml --bf16 --use-optimizations",
        {"precision": "bf16", "train.compile": True},
    ),
    "standard": (
        "configs/slotcontrast/movi_e.yaml --bf16 --use-optimizations",
        {"precision": "bf16", "train.compile": True, "train.batch_size": 2},
    ),
    "low memory": (
        "configs/integrated_v2_movi_e_lowmem.yaml --bf16 globals.BATCH_SIZE_PER_GPU=4",
        {"precision": "bf16", "train.batch_size": 4},
    ),
    "batch and vocabulary": (
        "configs/integrated_v2_movi_e_lowmem.yaml --bf16 globals.BATCH_SIZE_PER_GPU=4 vocab_size=512",
        {"train.batch_size": 4, "model.vocabulary": 512},
    ),
}
SNIPPETS: dict[str, tuple[str, dict[str, Any]]] = {
    "precision": ("trainer:\n  precision: bf16-mixed\n", {"precision": "bf16"}),
    "clipping": (
        "trainer:\n  precision: bf16-mixed\n  gradient_clip_val: 1.0  # Increase if needed\n",
        {"precision": "bf16", "train.clip_norm": 1.0},
    ),
    "batch": ("globals:\n  BATCH_SIZE_PER_GPU: 4\n", {"train.batch_size": 4}),
    "optimizations": ("use_optimizations: true\n", {"train.compile": True}),
}
SMALL = [
    *("data.name=shapes", "data.size=16", "data.frames=2", "data.objects=2", "data.samples=20", "data.val=0.2"),
    *("model.slots=3", "model.width=8", "model.encoder_width=8", "model.heads=2", "model.vocabulary=16"),
    *("model.decoder_width=8", "model.decoder_layers=1", "train.steps=2", "schedule.warmup_steps=0", "train.seed=0"),
    *("run.pictures=1", "num_workers=0", "train.compile=false"),
]
"""What makes any of these runs take seconds on a CPU; nothing of it is in the guide. Compiling takes a minute here."""
OWN = """
task: slots
model: {decoder: autoregressive}
train: {steps: 100}
"""
"""A config of somebody's own, which the snippets are added to."""


@pytest.fixture(autouse=True)
def _configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, recipe in CONFIGS.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).write_text(read_recipe(recipe).text)


def value(recipe: Any, key: str) -> Any:
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


def resolved(line: str) -> ResolvedRecipe:
    config, *words = line.split()
    return resolve_run_recipe(read_recipe(f"./{config}"), words)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_means_what_the_guide_says(name: str) -> None:
    line, expected = COMMANDS[name]
    recipe = resolved(line).recipe
    assert {key: value(recipe, key) for key in expected} == expected


def test_the_low_memory_config_is_in_bf16_by_default() -> None:
    assert resolved("configs/integrated_v2_movi_e_lowmem.yaml").recipe.precision == "bf16"


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_means_what_the_guide_says(name: str) -> None:
    text, expected = SNIPPETS[name]
    Path("mine.yaml").write_text(OWN + text)
    found = resolved("mine.yaml")
    assert {key: value(found.recipe, key) for key in expected} == expected
    assert found.notes, "what is translated is told"


def test_what_optimizations_are_is_told() -> None:
    Path("mine.yaml").write_text(OWN + SNIPPETS["optimizations"][0])
    assert resolved("mine.yaml").notes == ["use_optimizations is read as train.compile"]
    assert "--use-optimizations is read as train.compile" in resolved(COMMANDS["standard"][0]).notes


@pytest.mark.parametrize("name", ["flag", "other optimizations", "low memory"])
def test_a_command_line_trains(name: str) -> None:
    """The line itself, then what makes it small."""
    line, expected = COMMANDS[name]
    config, *words = line.split()
    run = halfstep.fit(f"./{config}", settings=[*words, *SMALL, "run.dir=run"], quiet=True)
    assert run.precision == expected["precision"]
    assert run.steps + sum(run.skipped.values()) == 2
    assert run.steps >= 1


def test_a_snippet_trains() -> None:
    Path("mine.yaml").write_text(OWN + SNIPPETS["clipping"][0])
    run = halfstep.fit("./mine.yaml", settings=[*SMALL, "batch_size=2", "run.dir=run"], quiet=True)
    assert run.precision == "bf16"
    assert run.steps >= 1


def test_the_recipe_reads_movi_e_as_it_is_stored(tmp_path: Path) -> None:
    """Drawn clips in MOVi's shards; the split for validation is the one that has its name."""
    write_movi(tmp_path, {"train": range(6), "validation": range(6, 8)}, MovingSprites(ShapeStamps(), 8, 16, 4, 2))
    small = [word for word in SMALL if not word.startswith(("data.name", "data.val", "data.objects", "data.samples"))]
    settings = ["--data_dir", str(tmp_path), "--bf16", *small, "batch_size=2", "run.dir=run"]
    run = halfstep.fit("slots_movi_e", settings=settings, quiet=True)
    assert run.precision == "bf16"
    assert run.steps >= 1
    assert {"loss", "fg_ari", "mbo"} <= run.metrics.keys()  # there are true masks
    assert resolve_run_recipe(read_recipe("slots_movi_e"), []).recipe.data.val == "validation"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) for name in ("several GPUs", "low memory")]
)
def test_torchrun(name: str) -> None:
    """`torchrun --nproc_per_node=8`, with two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "halfstep", "train"]
    line, expected = COMMANDS[name]
    done = subprocess.run([*launch, *line.split(), *SMALL, "run.dir=run"], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "weights are bitwise equal on 2 processes" in done.stdout
    assert f"{expected.get('train.batch_size', 1)} × 2 devices" in done.stdout
