"""From what was written to one complete recipe."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from halfstep.errors import BadRecipe, Contradiction, HalfstepError, PrecisionRefused, Unsafe
from halfstep.recipe.changes import Change, list_differences
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.resolve import ResolvedRecipe, resolve_recipe
from halfstep.recipe.schema import Also, DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.recipe.strict_yaml import dump_recipe_yaml, parse_yaml


class Data(DataOptions):
    path: Annotated[str, Also("data_dir")] = "data"
    palette: list[list[int]] | None = None


SCHEMA: Any = Recipe[ModelOptions, Data, LossOptions]
BASE = "task: t\ntrain: {epochs: 3}\n"


def resolved(text: str, *line: str) -> ResolvedRecipe:
    return resolve_recipe(parse_yaml(text, "file"), SCHEMA, parse_typed_settings(line, SCHEMA), "mine")


def test_defaults_are_filled_in_and_chance_is_recorded() -> None:
    one, other = resolved(BASE), resolved(BASE)
    assert one.recipe.run.dir == "runs/mine"
    assert 0 <= one.recipe.train.seed < 2**31
    assert one.recipe.train.seed != other.recipe.train.seed
    assert one.drawn == {"train.seed", "data.split"}
    given = resolved(BASE, "--seed", "0", "run.dir=/tmp/x")
    assert (given.recipe.train.seed, given.recipe.run.dir, given.drawn) == (0, "/tmp/x", {"data.split"})


@pytest.mark.wording
def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(BadRecipe) as caught:
        resolved("task: 3\ntrian: {epochs: 3}\nbatchsize: 4\noptimizer: {lr: -1, name: adamv}\ntrain: {wrokers: 2}")
    said = str(caught.value)
    for line in (
        "6 mistakes",
        "task is 3; allowed: text",
        "trian is not known; did you mean train?",
        "batchsize is not known; did you mean train.batch_size?",
        "optimizer.lr is -1; allowed: a number above 0",
        "optimizer.name is 'adamv'; did you mean adamw?",
        "train.wrokers is not known; did you mean train.num_workers?",
    ):
        assert line in said, said


@pytest.mark.wording
def test_a_value_that_fits_none_of_several_types_is_one_mistake() -> None:
    with pytest.raises(BadRecipe) as caught:
        resolved("task: t\ntrain: {epochs: 1, num_workers: some}")
    assert "mistakes" not in str(caught.value)
    assert "train.num_workers is 'some'" in str(caught.value)
    assert "an integer of at least 0 or auto" in str(caught.value)


@pytest.mark.wording
def test_many_mistakes_and_long_values_stay_short() -> None:
    with pytest.raises(BadRecipe) as caught:
        resolved(BASE + "".join(f"unknown_{n}_{'x' * 500}: 1\n" for n in range(200)) + f"about: [{'y' * 5000}]")
    lines = str(caught.value).splitlines()
    assert len(lines) <= 13
    assert max(map(len, lines)) <= 160
    assert "and 191 more" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "note"),
    [
        ("precision: bf16", "bf16", ""),
        ("precision: bf16-mixed", "bf16", "precision='bf16-mixed' is read as bf16"),
        ("precision: 16", "fp16", "precision=16 is read as fp16"),
        ("precision: no", "fp32", "precision='no' is read as fp32"),
        ("trainer: {precision: bf16-mixed}", "bf16", "read as bf16"),
        ("trainer: {amp: true, fp16: true}", "fp16", "read as fp16"),
        ("use_amp: True\namp_dtype: bfloat16", "bf16", "use_amp=True with amp_dtype='bfloat16' is read as bf16"),
        ("use_amp: False\namp_dtype: bfloat16", "fp32", "use_amp=False is read as fp32"),
        ("use_amp: True", "amp", "use_amp=True names no format: bf16 if the device has it, else fp16"),
        ("amp: true\nbf16: true", "bf16", "read as bf16"),
        ("fp32: true", "fp32", ""),
        ("fp32: yes", "fp32", "fp32='yes' is read as fp32"),
        ("fp32: 'true'", "fp32", "read as fp32"),
        ("use_amp: bf16", "bf16", "use_amp='bf16' is read as bf16"),
        ("precision: bf16\ntrainer: {precision: bf16-mixed}", "bf16", ""),
        ("precision: bf16-mixed\ntraining: {precision: bf16}", "bf16", "read as bf16"),
        ("use_amp: true\ntrainer: {use_amp: yes}", "amp", "names no format"),
        ("precision: float32\nfp32: true", "fp32", "read as fp32"),
        ("precision: 32\nfp32: true", "fp32", "read as fp32"),
        ("amp: false\namp_dtype: bfloat16", "fp32", "amp=False is read as fp32"),
        ("use_amp: false\nprecision_type: bf16", "fp32", "use_amp=False is read as fp32"),
        ("bf16: auto", "auto", ""),
        ("fp16: {enabled: true}", "fp16", "read as fp16"),
        ("mixed_precision: true\nprecision_type: bf16", "bf16", "read as bf16"),
        ("", "auto", ""),
    ],
)
def test_precision_as_people_write_it(text: str, name: str, note: str) -> None:
    found = resolved(BASE + text)
    assert found.recipe.precision == name
    assert note in "\n".join(found.notes)
    assert bool(found.notes) == bool(note)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("precision: bf16\nfp16: true", ""),
        ("amp: false\nbf16: true", ""),
        ("precision: bf16\ntrainer: {precision: 16-mixed}", ""),
        ("precision: bf16\nfp32: true", ""),
        ("", "--bf16 --fp16"),
        ("", "--fp32 --precision bf16"),
        ("", "--precision bf16 --precision fp16"),
        ("", "--mixed_precision bf16 --precision_type fp16"),
        ("batch_size: 3\ntraining: {batch_size: 4}", ""),
        ("num_epochs: 4", ""),
        ("optimizer: {lr: 1, learning_rate: 2}", ""),
    ],
)
def test_contradictions_end_with_78(text: str, line: str) -> None:
    with pytest.raises(Contradiction) as caught:
        resolved(BASE + text, *line.split())
    assert caught.value.exit_code == 78
    assert "do: delete" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("precision: fp32", "--bf16", "bf16"),
        ("precision: bf16", "--mixed_precision --precision_type fp16", "fp16"),
        ("precision: fp32", "--mixed_precision", "amp"),
        ("precision: auto", "--amp", "amp"),
        ("precision: amp", "--amp", "amp"),
        ("precision: bf16", "--mixed_precision", "bf16"),
        ("use_amp: false\namp_dtype: bfloat16", "use_amp=True", "bf16"),
        ("use_amp: true\namp_dtype: bfloat16", "amp_dtype=float16", "fp16"),
        ("use_amp: true\namp_dtype: bfloat16", "use_amp=False", "fp32"),
        ("amp: true\nbf16: true", "--precision fp32", "fp32"),
    ],
)
def test_the_command_line_wins_and_says_so(text: str, line: str, name: str) -> None:
    found = resolved(BASE + text, *line.split())
    assert found.recipe.precision == name
    changed = resolved(BASE + text).recipe.precision != name
    assert any("from the command line overrides" in note for note in found.notes) == changed


@pytest.mark.wording
def test_words_that_mean_no_precision_of_a_run() -> None:
    with pytest.raises(PrecisionRefused):
        resolved(BASE + "precision: bf16-true")
    with pytest.raises(HalfstepError, match="fp17"):
        resolved(BASE + "precision: fp17")
    with pytest.raises(BadRecipe, match="precision has a list"):
        resolved(BASE + "precision: [bf16]")


@pytest.mark.wording
def test_flat_words_go_to_their_place() -> None:
    found = resolved(
        "task: t\nbatch_size: 8\nnum_epochs: 100\nlearning_rate: 1.5e-3\ncompile_model: True\n"
        "early_stopping_patience: 20\ndata_dir: here\noptimizer: sgd\ntraining: {num_workers: 4}\n"
        "data: {bad_samples: 0}"
    )
    recipe = found.recipe
    assert (recipe.train.batch_size, recipe.train.epochs, recipe.optimizer.lr) == (8, 100, 1.5e-3)
    assert (recipe.train.compile, recipe.evaluate.patience, recipe.data.path) == (True, 20, "here")
    assert (recipe.optimizer.name, recipe.train.num_workers, recipe.data.bad_samples) == ("sgd", 4, 0)
    assert "num_epochs is read as train.epochs" in found.notes[0]
    with pytest.raises(BadRecipe, match=r"trainer\.max_foo is not known"):
        resolved(BASE + "trainer: {max_foo: 3}")
    with pytest.raises(BadRecipe, match=r"did you mean schedule\.patience or evaluate\.patience"):
        resolved(BASE + "patience: 3")


@pytest.mark.wording
def test_epochs_and_steps_replace_each_other_on_the_command_line_only() -> None:
    found = resolved(BASE, "--steps", "7")
    assert (found.recipe.train.epochs, found.recipe.train.steps) == (None, 7)
    assert found.notes == ["train.steps=7 replaces the recipe's train.epochs=3"]
    with pytest.raises(BadRecipe, match="both"):
        resolved("task: t\ntrain: {epochs: 3, steps: 7}")
    with pytest.raises(Contradiction, match=r"both given(.|\n)*leave out --epochs 2, or --steps 7"):
        resolved(BASE, "--steps", "7", "--epochs", "2")
    with pytest.raises(BadRecipe, match="neither"):
        resolved("task: t")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss_scale: {init_scale: 0.5}", "floor <= init_scale <= cap"),
        ("loss_scale: {cap: 5}", "floor <= init_scale <= cap"),
        ("schedule: {name: plateau}\nevaluate: {every_epochs: 9}", "plateau"),
        ("optimizer: {lr: .inf}", "optimizer.lr is inf"),
        ("optimizer: {lr: 1e-400}", "optimizer.lr is 0.0"),
        ("data: {path: '${oc.env:HOME}'}", "data.path is"),
        ("data: {palette: [['${x}']]}", "data.palette is"),
        ("trainer: [1]", "trainer is not known"),
        ("model: {weights: null}", "model.weights is None"),
    ],
)
def test_what_cannot_be(text: str, words: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        resolved(BASE + text)
    assert words in str(caught.value)


@pytest.mark.parametrize("folder", ["../x", "a/../../x", "..", "/tmp/../etc", "' '", '"a\\0b"'])
def test_a_folder_outside_is_unsafe(folder: str) -> None:
    with pytest.raises(Unsafe):
        resolved(f"{BASE}run: {{dir: {folder}}}")


def test_an_environment_variable_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "canary-value")
    with pytest.raises(BadRecipe) as caught:
        resolved(BASE + "about: ${TOKEN} ${oc.env:TOKEN}")
    assert "canary-value" not in str(caught.value)


TEXT = st.text(max_size=30).filter(lambda text: "${" not in text)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(about="\x85", lr=1.0, seed=2**63 - 1, freeze=["a\u2028b", "\u2029", "a\nb "])
@given(
    about=TEXT | st.sampled_from(["1e-4", "no", "true", "~", "0x1", "- a", "a: b", "#", "'", "\n", "1:30", "é", " a "]),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
    freeze=st.lists(TEXT, max_size=3),
)
def test_a_written_recipe_reads_back_to_the_same(about: str, lr: float, seed: int, freeze: list[str]) -> None:
    raw = {"task": "t", "about": about, "optimizer": {"lr": lr}, "model": {"freeze": freeze}}
    first = resolve_recipe({**raw, "train": {"epochs": 1, "seed": seed}}, SCHEMA, [], "x").recipe
    text = dump_recipe_yaml(first)
    again = resolve_recipe(parse_yaml(text, "file"), SCHEMA, [], "another").recipe
    assert again == first, list_differences(first, again)
    assert dump_recipe_yaml(again) == text


def test_the_written_recipe_means_the_same_to_other_readers() -> None:
    import yaml

    recipe = resolved(BASE + "optimizer: {lr: 1e-7}\nabout: no\ndata: {palette: [[0, 0, 0], [255, 0, 0]]}").recipe
    text = dump_recipe_yaml(recipe)
    assert yaml.safe_load(text)["optimizer"]["lr"] == 1e-7
    assert "palette: [[0, 0, 0], [255, 0, 0]]" in text
    assert max(map(len, text.splitlines())) <= 120


def test_differences_are_lines() -> None:
    one, other = resolved(BASE, "--seed", "1").recipe, resolved(BASE, "--seed", "1", "--lr", "0.2", "--compile").recipe
    assert list_differences(one, one) == []
    changed = list_differences(one, other)
    assert changed == [Change("optimizer.lr", 0.001, 0.2), Change("train.compile", False, True)]
    assert [str(one) for one in changed] == ["optimizer.lr: 0.001 -> 0.2", "train.compile: false -> true"]
    assert [str(one) for one in list_differences({"a": 1}, {"a": True, "b": None})] == [
        "a: 1 -> true",
        "b: (absent) -> null",
    ]
    assert list_differences(one, other, ignore={"optimizer.lr"}) == changed[1:]


def test_a_recipe_is_resolved_quickly_and_without_torch() -> None:
    resolved(BASE)
    began = time.process_time()
    for _ in range(20):
        resolved(BASE + "use_amp: true\nbatch_size: 3", "--lr", "0.1")
    assert (time.process_time() - began) / 20 < 0.02
    code = (
        "import sys, halfstep.recipe.resolve, halfstep.recipe.explain, halfstep.recipe.sources,"
        "halfstep.train.run_folder; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
