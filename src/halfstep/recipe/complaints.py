"""Report all mistakes in a recipe at once, each with its key, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from halfstep.errors import BadRecipe
from halfstep.recipe.aliases import FOREIGN_SECTIONS, PRECISION_WORDS
from halfstep.recipe.fields import nearest, places, sections_of, settings_of
from halfstep.recipe.overrides import nearest_key

MOST = 10
"""The maximum number of lines; further mistakes are only counted."""


class Complaint(NamedTuple):
    """One mistake in a recipe: what was given, what is allowed, and what to do."""

    given: str
    allowed: str
    do: str

    def __str__(self) -> str:
        return f"{self.given}; {self.do}" if self.do else f"{self.given}; allowed: {self.allowed}"


def bad_recipe(label: str, complaints: Sequence[Complaint]) -> BadRecipe:
    """Return one error for all mistakes of a recipe."""
    explain = "halfstep recipes explain lists every setting"
    if len(complaints) == 1:
        one = complaints[0]
        return BadRecipe(f"recipe {label}: {one.given}", allowed=one.allowed, do=one.do or explain)
    lines = [f"  - {complaint}" for complaint in complaints[:MOST]]
    if len(complaints) > MOST:
        lines.append(f"  - and {len(complaints) - MOST} more")
    return BadRecipe(f"recipe {label} has {len(complaints)} mistakes:\n" + "\n".join(lines), do=explain)


def validated(content: Any, schema: Any, label: str) -> Any:
    """Return the content as an instance of the schema's model; `label` names the recipe in errors.

    Raises BadRecipe with every mistake.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise bad_recipe(label, complaints_from(error, schema)) from None


def complaints_from(error: ValidationError, schema: Any) -> list[Complaint]:
    """Return one complaint for each key."""
    # pydantic reports one error for each branch of a union; for the user that is one mistake.
    found: dict[str, Complaint] = {}
    for detail in error.errors(include_url=False, include_context=False):
        key, value = _key(detail["loc"], detail["type"], schema), detail["input"]
        if key in FOREIGN_SECTIONS and isinstance(value, dict):
            found |= {(inner := f"{key}.{name}"): _unknown(inner, schema) for name in value}
        else:
            found.setdefault(key, _complaint(key, detail["type"], value, schema))
    return list(found.values())


def printable(key: str) -> str:
    """Return a key, shortened, without characters that could control a terminal."""
    return key[:80] if key[:80].isprintable() else repr(key[:80])[1:-1]


def shown(value: Any) -> str:
    """Return the repr of a value, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _key(location: tuple[str | int, ...], kind: str, schema: Any) -> str:
    """Return the dotted key, without the names that pydantic adds for the branches of a union."""
    parts = [str(part) for part in location]
    if kind == "extra_forbidden":
        return ".".join(parts)
    known = {*settings_of(schema), *sections_of(schema)}
    # The longest known prefix: what follows it are the branches of a union or the indices of a list.
    ends = (end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in known)
    return ".".join(parts[: next(ends, len(parts))])


def _complaint(key: str, kind: str, value: Any, schema: Any) -> Complaint:
    if kind == "extra_forbidden":
        return _unknown(key, schema)
    if kind == "missing":
        return Complaint(f"{key} is missing", _allowed(key, schema), f"add {key}")
    word = nearest(value, _choices(key, schema)) if isinstance(value, str) else None
    return Complaint(f"{key} is {shown(value)}", _allowed(key, schema), f"did you mean {word}?" if word else "")


def _allowed(key: str, schema: Any) -> str:
    setting = settings_of(schema).get(key)
    return setting.allowed if setting else "keys with values"


def _choices(key: str, schema: Any) -> list[str]:
    allowed = _allowed(key, schema).replace(" or ", ", ").split(", ")
    return [word for word in allowed if " " not in word]


def _unknown(key: str, schema: Any) -> Complaint:
    section, _, name = key[:200].rpartition(".")
    meant = places(schema).get(name, [])
    if meant:
        return Complaint(f"{printable(key)} is not known", "", f"did you mean {' or '.join(meant)}?")
    beside = nearest(name, [*schema.model_fields, *PRECISION_WORDS]) if not section else None
    near = beside or nearest_key(key, schema)
    allowed = ", ".join(k.rpartition(".")[2] for k in settings_of(schema) if k.rpartition(".")[0] == section)
    if not section:
        allowed = ", ".join(schema.model_fields)
    return Complaint(f"{printable(key)} is not known", allowed, f"did you mean {near}?" if near else "delete it")
