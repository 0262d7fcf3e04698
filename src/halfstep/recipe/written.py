"""Write a resolved recipe as text, and compare two recipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from halfstep.recipe.strict_yaml import scalar

ABSENT = "(absent)"


class _Dumper(yaml.SafeDumper):
    """A dumper that keeps the order of the schema, and writes values that read back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        # `strict_yaml` refuses anchors, and PyYAML would write one for a value that occurs twice.
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # Quoted if this reader or another would take the word for something else. Single quotes fold Unicode line breaks
    # into spaces; double quotes escape them.
    style = '"' if not value.isprintable() else None if _is_plain(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    # With a dot and a signed exponent, a float is a float in YAML 1.1 and 1.2 alike.
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    # On one line: lists in a recipe are short, and a block would need a line for each item.
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


def _is_plain(value: str) -> bool:
    return bool(value) and scalar(value, "") == value


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _number)
_Dumper.add_representer(list, _list)


def to_yaml(recipe: Any) -> str:
    """Return the whole recipe as YAML; it reads back to the same recipe."""
    text: str = yaml.dump(
        recipe.model_dump(mode="json"),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=False,
    )
    return text


def different(one: Any, other: Any, ignore: Collection[str] = ()) -> list[str]:
    """Return lines such as `train.lr: 0.1 -> 0.2`, for recipes or for the content of their files."""
    before, after = dict(flat(_plain(one))), dict(flat(_plain(other)))
    keys = [key for key in dict.fromkeys([*before, *after]) if key not in ignore]
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    # True == 1 and 1 == 1.0 in Python; in a recipe they are different values.
    return [f"{key}: {_shown(a)} -> {_shown(b)}" for key, a, b in pairs if type(a) is not type(b) or a != b]


def _plain(recipe: Any) -> Mapping[str, Any]:
    content: Mapping[str, Any] = recipe if isinstance(recipe, Mapping) else recipe.model_dump(mode="json")
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def value_of(recipe: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)[:120]
