"""A setting is declared once: the help, the docs and the JSON schema follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, create_model

import halfstep
from halfstep.draw.terminal import render_plain_text
from halfstep.page import Page
from halfstep.recipe.explain import (
    ShippedRecipe,
    build_editor_schema,
    build_json_schema,
    list_setting_rows,
    render_settings_markdown,
)
from halfstep.recipe.explain_page import build_settings_table
from halfstep.recipe.names import FOREIGN_SECTIONS, PRECISION_WORDS, parse_typed_settings
from halfstep.recipe.schema import Also, DataOptions, LossOptions, ModelOptions, Recipe, TrainOptions
from halfstep.recipe.strict_yaml import parse_yaml
from halfstep.runs.registry import build_task_schemas

SCHEMA: Any = Recipe[ModelOptions, DataOptions, LossOptions]


def shown(schemas: dict[str, Any], width: int = 80) -> str:
    """What `halfstep recipes RECIPE` says of its settings."""
    return render_plain_text(
        Page("settings", tuple(build_settings_table(list_setting_rows(schema)) for schema in schemas.values())), width
    )


def with_a_field_more() -> Any:
    """The schema as it would be, had somebody added one field to a section."""
    annotation = Annotated[int, Field(ge=3, le=9), Also("sparkles")]
    train: Any = create_model(
        "TrainOptions", __base__=TrainOptions, sparkle=(annotation, Field(5, description="Shine."))
    )
    return create_model("Recipe", __base__=SCHEMA, train=(train, train()))


def test_a_field_more_is_in_the_help_the_docs_and_the_json_schema() -> None:
    before, after = {"t": build_json_schema(SCHEMA)}, {"t": build_json_schema(with_a_field_more())}
    words = ("train.sparkle", "--sparkle", "--sparkles", "Shine.", "an integer from 3 to 9")
    for show in (shown, lambda schemas: render_settings_markdown(schemas, [])):
        assert not any(word in show(before) for word in words)
        flowing = " ".join(show(after).split())
        assert all(word in flowing for word in words[:4])
    assert words[4] in render_settings_markdown(after, [])
    assert "sparkle" not in json.dumps(build_editor_schema(before))
    assert build_editor_schema(after)["$defs"]["TrainOptions"]["properties"]["sparkle"]["maximum"] == 9
    assert parse_typed_settings(["--sparkles", "4"], with_a_field_more()) == [("train.sparkle", 4)]


def test_rows_say_type_default_and_flags() -> None:
    found = {row.key: row for row in list_setting_rows(build_json_schema(SCHEMA))}
    assert len(found) >= 40
    assert found["optimizer.lr"][1:3] == ("a number above 0", "0.001")
    assert found["optimizer.lr"].flags == ["--lr", "--learning_rate"]
    assert found["optimizer.name"].allowed.split(", ")[:4] == ["adamw", "adam", "sgd", "muon"]
    assert found["optimizer.name"].flags == ["--optimizer", "--optim"]
    assert found["evaluate.patience"].flags == ["--early_stopping_patience"]
    assert found["loss_scale.cap"].default == "16777216"
    assert (found["task"].default, found["task"].flags) == ("needed", [])
    assert all(row.doc for row in found.values())


def test_every_flag_that_is_shown_is_understood() -> None:
    for row in list_setting_rows(build_json_schema(SCHEMA)):
        for flag in row.flags:
            assert parse_typed_settings([flag, "true"], SCHEMA)[0].key == row.key


def test_one_schema_for_all_tasks_keeps_sections_of_one_name_apart() -> None:
    class Data(DataOptions):
        one: int = 1

    first: Any = Recipe[ModelOptions, Data, LossOptions]
    one = build_json_schema(first)

    class Data(DataOptions):  # type: ignore[no-redef]
        other: int

    second: Any = Recipe[ModelOptions, Data, LossOptions]
    whole = build_editor_schema({"first": one, "second": build_json_schema(second)})
    definitions = whole["$defs"]

    def data_of(task: str) -> Any:
        return definitions[definitions[task]["properties"]["data"]["$ref"].removeprefix("#/$defs/")]

    assert "one" in data_of("first")["properties"]
    assert "other" in data_of("second")["properties"]
    assert definitions["first"]["required"] == ["task"]
    assert definitions["second"]["required"] == ["task", "data"]
    assert [branch["if"]["properties"]["task"]["const"] for branch in whole["allOf"]] == ["first", "second"]
    references = {part.split('"')[0] for part in json.dumps(whole).split('"#/$defs/')[1:]}
    assert references <= set(definitions)


@pytest.mark.parametrize("path", sorted(Path(halfstep.__file__).parent.glob("recipes/*.yaml")), ids=lambda p: p.stem)
def test_editors_know_every_key_of_every_shipped_recipe(path: Path) -> None:
    content = parse_yaml(path.read_bytes(), str(path))
    definitions = build_editor_schema(build_task_schemas())["$defs"]
    properties = definitions[content["task"]]["properties"]
    assert set(content) <= set(properties)
    for key, inner in content.items():
        if isinstance(inner, dict) and key not in FOREIGN_SECTIONS:
            target = properties[key].get("$ref") or properties[key]["anyOf"][0]["$ref"]
            assert set(inner) <= set(definitions[target.removeprefix("#/$defs/")]["properties"])


def test_editors_know_the_words_that_are_translated() -> None:
    definitions = build_editor_schema({"t": build_json_schema(SCHEMA)})["$defs"]
    known = definitions["t"]["properties"]
    assert {*PRECISION_WORDS, *FOREIGN_SECTIONS, "lr", "learning_rate", "num_epochs"} <= set(known)
    assert "patience" not in known
    assert "learning_rate" in definitions["OptimizerOptions"]["properties"]
    assert {"type": "string"} in known["optimizer"]["anyOf"]
    assert "type" not in known["precision"]


def test_the_page_lists_recipes_and_fits_in_a_table() -> None:
    page = render_settings_markdown({"t": build_json_schema(SCHEMA)}, [ShippedRecipe("mine", "t", "For a | test.")])
    assert "| `mine` | t | For a \\| test. |" in page
    assert "## Settings of t" in page


def test_the_help_fits_in_80_columns() -> None:
    assert max(len(line) for line in shown({"t": build_json_schema(SCHEMA)}).splitlines()) <= 80
