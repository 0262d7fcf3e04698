"""Read YAML as plain data: no tags, anchors or repeated keys, and numbers by YAML 1.2; write it. Imports no torch.

Values are built from the parser's events with an explicit stack, so that nesting costs no recursion and a limit stops
the parser at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from halfstep.errors import BadRecipe, Unsafe

# PyYAML's own loader accepts aliases, with which a few hundred bytes can expand to billions of values, and it silently
# uses the last of repeated keys.
LARGEST_FILE = 2**20
DEEPEST = 32
MOST_NODES = 10_000
# int() of a long string takes quadratic time.
LONGEST_NUMBER = 64

NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {word: value for value in (True, False) for word in (str(value), str(value).lower(), str(value).upper())}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_RADIX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], float]], ...] = (
    (_INTEGER, int),
    (_RADIX, lambda text: int(text, 0)),
    (_FLOAT, float),
)
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Read(NamedTuple):
    """The content of a file, and the line of each key."""

    content: dict[str, Any]
    lines: dict[str, int]
    """The line of each dotted key, counted from 1."""


def read_yaml(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the mapping in a file; `where` names the file in errors.

    Raises BadRecipe for anything but plain data, and Unsafe for a tag.
    """
    return read_with_lines(text, where).content


def read_with_lines(text: str | bytes, where: str, loader: Any = yaml.SafeLoader) -> Read:
    """Return the mapping in a file, with the line of each key.

    `loader` makes the parser's events; libyaml's is several times as fast, and words its errors in another way.
    """
    # surrogatepass: arguments of a command line that are not UTF-8 contain lone surrogates.
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > LARGEST_FILE:
        raise too_large(where, size)
    builder = _Builder(where)
    for event in _events(decoded(text, where), where, loader):
        builder.take(event)
    if not isinstance(builder.content, dict):
        given = "nothing" if builder.content is None else f"a {type(builder.content).__name__}"
        raise BadRecipe(
            f"{where} holds {given}", allowed="keys with values", do="begin with a line such as `task: ...`"
        )
    return Read(builder.content, builder.lines)


def read_value(text: str, where: str) -> Any:
    """Return one value as typed on a command line: `4`, `1e-4`, `[a, b]`, or text without quotes."""
    if text[:1] in ("[", "{", "'", '"'):
        return read_with_lines(f"value: {text}", where).content["value"]
    return scalar(text.strip(), where)


def scalar(text: str, where: str) -> Any:
    """Return a plain word by the rules of YAML 1.2: `1e-4` is a number; `no`, `on` and `1:30` are text."""
    # PyYAML follows YAML 1.1: it reads `lr: 1e-4` as text, `no` as false and `1:30` as 90.
    if text in NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if not (text[0] in "+-." or text[0].isdigit()):
        return text
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    number = next((read for pattern, read in _NUMBERS if pattern.fullmatch(text)), None)
    if number and len(text) > LONGEST_NUMBER:
        raise BadRecipe(
            f"{where}: a number of {len(text)} characters",
            allowed=f"at most {LONGEST_NUMBER} characters",
            do="write it with an exponent, such as 1e30",
        )
    return number(text) if number else text


def too_large(where: str, size: int) -> BadRecipe:
    """Return the error for a file that is too large for a recipe."""
    return BadRecipe(
        f"{where} is {size:,} bytes long",
        allowed=f"at most {LARGEST_FILE:,} bytes",
        do="give a recipe; data belongs into files of its own",
    )


def decoded(text: str | bytes, where: str) -> str:
    """Return the text of a file; raise BadRecipe if it is not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        # Some editors begin a UTF-8 file with a byte order mark.
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecipe(
            f"{where} is not UTF-8 (byte {error.start})", allowed="text in UTF-8", do="save the file as UTF-8"
        ) from None


def _events(text: str, where: str, loader: Any) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=loader)
    except (ValueError, OverflowError):
        # PyYAML converts escapes and version numbers unchecked: `"\\UFFFFFFFF"`, `%YAML 1.999...`.
        raise BadRecipe(
            f"{where}: a character or a version of YAML that does not exist",
            allowed="characters up to \\U0010FFFF, and %YAML 1.2",
            do="look for \\U in double quotes, and for a line that begins with %YAML",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        raise BadRecipe(
            f"{where}{line}: {str(problem)[:200]}",
            allowed="YAML: keys with values, indented by spaces",
            do="mend the line; text with special characters needs quotes",
        ) from None


def _printable(path: str) -> str:
    return path if path.isprintable() else repr(path)


class _Open(NamedTuple):
    """A mapping or a list that is still open."""

    node: dict[str, Any] | list[Any]
    path: str


class _Builder:
    """A builder of plain data from parser events; it refuses whatever a recipe must not contain."""

    def __init__(self, where: str) -> None:
        self.where, self.content, self.lines = where, None, {}  # type: str, Any, dict[str, int]
        self._open: list[_Open] = []
        self._keys: list[str | None] = []
        self._nodes = self._documents = 0

    def take(self, event: Any) -> None:
        """Process one event; raise BadRecipe or Unsafe if it is not allowed."""
        if isinstance(event, yaml.DocumentStartEvent):
            self._document(event)
        elif isinstance(event, yaml.NodeEvent):
            self._check(event)
            self._node(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._open.pop()
            self._keys.pop()

    def _document(self, event: Any) -> None:
        self._documents += 1
        if self._documents > 1:
            raise self._refused(event, "a second document begins", "one document", "delete it, and the line ---")

    def _check(self, event: Any) -> None:
        self._nodes += 1
        if getattr(event, "tag", None) is not None:
            raise Unsafe(
                f"{self._at(event)}: the tag {str(event.tag)[:80]!r}",
                allowed="plain values; a recipe is data and names no code",
                do="delete the tag, and write the value itself",
            )
        if event.anchor is not None:
            raise self._refused(
                event, f"the anchor or alias {str(event.anchor)[:80]!r}", "values in full", "write the value out"
            )
        if self._nodes > MOST_NODES or len(self._open) >= DEEPEST:
            limit = f"{MOST_NODES:,} values" if self._nodes > MOST_NODES else f"{DEEPEST} levels"
            raise self._refused(event, f"more than {limit}", f"at most {limit}", "give a recipe of the usual size")

    def _node(self, event: Any) -> None:
        holder = self._open[-1].node if self._open else None
        if isinstance(holder, dict) and self._keys[-1] is None:
            self._keys[-1] = self._key(event, holder)
            return
        value, path = self._value(event), self._path(holder)
        if isinstance(holder, dict):
            holder[str(self._keys[-1])] = value
            self._keys[-1] = None
        elif isinstance(holder, list):
            holder.append(value)
        else:
            self.content = value
        if isinstance(value, (dict, list)):
            self._open.append(_Open(value, path))
            self._keys.append(None)

    def _key(self, event: Any, holder: dict[str, Any]) -> str:
        key = self._value(event)
        if not isinstance(key, str):
            raise self._refused(event, f"the key {key!r}", "keys that are words", "name the key, or put it in quotes")
        path = f"{self._open[-1].path}.{key}".lstrip(".")
        if key in holder:
            first = self.lines[path]
            raise BadRecipe(
                f"{self.where}: {_printable(path)} is given twice, on lines {first} and {event.start_mark.line + 1}",
                allowed="each key once",
                do="delete one of the two lines",
            )
        self.lines[path] = event.start_mark.line + 1
        return key

    def _value(self, event: Any) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return {}
        if isinstance(event, yaml.SequenceStartEvent):
            return []
        # A style means quotes or a block: such a value is text, whatever it looks like.
        return event.value if event.style else scalar(event.value, self._at(event))

    def _path(self, holder: dict[str, Any] | list[Any] | None) -> str:
        if holder is None:
            return ""
        last = self._keys[-1] if isinstance(holder, dict) else str(len(holder))
        return f"{self._open[-1].path}.{last}".lstrip(".")

    def _at(self, event: Any) -> str:
        return f"{self.where}, line {event.start_mark.line + 1}"

    def _refused(self, event: Any, given: str, allowed: str, do: str) -> BadRecipe:
        return BadRecipe(f"{self._at(event)}: {given}", allowed=allowed, do=do)


# -- writing ----------------------------------------------------------------------------------------------------------


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


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
