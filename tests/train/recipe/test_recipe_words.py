"""Words that people bring from elsewhere: read as they were meant, or refused with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.errors import BadRecipe, HalfstepError, Unsafe
from halfstep.train.recipe.overrides import read_flags
from halfstep.train.recipe.resolve import Resolved, resolve
from halfstep.train.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.train.recipe.strict_yaml import read_yaml

SCHEMA: Any = Recipe[ModelOptions, DataOptions, LossOptions]
BASE = "task: t\ntrain: {epochs: 3}\n"


def resolved(text: str, *line: str) -> Resolved:
    return resolve(read_yaml(text, "file"), SCHEMA, read_flags(line, SCHEMA), "mine")


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("amp: O1", "O1"),
        ("use_amp: enabled", "enabled"),
        ("fp16: O2", "O2"),
        ("fp32: full", "full"),
        ("bf16: {enabled: maybe}", "maybe"),
        ("trainer: {amp: {level: 1}}", "amp holds a dict"),
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


def test_the_runs_folder_may_be_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolved(BASE + "run: {dir: ~/runs/a}").recipe.run.dir == "/home/someone/runs/a"
    assert resolved(BASE, "run.dir=~/b").recipe.run.dir == "/home/someone/b"
    assert resolved(BASE + "run: {dir: a~b}").recipe.run.dir == "a~b"
    with pytest.raises(Unsafe, match="no such home"):
        resolved(BASE + "run: {dir: ~nobody-has-this-name/x}")


def test_seeds_have_63_bits() -> None:
    assert resolved(BASE, "--seed", str(2**63 - 1)).recipe.train.seed == 2**63 - 1
    for seed in ("-1", str(2**63)):
        with pytest.raises(BadRecipe, match=r"train\.seed"):
            resolved(BASE, "--seed", seed)


def test_lightnings_and_transformers_words_for_clipping() -> None:
    assert resolved(BASE + "trainer: {gradient_clip_val: 1.0}").recipe.train.clip_norm == 1.0
    assert resolved(BASE, "--max_grad_norm", "0.5").recipe.train.clip_norm == 0.5


def test_unknown_keys_cannot_play_with_the_terminal() -> None:
    for text in ('"\\e[31mred": 1', 'train: {"\\e[31mred": 1, epochs: 1}', '"\\e[2J": 1\n"\\e[2J": 2'):
        with pytest.raises(BadRecipe) as caught:
            resolved("task: t\n" + text)
        assert "\x1b" not in str(caught.value)
        assert "\\x1b[" in str(caught.value)
