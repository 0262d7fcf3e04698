"""Recipes that size themselves: the rules over sets and machines that are not here, and what is given always wins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.data.layout import find_layout
from halfstep.data.mask_classes import MaskCounts, infer_mask_reading
from halfstep.data.set_facts import SetFacts, collect_set_facts
from halfstep.errors import BadData, BadRecipe
from halfstep.recipe.sources import RawRecipe, read_recipe
from halfstep.recipe.strict_yaml import dump_recipe_yaml, parse_yaml
from halfstep.runs.resolve import resolve_run_recipe, summarize_choices
from halfstep.tasks.sizing import choices, classification, segmentation
from halfstep.train.machine import GIGA, Machine, detect_machine

LAPTOP, SERVER = Machine(2, 8 * GIGA), Machine(64, 256 * GIGA)
SMALL_GPU, LARGE_GPU = Machine(8, 4 * GIGA, has_accelerator=True), Machine(32, 80 * GIGA, has_accelerator=True)
EIGHT = Machine(32, 80 * GIGA, has_accelerator=True, devices=8)
MACHINES = (LAPTOP, SERVER, SMALL_GPU, LARGE_GPU, EIGHT)
SETS = (
    SetFacts(2, 100, 80), SetFacts(60, 4032, 3024), SetFacts(100, 224, 224), SetFacts(3_000, 640, 480),
    SetFacts(200_000, 1024, 768), SetFacts(40, 20, 17),
)  # fmt: skip


def values(rules: ModuleType, facts: SetFacts, machine: Machine, **given: Any) -> dict[str, Any]:
    words = {key.replace("__", "."): value for key, value in given.items()}
    return {one.key: one.value for one in rules.sized(facts, machine, words)}


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("facts", SETS, ids=lambda facts: f"{facts.images}x{facts.width}")
@pytest.mark.parametrize("rules", [segmentation, classification])
def test_every_choice_is_possible_and_has_a_reason(rules: ModuleType, facts: SetFacts, machine: Machine) -> None:
    chosen = rules.sized(facts, machine, {})
    found = {one.key: one.value for one in chosen}
    assert len(found) == len(chosen)
    assert found.keys() <= rules.KEYS
    assert all(one.reason for one in chosen)
    assert 1 <= found["train.batch_size"] <= max(2, facts.images)
    assert found["train.epochs"] >= found["evaluate.every_epochs"] >= 1
    assert 0.0 < found["data.val"] <= 0.2
    if rules is segmentation:
        assert found["data.crop"] % 32 == 0
        kept = (
            found["train.batch_size"]
            * found["data.crop"] ** 2
            * segmentation._count_activation_bytes(found["model.width"])
        )
        assert kept <= choices.MEMORY_SHARE * machine.memory


def test_a_larger_machine_takes_on_more() -> None:
    facts = SetFacts(3_000, 640, 480)
    small, large = values(segmentation, facts, LAPTOP), values(segmentation, facts, LARGE_GPU)
    assert small["model.width"] < large["model.width"]
    assert small["data.crop"] < large["data.crop"]
    small, large = values(classification, facts, LAPTOP), values(classification, facts, LARGE_GPU)
    assert small["data.size"] < large["data.size"]
    assert small["train.batch_size"] < large["train.batch_size"]


def test_a_larger_set_has_fewer_epochs_and_a_smaller_share_for_validation() -> None:
    small, large = (values(segmentation, SetFacts(n, 224, 224), LAPTOP) for n in (100, 20_000))
    assert small["train.epochs"] > large["train.epochs"]
    assert small["data.val"] > large["data.val"]


def test_little_memory_makes_batches_small() -> None:
    facts = SetFacts(3_000, 640, 480)
    found = values(segmentation, facts, SMALL_GPU, model__width=64, data__crop=512)
    assert found["train.batch_size"] < values(segmentation, facts, LARGE_GPU)["train.batch_size"]


@pytest.mark.parametrize("rules", [segmentation, classification])
def test_what_is_given_wins_and_is_reckoned_with(rules: ModuleType) -> None:
    facts = SetFacts(100, 224, 224, masks=infer_mask_reading([MaskCounts({0: 1, 1: 1, 2: 1})]))
    free = values(rules, facts, LAPTOP)
    for key in rules.KEYS & free.keys():
        assert key not in {one.key for one in rules.sized(facts, LAPTOP, {key: free[key]})}
    twice = values(rules, facts, LAPTOP, train__batch_size=2 * free["train.batch_size"])
    assert twice["train.epochs"] == pytest.approx(free["train.epochs"], rel=0.2)  # the same images in half the steps
    assert "train.epochs" not in values(rules, facts, LAPTOP, train__steps=7)
    everything: Mapping[str, Any] = dict.fromkeys(rules.KEYS, 1) | {"data.val": 0.2, "model.name": "resnet18"}
    assert rules.sized(facts, LAPTOP, everything) == []


def test_small_pictures_get_a_network_for_them() -> None:
    found = values(classification, SetFacts(500, 28, 28), LAPTOP)
    assert (found["data.size"], found["data.crop"], found["model.small_stem"]) == (32, "shift", True)
    assert "model.small_stem" not in values(classification, SetFacts(500, 300, 400), LAPTOP)


def picture(path: Path, size: tuple[int, int], values: tuple[int, ...] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.zeros((*size, 3) if not values else size, np.uint8)
    for number, value in enumerate(values):
        pixels[number * 2 : number * 2 + 2] = value
    Image.fromarray(pixels).save(path)


def photographs(root: Path, values: tuple[int, ...] = (0, 255)) -> Path:
    for number in range(6):
        picture(root / "images" / f"{number}.png", (40, 64))
        picture(root / "masks" / f"{number}.png", (40, 64), values)
    return root


def test_a_set_is_looked_at(tmp_path: Path) -> None:
    facts = collect_set_facts(find_layout(photographs(tmp_path)))
    assert (facts.images, facts.width, facts.height, facts.masks_read) == (6, 64, 40, 6)
    assert facts.masks is not None
    assert facts.masks.classes == 2


@pytest.mark.parametrize(
    ("mask", "settings"),
    [
        ((0, 255), (2, None, None)),
        ((0, 1), (2, None, None)),
        ((0, 1, 2, 255), (3, 255, None)),
        ((0, 100, 200), (3, None, [[0, 0, 0], [100, 100, 100], [200, 200, 200]])),
    ],
)
def test_masks_decide_the_classes(mask: tuple[int, ...], settings: tuple[Any, ...], tmp_path: Path) -> None:
    photographs(tmp_path, mask)
    data = resolve_run_recipe(read_recipe("segment"), ["--data_dir", str(tmp_path)]).recipe.data
    assert (data.classes, data.ignore_index, data.palette) == settings


def test_a_recipe_is_resolved_with_its_reasons_and_once(tmp_path: Path) -> None:
    photographs(tmp_path)
    resolved = resolve_run_recipe(read_recipe("segment"), ["--data_dir", str(tmp_path), "--crop", "64"])
    assert resolved.recipe.data.crop == 64
    assert resolved.recipe.train.epochs
    keys = {one.key for one in resolved.sizing}
    assert "data.crop" not in keys
    assert keys | {"train.seed", "data.split"} == resolved.drawn
    assert "epochs" in summarize_choices(resolved.sizing)[0]
    # What a run wrote down is complete: nothing is chosen again, whatever has become of the data.
    written = RawRecipe("again", parse_yaml(dump_recipe_yaml(resolved.recipe), "again"), "")
    again = resolve_run_recipe(written, ["data.path=/nowhere"])
    assert again.sizing == ()
    assert again.recipe.train.epochs == resolved.recipe.train.epochs


def test_class_folders_are_counted(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(4):
            picture(tmp_path / "train" / name / f"{number}.png", (90, 90))
        picture(tmp_path / "val" / name / "0.png", (90, 90))
    resolved = resolve_run_recipe(read_recipe("classify"), {"data.path": str(tmp_path)})
    assert resolved.recipe.data.val == "val"
    assert resolved.recipe.data.size == 64


@pytest.mark.wording
def test_a_folder_that_was_typed_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist"):
        resolve_run_recipe(read_recipe("segment"), ["--data_dir", str(tmp_path / "nothing")])
    assert resolve_run_recipe(read_recipe("segment")).recipe.train.epochs  # as for a set that nobody has seen


@pytest.mark.wording
def test_other_tasks_have_no_such_rules() -> None:
    with pytest.raises(BadRecipe, match="sizing=auto with task=diffusion"):
        resolve_run_recipe(read_recipe("diffusion_tiny"), ["sizing=auto"])


WITHOUT_TORCH = """
import sys
from pathlib import Path
from halfstep.train import machine
machine._DEV = Path(sys.argv[1])
print(machine.detect_machine("auto"), "torch" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have to ask torch")
def test_torch_is_loaded_only_where_a_driver_is(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    said = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    said.append(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert [one[-1] for one in said] == ["False", "True"]
    if not torch.accelerator.is_available():
        assert said[0][:-1] == said[1][:-1]


def test_this_machine_is_described() -> None:
    found = detect_machine("auto")
    assert found.cores >= 1
    assert found.memory > 2**28
    assert found.speed > 0
