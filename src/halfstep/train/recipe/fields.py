"""The settings of a task's recipe, one by one, as its JSON schema declares them. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from halfstep.train.recipe.schema import ALSO

Json = Mapping[str, Any]
SHORT_FOR = ("name", "mode")
"""Settings that their section's word stands for: `optimizer: sgd`, `--guard repair`."""


@dataclass(frozen=True)
class Setting:
    """One setting: where it is, what it may be, and what it is for."""

    key: str
    """Dotted, as in `train.batch_size`."""
    doc: str
    allowed: str
    """What may stand there, in words."""
    default: Any
    required: bool
    also: tuple[str, ...]
    """Other people's names for it."""
    is_switch: bool
    """Whether it is true or false, so that its flag needs no value."""
    is_text: bool
    """Whether anything typed is meant as text, also `16`."""
    may_be_null: bool
    is_list_of_text: bool
    """Whether a word typed alone is a list of one."""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@lru_cache(maxsize=64)
def settings_of(schema: Any) -> dict[str, Setting]:
    """The settings of a `Recipe[...]` class by dotted key."""
    return settings_in(schema.model_json_schema())


def settings_in(schema: Json) -> dict[str, Setting]:
    """The settings that a JSON schema declares, by dotted key."""
    return {setting.key: setting for setting in _walk(schema, schema, "")}


def sections_of(schema: Any) -> list[str]:
    """The keys that hold other keys."""
    return list(dict.fromkeys(key.rpartition(".")[0] for key in settings_of(schema) if "." in key)) + [
        key for key in schema.model_fields if _is_empty_section(schema, key)
    ]


def places(schema: Any) -> dict[str, list[str]]:
    """For each word that a person may write alone, the keys that it can mean."""
    return places_in(settings_of(schema))


def places_in(settings: Mapping[str, Setting]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for key, setting in settings.items():
        for word in (setting.name, *setting.also):
            found[word].append(key)
        if setting.name in SHORT_FOR:
            found[key.rpartition(".")[0]].append(key)
    return dict(found)


def short_for(section: str, settings: Collection[str]) -> str | None:
    """The key that a section's word alone stands for, where there is one."""
    return next((key for name in SHORT_FOR if (key := f"{section}.{name}") in settings), None)


def in_words(node: Json) -> str:
    """What a part of a JSON schema allows, for people."""
    if "enum" in node:
        return _either([str(value) for value in node["enum"]])
    if "const" in node:
        return str(node["const"])
    if "anyOf" in node:
        return _either([in_words(option) for option in node["anyOf"]])
    kind = node.get("type")
    if kind in ("integer", "number"):
        return " ".join(["a whole number" if kind == "integer" else "a number", *_limits(node)])
    if kind == "array":
        return f"a list of {in_words(node.get('items', {}))}"
    return {"boolean": "true or false", "string": "text", "null": "null", "object": "keys with values"}.get(
        str(kind), "anything"
    )


def _walk(root: Json, node: Json, prefix: str) -> Iterator[Setting]:
    required = node.get("required", ())
    for name, field in node.get("properties", {}).items():
        target = root.get("$defs", {}).get(str(field.get("$ref", "")).rpartition("/")[2])
        if target and "properties" in target:
            yield from _walk(root, target, f"{prefix}{name}.")
        else:
            yield _setting(f"{prefix}{name}", {**(target or {}), **field}, name in required)


def _setting(key: str, node: Json, required: bool) -> Setting:
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    return Setting(
        key=key,
        doc=" ".join(str(node.get("description", "")).split()),
        allowed=in_words(node),
        default=node.get("default"),
        required=required,
        also=tuple(node.get(ALSO, ())),
        is_switch=kinds == {"boolean"},
        is_text=kinds - {"null"} == {"string"},
        may_be_null="null" in kinds,
        is_list_of_text=node.get("type") == "array" and node.get("items", {}).get("type") == "string",
    )


def _is_empty_section(schema: Any, key: str) -> bool:
    annotation = schema.model_fields[key].annotation
    return getattr(annotation, "model_fields", None) == {}


def _limits(node: Json) -> list[str]:
    names = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {node[limit]:g}" for limit, word in names.items() if limit in node]
    return [" and ".join(limits)] if limits else []


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"
