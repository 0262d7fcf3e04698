"""List all settings from the schema, for the command line, the docs and editors. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from halfstep.precision.names import DEFAULT
from halfstep.recipe.fields import SHORT_FOR, Json, RecipeField, RecipeFields, parse_schema_fields
from halfstep.recipe.names import FOREIGN_SECTIONS, PRECISION_WORDS
from halfstep.recipe.schema import ALSO

_TEXT = {"type": "string"}
OWN_SECTIONS = ("model", "data", "loss")
"""The sections that each task declares for itself."""


class SettingRow(NamedTuple):
    """A setting as it is displayed."""

    key: str
    allowed: str
    default: str
    doc: str
    flags: list[str]
    """The other names of the setting: its flag, and the names that other projects use."""


class ShippedRecipe(NamedTuple):
    """A recipe that ships with halfstep."""

    name: str
    task: str
    about: str


def list_setting_rows(schema: Json) -> list[SettingRow]:
    """Return a row for every setting of a task, from its JSON schema."""
    fields = parse_schema_fields(schema)
    return [_build_setting_row(setting, fields.keys_of) for setting in fields.by_key.values()]


def build_json_schema(schema: Any) -> dict[str, object]:
    """Return the JSON schema of a task's recipe; sections that may be omitted are not required."""
    # pydantic requires every section without a default, even one whose fields all have defaults.
    found: dict[str, Any] = schema.model_json_schema()
    required = [name for name in found.get("required", ()) if not _is_optional(found, name)]
    return {**found, "required": required}


def build_editor_schema(schemas: Mapping[str, Json]) -> dict[str, object]:
    """Return one JSON schema for all tasks.

    `task` selects the branch; recipes of a user's own tasks are not checked.
    """
    shared: dict[str, object] = {}
    branches = []
    for task, schema in schemas.items():
        branch, definitions = _rename_definitions(_add_other_words(schema), task, shared)
        shared |= {**definitions, task: branch}
        branches.append(
            {
                "if": {"properties": {"task": {"const": task}}, "required": ["task"]},
                "then": {"$ref": f"#/$defs/{task}"},
            }
        )
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "halfstep recipe",
        "type": "object",
        "required": ["task"],
        "properties": {"task": {"type": "string", "examples": list(schemas)}},
        "allOf": branches,
        "$defs": shared,
    }


def build_docs_files(schemas: Mapping[str, Json], shipped: Sequence[ShippedRecipe]) -> dict[str, str]:
    """Return the generated files of the docs, by name."""
    return {
        "recipes.md": render_settings_markdown(schemas, shipped),
        "recipe.schema.json": json.dumps(build_editor_schema(schemas), indent=1) + "\n",
    }


def render_settings_markdown(schemas: Mapping[str, Json], shipped: Sequence[ShippedRecipe]) -> str:
    """Return the reference page of all settings as Markdown."""
    tables = {task: list_setting_rows(schema) for task, schema in schemas.items()}
    common = [row for row in next(iter(tables.values()), []) if row.key.partition(".")[0] not in OWN_SECTIONS]
    lines = ["| recipe | task | purpose |", "|---|---|---|"]
    lines += [f"| `{one.name}` | {one.task} | {_escape_cell(one.about)} |" for one in shipped]
    parts = [_INTRODUCTION, "## Recipes that ship with halfstep", "\n".join(lines), "## Settings of every task"]
    parts.append(_render_table(common))
    for task, found in tables.items():
        own = [row for row in found if row.key.partition(".")[0] in OWN_SECTIONS]
        parts += [f"## Settings of {task}", _render_table(own)]
    return "\n\n".join(parts) + "\n"


def format_default(setting: RecipeField) -> str:
    """Return a setting's default as text, or `needed`."""
    if setting.required:
        return "needed"
    return format_setting_value(setting.default)


def format_setting_value(value: Any) -> str:
    """Return a value as text, as a recipe would have it."""
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False).strip('"')


def _build_setting_row(setting: RecipeField, words: Mapping[str, list[str]]) -> SettingRow:
    short = [setting.name] if len(words[setting.name]) == 1 else []
    section = setting.key.rpartition(".")[0]
    if setting.name in SHORT_FOR and len(words[section]) == 1:
        short = [section]
    # `--task FILE` already has another meaning: a file with the user's own task.
    flags = [f"--{word}" for word in (*short, *setting.also) if word != "task"]
    return SettingRow(setting.key, setting.allowed, format_default(setting), setting.doc, flags)


def _is_optional(schema: Json, name: str) -> bool:
    target = str(schema["properties"][name].get("$ref", "")).rpartition("/")[2]
    return bool(target) and not schema["$defs"][target].get("required")


def _add_other_words(schema: Json) -> dict[str, object]:
    """Return the schema with all names that are translated before validation."""
    # An editor validates the file as it is written. Without these it would mark names as errors that halfstep accepts.
    fields = parse_schema_fields(schema)
    other: dict[str, object] = {
        word: {"description": f"Read as {keys[0]}."} for word, keys in fields.keys_of.items() if len(keys) == 1
    }
    other |= {
        word: {"type": "object", "description": "Its settings are read as those of the top level."}
        for word in FOREIGN_SECTIONS
    }
    other |= {word: {"description": "Translated into precision."} for word in PRECISION_WORDS}
    own = {name: _allow_short_name(fields, name, field) for name, field in schema["properties"].items()}
    word = {"type": ["string", "integer", "boolean"]}
    policy = {"type": "object", "required": [DEFAULT], "additionalProperties": word}
    described = {key: value for key, value in own["precision"].items() if key != "type"}
    own["precision"] = {**described, "anyOf": [word, policy]}
    definitions = {name: _add_aliases(definition) for name, definition in schema.get("$defs", {}).items()}
    return {**schema, "properties": {**other, **own}, "$defs": definitions}


def _allow_short_name(fields: RecipeFields, name: str, field: Json) -> Json:
    """Allow `optimizer: sgd` for `optimizer: {name: sgd}`."""
    if fields.short_for(name) is None:
        return field
    return {**{key: value for key, value in field.items() if key != "$ref"}, "anyOf": [{"$ref": field["$ref"]}, _TEXT]}


def _add_aliases(definition: Json) -> Json:
    own = definition.get("properties", {})
    also = {word: {"description": f"Read as {name}."} for name, field in own.items() for word in field.get(ALSO, ())}
    return {**definition, "properties": {**also, **own}}


def _rename_definitions(schema: Json, task: str, shared: Mapping[str, object]) -> tuple[Any, dict[str, object]]:
    """Return a task's schema and its definitions; definitions that differ from another task's get the task's name."""
    content = {key: value for key, value in schema.items() if key != "$defs"}
    definitions = dict(schema.get("$defs", {}))
    # Tasks may use one name for different definitions, and the definitions of all tasks share one namespace.
    for name in [name for name in definitions if name in shared and shared[name] != definitions[name]]:
        # References are strings deep inside the schema; in the text they can be replaced at once.
        text = json.dumps([content, definitions]).replace(f'"#/$defs/{name}"', f'"#/$defs/{task}.{name}"')
        content, definitions = json.loads(text)
        definitions[f"{task}.{name}"] = definitions.pop(name)
    return content, definitions


def _render_table(found: Sequence[SettingRow]) -> str:
    lines = ["| setting | may be | default | meaning | also |", "|---|---|---|---|---|"]
    for row in found:
        also = " ".join(f"`{flag}`" for flag in row.flags)
        lines.append(
            f"| `{row.key}` | {_escape_cell(row.allowed)} | {_escape_cell(row.default)} | {_escape_cell(row.doc)} | "
            f"{also} |"
        )
    return "\n".join(lines)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


_INTRODUCTION = """\
# Recipes

A recipe is a YAML file: one complete run, as data. `scripts/docs` writes this page from the schema; edit the schema
(`src/halfstep/recipe/schema.py`, or a task's own file), not the page.

```
halfstep recipes                      # all recipes
halfstep recipes explain unet         # one recipe and its settings
halfstep recipes copy unet            # your own copy: unet.yaml
halfstep recipes copy --script unet   # a script: train_unet.py
```

Then, with your `data/images` and `data/masks`:

<!-- run: no: data of your own; docs/data.md runs such a command -->
```
halfstep train unet.yaml --bf16 train.batch_size=4 --lr 0.1
```

After RECIPE, every setting can be given as `train.batch_size=4` or as a flag, `--batch_size 4`, where its last name is
its own; the column *also* lists the flags. The command line wins over the recipe; where it replaces the recipe's
precision or length, it says so.

Precision can be written as other projects write it, in the recipe or on the command line: `precision: bf16-mixed`,
`use_amp` with `amp_dtype`, `amp`, `fp16`, `bf16`, `fp32`, `tf32`, `mixed_precision` with `precision_type`, also inside
`trainer:`. It is translated and reported; settings that contradict each other end with exit code 78. Flags of
Lightning, transformers, diffusers and timm, such as `--max_epochs` or `--per_device_train_batch_size`, are read as the
settings that they mean, and reported too.

In Python: `halfstep.fit("unet.yaml")`, or `halfstep.fit({...})` with the content of such a file as a dict, nested or
with dotted keys.

The file is read strictly: an unknown key, a duplicate key or a wrong type is an error that suggests the nearest valid
one; anchors, tags and `${...}` are refused; `1e-4` is a number; `no` is text. For help in an editor, start the file
with `# yaml-language-server: $schema=PATH`, where PATH is the output of `halfstep recipes schema > PATH`."""
