"""`halfstep recipes`, and the recipes themselves against their tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import main
from halfstep.cli.recipes import list_shipped_recipes
from halfstep.json_data import convert_to_json_data
from halfstep.recipe.explain import build_docs_files
from halfstep.recipe.names import parse_typed_settings
from halfstep.recipe.resolve import ResolvedRecipe, resolve_recipe
from halfstep.recipe.sources import list_recipe_names, read_recipe, read_recipe_text
from halfstep.runs.registry import build_task_schemas, find_task_class
from tests.support.indexed_task import write_shards

ROOT = Path(__file__).parents[2]


def call(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(main.build(), ["recipes", *words], env={"COLUMNS": str(width)}, prog_name="halfstep")


def resolved(name: str, *line: str) -> ResolvedRecipe:
    found = read_recipe(name)
    schema = find_task_class(found.raw["task"]).schema
    return resolve_recipe(found.raw, schema, parse_typed_settings(line, schema), found.label)


@pytest.mark.parametrize("name", list_recipe_names())
def test_every_shipped_recipe_resolves(name: str) -> None:
    if read_recipe(name).raw["task"] == "text":
        pytest.importorskip("transformers")
    assert resolved(name).recipe.run.dir == f"runs/{name}"


PRESETS: dict[str, dict[str, Any]] = {
    "unet_fast_experiment": {"batch_size": 16, "epochs": 50, "precision": "bf16", "compile": True},
    "unet_best_quality": {"batch_size": 8, "epochs": 100, "precision": "bf16", "patience": 20},
    "unet_4gb": {"batch_size": 4, "precision": "bf16"},
    "unet_debugging": {"batch_size": 2, "epochs": 5, "precision": "fp32"},
    "unet_fast": {"precision": "bf16", "compile": True},
    "unet_stable": {"precision": "fp32", "compile": False},
    "unet": {"batch_size": 8, "epochs": 100, "precision": "auto", "lr": 1e-3},
    "imagenet100": {"batch_size": 64, "epochs": 100, "precision": "fp32", "lr": 0.1},
    "imagenet100_memory": {"batch_size": 128, "epochs": 100, "precision": "fp16", "lr": 0.15},
    "imagenet100_bf16": {"batch_size": 64, "epochs": 100, "precision": "bf16", "lr": 0.1},
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name: str) -> None:
    recipe = resolved(name).recipe
    found = {**recipe.train.model_dump(), "precision": recipe.precision}
    found |= {"patience": recipe.evaluate.patience, "lr": recipe.optimizer.lr}
    assert {key: found[key] for key in PRESETS[name]} == PRESETS[name]


def test_one_switch_turns_mixed_precision_on() -> None:
    assert resolved("unet", "use_amp=True").recipe.precision == "bf16"
    assert resolved("unet", "use_amp=False").recipe.precision == "fp32"
    assert resolved("unet", "use_amp=True", "amp_dtype=float16").recipe.precision == "fp16"
    assert resolved("unet").notes == []
    assert resolved("imagenet100", "--mixed_precision").recipe.precision == "fp16"


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits(width: int) -> None:
    done = call(width=width)
    assert done.exit_code == 0
    assert all(name in done.output for name in list_recipe_names())
    assert max(map(len, done.output.splitlines())) <= width
    assert call("list").output == call().output


def test_the_list_as_json() -> None:
    assert json.loads(call("--json").output) == {"recipes": convert_to_json_data(list_shipped_recipes())}


def test_a_recipe_is_explained_with_each_setting() -> None:
    done = call("explain", "segmentation_tiny")
    assert done.exit_code == 0
    assert "halfstep train segmentation_tiny" in done.output
    for words in ("train.batch_size", "--batch_size", "Samples per device and micro-batch.", "here: 4", "loss.dice"):
        assert words in done.output
    assert call("segmentation_tiny").output == done.output
    settings = json.loads(call("explain", "segmentation_tiny", "--json").output)["settings"]
    assert {"key", "allowed", "default", "doc", "flags"} == set(settings[0])


@pytest.mark.wording
def test_one_setting_is_explained_alone() -> None:
    done = call("explain", "unet", "lr")
    assert done.output.splitlines()[0] == "optimizer.lr"
    assert "a number above 0" in done.output
    assert "did you mean 'optimizer.lr'" in call("explain", "unet", "optimizer.lrr").output


@pytest.mark.wording
def test_the_order_of_shards_is_explained_once_they_have_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "set"
    for part in ("train", "val"):
        write_shards(data / part, 2, 60)
    refused = call("explain", "cifar10", str(data))
    assert (refused.exit_code, f"halfstep data index {data / 'train'}" in refused.output) == (65, True)
    indexed = CliRunner().invoke(main.build(), ["data", "index", str(data)])
    assert (indexed.exit_code, (data / "train" / "halfstep.index").exists()) == (0, True), "those that a run trains on"
    # imagenet100 reads folders, and would read shards with data.name=shards.
    for recipe in ("cifar10", "imagenet100"):
        said = json.loads(call("explain", recipe, str(data), "--json").output)
        assert said["order"]["order"] == {"name": "randperm", "chunk": 0, "window": 0, "lanes": 0}
        assert said["order"]["mixing"] == 0.0
        assert 1.0 < said["order"]["read_ratio"] < 9.0, "tar headers next to tiny images"
    named = call("explain", "cifar10", f"{data}/train/s-{{00..01}}.tar")
    assert (named.exit_code, "has no index yet" in named.output) == (65, True), "an index is of one set of shards"
    assert call("explain", "cifar10", "s3://").exit_code == 78, "an address is one of data, not a setting"
    window = tmp_path / "window.yaml"
    window.write_text(read_recipe_text("cifar10")[1].replace("  name: shards", "  name: shards\n  window: 3"))
    said = json.loads(call("explain", str(window), str(data), "--json").output)["order"]
    assert said["order"] == {"name": "windows", "chunk": 120, "window": 3, "lanes": 1}
    words = " ".join(call("explain", str(window), str(data)).output.split())
    assert "order: 1 chunk of 120 samples open at once" in words
    assert "bytes for each byte of a sample; z 0.0 of a step's classes" in words


def test_a_copy_never_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote unet.yaml" in call("copy", "unet").output
    text = Path("unet.yaml").read_text()
    assert read_recipe("./unet.yaml").raw == read_recipe("unet").raw
    Path("unet.yaml").write_text("mine")
    done = call("copy", "unet")
    assert (done.exit_code, Path("unet.yaml").read_text()) == (73, "mine")
    Path("folder").mkdir()
    assert call("copy", "unet", "folder").exit_code == 0
    assert Path("folder/unet.yaml").read_text() == text
    assert call("copy", "unet", "no/such/folder.yaml").exit_code == 73
    assert json.loads(call("copy", "unet", "b.yaml", "--json").output) == {"copied": "b.yaml"}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["explan", "unet"], 78, "did you mean 'explain'"),
        (["explain", "unett"], 78, "did you mean unet?"),
        (["explain"], 78, "explain which recipe?"),
        (["copy"], 78, "copy which recipe?"),
        (["explain", "no/such.yaml"], 78, "No such file"),
    ],
)
def test_mistakes(words: list[str], code: int, said: str) -> None:
    done = call(*words)
    assert done.exit_code == code
    assert said in done.output


def test_the_schema_is_json_for_editors() -> None:
    schema = json.loads(call("schema").output)
    assert {"segmentation", "classification"} <= set(schema["$defs"])
    assert json.loads((ROOT / "docs" / "recipe.schema.json").read_text())["title"] == schema["title"]


def test_the_docs_are_as_new_as_the_schema() -> None:
    for name, text in build_docs_files(build_task_schemas(), list_shipped_recipes()).items():
        assert (ROOT / "docs" / name).read_text() == text, f"docs/{name} is old: run scripts/docs"


@pytest.mark.parametrize("words", [["recipes", "explain", "unet"], ["train", "--help"], ["train", "unet", "--show"]])
def test_words_are_quick_and_need_no_torch(words: list[str]) -> None:
    code = (
        f"import sys, time; sys.argv = ['halfstep', *{words}]\n"
        "from halfstep.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or time.process_time() > 3.0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
