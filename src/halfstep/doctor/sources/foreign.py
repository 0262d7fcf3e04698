"""Read YAML, JSON and TOML of other projects as plain data, with the line of each key. Runs nothing; imports no torch.

Anchors, merges and the tags of YAML itself are read; an alias is the value that it names and is never copied, so that
a few hundred bytes cannot become billions of values. A value with a tag of a program is text.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import yaml

from halfstep.doctor.located import split_lines
from halfstep.errors import BadRecipe, HalfstepError
from halfstep.recipe.strict_yaml import YamlContent, parse_yaml_scalar

DEEPEST = 64
MOST_NODES = 100_000
_OWN_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SECTION = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")


def read_foreign(text: str, where: str) -> YamlContent:
    """Return the mapping in a file, with the line of each key; raise BadRecipe for any other file."""
    if where.lower().endswith(".toml"):
        return _read_toml(text, where)
    # JSON is valid YAML except for tabs between tokens; tabs inside strings are invalid JSON anyway.
    plain = text.replace("\t", " ") if where.lower().endswith(".json") else text
    builder = _Builder(where)
    try:
        for event in yaml.parse(plain, Loader=_LOADER):
            if not builder.take(event):
                break
    except _TooLarge:
        return YamlContent({}, {})
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if (content := _parse_json_object(text)) is not None:
            return YamlContent(content, {})
        mark = getattr(error, "problem_mark", None)
        raise _refused_error(
            where, mark.line + 1 if mark else 1, str(getattr(error, "problem", None) or error)
        ) from None
    return YamlContent(builder.content if isinstance(builder.content, dict) else {}, builder.lines)


def _refused_error(where: str, line: int, why: str) -> BadRecipe:
    allowed, do = "YAML, JSON or TOML: keys with values", "correct the line, or leave the file out"
    return BadRecipe(f"{where}, line {line}: {why[:200]}", allowed=allowed, do=do, line=line)


def _parse_json_object(text: str) -> dict[str, object] | None:
    """Return an object of JSON, some texts of which are no YAML."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else {}


class _TooLarge(Exception):
    """More values or levels than a configuration has: data."""


class _Builder:
    """A builder of plain data from the events of the first document."""

    def __init__(self, where: str) -> None:
        self.content: Any = None
        self.lines: dict[str, int] = {}
        self._where = where
        self._open: list[tuple[Any, str]] = []
        self._keys: list[str | None] = []
        self._anchors: dict[str, object] = {}
        self._nodes = 0

    def take(self, event: Any) -> bool:
        """Process one event; return whether the document continues."""
        if isinstance(event, yaml.NodeEvent):
            self._nodes += 1
            if self._nodes > MOST_NODES or len(self._open) > DEEPEST:
                raise _TooLarge
            self._node(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            node, _ = self._open.pop()
            self._keys.pop()
            if isinstance(node, dict) and _MERGE in node:
                # Add the keys of `<<` that a mapping lacks.
                merged = node.pop(_MERGE)
                for other in merged if isinstance(merged, list) else [merged]:
                    for key, value in other.items() if isinstance(other, dict) else ():
                        node.setdefault(key, value)
        return not isinstance(event, yaml.DocumentEndEvent)

    def _node(self, event: Any) -> None:
        holder, path = self._open[-1] if self._open else (None, "")
        value = self._value(event)
        if isinstance(holder, dict) and self._keys[-1] is None and not isinstance(value, (dict, list)):
            self._keys[-1] = str(value)
            self.lines[f"{path}.{value}".lstrip(".")] = event.start_mark.line + 1
            return
        key = (self._keys[-1] or "?") if isinstance(holder, dict) else str(len(holder)) if holder is not None else ""
        if isinstance(holder, dict):
            holder[key] = value
            self._keys[-1] = None
        elif isinstance(holder, list):
            holder.append(value)
        else:
            self.content = value
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open.append((value, f"{path}.{key}".lstrip(".")))
            self._keys.append(None)

    def _value(self, event: Any) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._anchors.get(str(event.anchor))
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        if isinstance(event, yaml.ScalarEvent):
            value = _parse_scalar(event, self._where)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value


def _parse_scalar(event: Any, where: str) -> Any:
    tag = event.tag or ""
    kind = tag.removeprefix(_OWN_TAG) if tag.startswith(_OWN_TAG) else ""
    if (event.style and not kind) or (tag and not kind) or kind == "str":
        return event.value
    try:
        value = parse_yaml_scalar(event.value.strip(), where)
    except HalfstepError:
        return event.value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if kind == "float" and is_number else value


def _read_toml(text: str, where: str) -> YamlContent:
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _refused_error(where, 1, str(error)) from None
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(split_lines(text), 1):
        if found := _SECTION.fullmatch(line.rstrip("\r\n")):
            section = f"{found[1]}."
        elif found := _KEY.match(line):
            lines.setdefault(section + found[1].strip("\"'"), number)
    return YamlContent(content, lines)
