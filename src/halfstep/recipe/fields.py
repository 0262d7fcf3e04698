"""List the settings of a task's recipe, as its JSON schema declares them. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from halfstep.recipe.schema import ALLOWED, ALSO, REFUSED

Json = Mapping[str, Any]
SHORT_FOR = ("name", "mode")
"""The settings that the name of their section can stand for: `optimizer: sgd`, `--guard repair`."""


@dataclass(frozen=True)
class RecipeField:
    """One setting: its key, its documentation and its allowed values."""

    key: str
    """The dotted key, such as `train.batch_size`."""
    doc: str
    allowed: str
    """The allowed values, in words."""
    default: Any
    required: bool
    also: tuple[str, ...]
    """The names that other projects use for it."""
    is_switch: bool
    """Whether it is true or false, so that its flag needs no value."""
    is_text: bool
    """Whether a typed value is always text, including `16`."""
    may_be_null: bool
    is_list_of_text: bool
    """Whether a single typed word means a list of one."""
    refused: Json
    """The values that are refused with a reason of their own."""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class RecipeFields:
    """The settings of a task's recipe, and the words that stand for them."""

    by_key: dict[str, RecipeField]
    """The settings by dotted key."""
    keys_of: dict[str, list[str]]
    """The keys that each short word can mean."""
    sections: list[str]
    """The keys that contain other keys."""
    top: list[str]
    """The keys at the top level: sections, and settings outside of any."""

    def short_for(self, section: str) -> str | None:
        """Return the key that the name of a section can stand for, or None."""
        return next((key for name in SHORT_FOR if (key := f"{section}.{name}") in self.by_key), None)

    def allowed(self, key: str, otherwise: str) -> str:
        """Return the allowed values of a setting in words, or `otherwise` if there is no such setting."""
        return self.by_key[key].allowed if key in self.by_key else otherwise

    def reason_against(self, key: str, value: object) -> str | None:
        """Return why a setting does not take this value, if there is a separate reason."""
        return self.by_key[key].refused.get(str(value).lower()) if key in self.by_key else None


# pydantic builds the JSON schema anew on every call.
@lru_cache(maxsize=64)
def build_recipe_fields(schema: Any) -> RecipeFields:
    """Return the settings of a `Recipe[...]` class."""
    return parse_schema_fields(schema.model_json_schema())


def parse_schema_fields(schema: Json) -> RecipeFields:
    """Return the settings that a JSON schema declares."""
    nodes = list(_iterate_schema(schema, schema, ""))
    by_key = {key: _build_field(key, node, required) for key, node, required in nodes if not _is_section(node)}
    keys_of: defaultdict[str, list[str]] = defaultdict(list)
    for key, setting in by_key.items():
        for word in (setting.name, *setting.also):
            keys_of[word].append(key)
        if setting.name in SHORT_FOR:
            keys_of[key.rpartition(".")[0]].append(key)
    sections = [key for key, node, _ in nodes if _is_section(node)]
    return RecipeFields(by_key, dict(keys_of), sections, list(schema["properties"]))


def describe_allowed_values(node: Json) -> str:
    """Return what a part of a JSON schema allows, in words."""
    if ALLOWED in node:
        return str(node[ALLOWED])
    if "enum" in node:
        return _join_options([str(value) for value in node["enum"]])
    if "const" in node:
        return str(node["const"])
    if "anyOf" in node:
        options = [describe_allowed_values(option) for option in node["anyOf"]]
        if "null" in options and any(option.startswith("a list") for option in options):
            return f"null or {_join_options([option for option in options if option != 'null'])}"
        return _join_options(options)
    kind = "object" if "$ref" in node else node.get("type")
    if kind in ("integer", "number"):
        words = {
            "exclusiveMinimum": "above",
            "minimum": "of at least",
            "exclusiveMaximum": "below",
            "maximum": "at most",
        }
        if "minimum" in node and "maximum" in node:
            limits = f"from {node['minimum']:g} to {node['maximum']:g}"
        else:
            limits = " and ".join(f"{word} {node[limit]:g}" for limit, word in words.items() if limit in node)
        return f"{'an integer' if kind == 'integer' else 'a number'} {limits}".rstrip()
    if kind == "array":
        items = describe_allowed_values(node.get("items", {}))
        for one, many in {"an integer": "integers", "a number": "numbers", "a list": "lists"}.items():
            items = many + items.removeprefix(one) if items.startswith(one) else items
        return f"a list of {items}"
    return {"boolean": "true or false", "string": "text", "null": "null", "object": "keys with values"}.get(
        str(kind), "anything"
    )


def _iterate_schema(root: Json, node: Json, prefix: str) -> Iterator[tuple[str, Json, bool]]:
    """Yield the key of every section and setting, its part of the schema, and whether it is required."""
    required = node.get("required", ())
    for name, field in node.get("properties", {}).items():
        target = root.get("$defs", {}).get(str(field.get("$ref", "")).rpartition("/")[2], {})
        yield f"{prefix}{name}", {**target, **field}, name in required
        yield from _iterate_schema(root, target, f"{prefix}{name}.")


def _is_section(node: Json) -> bool:
    # A section without its own fields has empty properties.
    return "properties" in node


def _build_field(key: str, node: Json, required: bool) -> RecipeField:
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    return RecipeField(
        key=key,
        doc=" ".join(str(node.get("description", "")).split()),
        allowed=describe_allowed_values(node),
        default=node.get("default"),
        required=required,
        also=tuple(node.get(ALSO, ())),
        is_switch=kinds == {"boolean"},
        is_text=kinds - {"null"} == {"string"},
        may_be_null="null" in kinds,
        refused=node.get(REFUSED, {}),
        is_list_of_text=node.get("type") == "array" and node.get("items", {}).get("type") == "string",
    )


def _join_options(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
