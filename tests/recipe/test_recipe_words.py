"""Words that people bring from elsewhere: read as they were meant, or refused with what is allowed."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from halfstep.errors import BadRecipe, Contradiction, HalfstepError, Unsafe
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.resolve import ResolvedRecipe, resolve_recipe
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.recipe.strict_yaml import parse_yaml

SCHEMA: Any = Recipe[ModelOptions, DataOptions, LossOptions]
BASE = "task: t\ntrain: {epochs: 3}\n"


def resolved(text: str, *line: str) -> ResolvedRecipe:
    return resolve_recipe(parse_yaml(text, "file"), SCHEMA, parse_typed_settings(line, SCHEMA), "mine")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("amp: O1", "O1"),
        ("use_amp: enabled", "enabled"),
        ("fp16: O2", "O2"),
        ("fp32: full", "full"),
        ("bf16: {enabled: maybe}", "maybe"),
        ("trainer: {amp: {level: 1}}", "amp has a dict"),
    ],
)
def test_a_word_for_precision_that_cannot_be_read_is_an_error(text: str, given: str) -> None:
    with pytest.raises(HalfstepError) as caught:
        resolved(BASE + text)
    assert given in caught.value.given
    assert caught.value.allowed
    assert caught.value.do


@pytest.mark.parametrize(
    "line", ["use_amp=True", "use_amp=1", "use_amp=yes", "use_amp=on", "--use_amp", "--use_amp yes", "--amp 1", "--amp"]
)
def test_a_switch_on_the_line_takes_the_format_that_the_recipe_leaves(line: str) -> None:
    assert resolved(BASE + "use_amp: false\namp_dtype: bfloat16", *line.split()).recipe.precision == "bf16"
    assert resolved(BASE + "amp: False\nfp16: False", *line.split()).recipe.precision == "bf16"
    assert resolved(BASE + "amp: False\nbf16: {enabled: no}", *line.split()).recipe.precision == "fp16"


@pytest.mark.wording
def test_the_runs_folder_may_be_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolved(BASE + "run: {dir: ~/runs/a}").recipe.run.dir == "/home/someone/runs/a"
    assert resolved(BASE, "run.dir=~/b").recipe.run.dir == "/home/someone/b"
    assert resolved(BASE + "run: {dir: a~b}").recipe.run.dir == "a~b"
    with pytest.raises(Unsafe, match="no such home"):
        resolved(BASE + "run: {dir: ~nobody-has-this-name/x}")


@pytest.mark.wording
def test_seeds_have_63_bits() -> None:
    assert resolved(BASE, "--seed", str(2**63 - 1)).recipe.train.seed == 2**63 - 1
    for seed in ("-1", str(2**63)):
        with pytest.raises(BadRecipe, match=r"train\.seed"):
            resolved(BASE, "--seed", seed)


def test_lightnings_and_transformers_words_for_clipping() -> None:
    assert resolved(BASE + "trainer: {gradient_clip_val: 1.0}").recipe.train.clip_norm == 1.0
    assert resolved(BASE, "--max_grad_norm", "0.5").recipe.train.clip_norm == 0.5
    assert resolved(BASE, "trainer.gradient_clip_val=0.5").recipe.train.clip_norm == 0.5


@pytest.mark.parametrize("text", ["globals: {BATCH_SIZE_PER_GPU: 4}", "BATCH_SIZE_PER_GPU: 4"])
def test_the_batch_of_a_gpu(text: str) -> None:
    found = resolved(BASE + text)
    assert found.recipe.train.batch_size == 4
    assert any("is read as train.batch_size" in note for note in found.notes)


@pytest.mark.parametrize("word", ["globals.BATCH_SIZE_PER_GPU=4", "BATCH_SIZE_PER_GPU=4"])
def test_the_batch_of_a_gpu_on_the_line(word: str) -> None:
    assert resolved(BASE + "globals: {BATCH_SIZE_PER_GPU: 2}", word).recipe.train.batch_size == 4


@pytest.mark.wording
def test_a_batch_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(Contradiction, match="BATCH_SIZE_PER_GPU"):
        resolved("task: t\ntrain: {epochs: 3, batch_size: 8}\nglobals: {BATCH_SIZE_PER_GPU: 4}")
    with pytest.raises(BadRecipe, match=r"globals\.NUM_SLOTZ"):
        resolved(BASE + "globals: {NUM_SLOTZ: 4}")


def test_optimizations_are_compilation() -> None:
    found = resolved(BASE + "use_optimizations: true")
    assert found.recipe.train.compile
    assert found.notes == ["use_optimizations is read as train.compile"]
    assert resolved(BASE, "--use-optimizations", "--bf16").recipe.train.compile
    assert not resolved(BASE, "--use-optimizations", "false").recipe.train.compile


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("--use-optimizations", ["--use-optimizations is read as train.compile"]),
        ("--use_optimizations=true", ["--use_optimizations is read as train.compile"]),
        ("--num_epochs 4 --num_epochs 5", ["--num_epochs is read as train.epochs"]),
        (
            "globals.BATCH_SIZE_PER_GPU=4 trainer.lr=0.1",
            ["globals.BATCH_SIZE_PER_GPU is read as train.batch_size; trainer.lr is read as optimizer.lr"],
        ),
        ("--batch-size 4 lr=0.1 --train.compile --optimizer sgd", []),
    ],
)
def test_other_peoples_words_on_the_line_are_told_and_ours_are_not(line: str, notes: list[str]) -> None:
    assert resolved(BASE, *line.split()).notes == notes


def test_a_trainer_with_amp_and_a_rate() -> None:
    recipe = resolved(BASE + "trainer: {amp: True, fp16: False, lr: 1e-5}").recipe
    assert (recipe.precision, recipe.optimizer.lr) == ("bf16", 1e-5)


@pytest.mark.wording
def test_unknown_keys_cannot_play_with_the_terminal() -> None:
    for text in ('"\\e[31mred": 1', 'train: {"\\e[31mred": 1, epochs: 1}', '"\\e[2J": 1\n"\\e[2J": 2'):
        with pytest.raises(BadRecipe) as caught:
            resolved("task: t\n" + text)
        assert "\x1b" not in str(caught.value)
        assert "\\x1b[" in str(caught.value)


@pytest.mark.wording
def test_a_path_given_as_the_kind_of_a_set_is_answered_with_the_setting_for_paths() -> None:
    class Folders(DataOptions):
        name: Literal["folder", "shards"] = "folder"
        path: str = "data"

    schema: Any = Recipe[ModelOptions, Folders, LossOptions]
    with pytest.raises(BadRecipe) as caught:
        resolve_recipe(
            parse_yaml(BASE, "file"), schema, parse_typed_settings(["--data", "/photos/pets"], schema), "mine"
        )
    assert "data.path=/photos/pets" in caught.value.do
