"""The section `guard` of a recipe: its short form, its flags, and words that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep.errors import BadRecipe
from halfstep.recipe.changes import list_relevant_changes
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.resolve import resolve_recipe
from halfstep.recipe.strict_yaml import dump_recipe_yaml, parse_yaml
from tests.support.tiny_task import Tiny


def resolved(text: str = "", *words: str) -> Any:
    raw = parse_yaml(f"task: tiny\ntrain: {{steps: 3, seed: 1}}\n{text}", "recipe")
    return resolve_recipe(raw, Tiny.schema, parse_typed_settings(list(words), Tiny.schema), "recipe").recipe


def test_a_run_is_watched_unless_it_says_otherwise() -> None:
    assert resolved().guard.model_dump() == {
        "mode": "watch",
        "skips_in_a_row": 5,
        "skip_share": 0.25,
        "rollbacks": 2,
        "probation": 1000,
        "spikes": "warn",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("guard: repair", ()),
        ("guard: {mode: repair}", ()),
        ("", ("guard=repair",)),
        ("", ("guard.mode=repair",)),
        ("", ("--guard", "repair")),
        ("", ("--guard=repair",)),
        ("guard: off", ("--guard", "repair")),
        ("guard: {mode: watch}", ("guard=off", "guard=repair")),
    ],
)
def test_every_form_of_the_mode_is_read(text: str, words: tuple[str, ...]) -> None:
    assert resolved(text, *words).guard.mode == "repair"


def test_off_is_a_word_and_comes_back_as_one() -> None:
    recipe = resolved("guard: off")
    assert recipe.guard.mode == "off"
    assert resolve_recipe(parse_yaml(dump_recipe_yaml(recipe), "again"), Tiny.schema).recipe.guard.mode == "off"


@pytest.mark.wording
@pytest.mark.parametrize("words", [("--guard", "repiar"), ("guard=repiar",), ("guard.mode=repiar",)])
def test_an_unknown_mode_is_refused_with_the_nearest(words: tuple[str, ...]) -> None:
    with pytest.raises(BadRecipe, match="repiar") as caught:
        resolved("", *words)
    assert caught.value.allowed == "off, watch or repair"
    assert "repair" in caught.value.do


@pytest.mark.wording
@pytest.mark.parametrize(
    "text",
    [
        "guard: {skips_in_a_row: 0}",
        "guard: {skip_share: 1.5}",
        "guard: {skip_share: .nan}",
        "guard: {rollbacks: -1}",
        "guard: {probation: 0}",
        "guard: {mood: repair}",
        "guard: {spikes: true}",
        "guard: {spikes: refues}",
        "guard: [repair]",
        "guard: true",
    ],
)
def test_limits_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadRecipe, match="guard"):
        resolved(text)


def test_another_guard_is_no_other_run() -> None:
    old = resolved().model_dump(mode="json")
    assert list_relevant_changes(old, resolved("guard: {mode: repair, probation: 7}")) == []
    del old["guard"]
    assert list_relevant_changes(old, resolved("guard: repair")) == []
    assert list_relevant_changes(old, resolved("optimizer: {lr: 0.5}")) != []


@pytest.mark.parametrize("word", ["off", "warn", "refuse"])
def test_spikes_are_a_word_in_every_form(word: str) -> None:
    assert resolved(f"guard: {{spikes: {word}}}").guard.spikes == word
    assert resolved("", f"guard.spikes={word}").guard.spikes == word
    assert resolved("", "--spikes", word).guard.spikes == word
