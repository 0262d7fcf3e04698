"""Read YAML as plain data: no tags, anchors or repeated keys, and numbers by YAML 1.2; write it. Imports no torch.

A subclass of PyYAML's loader checks each node before it is composed, so that a limit stops the parser at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer, ComposerError

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


class YamlContent(NamedTuple):
    """The content of a file, and the line of each key."""

    content: dict[str, object]
    lines: dict[str, int]
    """The line of each dotted key, counted from 1."""


class _StrictComposer(Composer):
    """A composer that refuses tags, anchors, aliases and too many nodes, before it composes them."""

    where: str
    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node; raise BadRecipe or Unsafe if it is not allowed."""
        event = self.peek_event()  # type: ignore[attr-defined]
        self.nodes += 1
        if getattr(event, "tag", None) is not None:
            raise Unsafe(
                f"{_format_line(event, self.where)}: the tag {str(event.tag)[:80]!r}",
                allowed="plain values; a recipe is data and names no code",
                do="delete the tag, and write the value itself",
                line=event.start_mark.line + 1,
            )
        if event.anchor is not None:
            raise BadRecipe(
                f"{_format_line(event, self.where)}: the anchor or alias {str(event.anchor)[:80]!r}",
                allowed="values in full",
                do="write the value out",
                line=event.start_mark.line + 1,
            )
        if self.nodes > MOST_NODES or self.depth >= DEEPEST:
            limit = f"{MOST_NODES:,} values" if self.nodes > MOST_NODES else f"{DEEPEST} levels"
            raise BadRecipe(
                f"{_format_line(event, self.where)}: more than {limit}",
                allowed=f"at most {limit}",
                do="give a recipe of the usual size",
                line=event.start_mark.line + 1,
            )
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return no tag: PyYAML's rules are those of YAML 1.1, and `parse_yaml_scalar` has those of 1.2."""
        return ""


class PythonLoader(_StrictComposer, yaml.SafeLoader):
    """A strict loader by PyYAML's parser in Python."""

    def __init__(self, text: str, where: str) -> None:
        yaml.SafeLoader.__init__(self, text)
        self.where = where


class FastLoader(_StrictComposer, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A strict loader by libyaml where PyYAML was built with it: several times as fast, with errors in other words."""

    def __init__(self, text: str, where: str) -> None:
        # libyaml's parser has a separate composer in C, which a subclass cannot restrict.
        getattr(yaml, "CSafeLoader", yaml.SafeLoader).__init__(self, text)
        Composer.__init__(self)
        self.where = where


def parse_yaml(text: str | bytes, where: str) -> dict[str, object]:
    """Return the mapping in a file; `where` names the file in errors.

    Raises BadRecipe for anything but plain data, and Unsafe for a tag.
    """
    return parse_yaml_with_lines(text, where).content


def parse_yaml_with_lines(
    text: str | bytes, where: str, loader: type[PythonLoader | FastLoader] = PythonLoader
) -> YamlContent:
    """Return the mapping in a file, with the line of each key."""
    # surrogatepass: arguments of a command line that are not UTF-8 contain lone surrogates.
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > LARGEST_FILE:
        raise build_file_size_error(where, size)
    node = _compose(decode_utf8(text, where), where, loader)
    lines: dict[str, int] = {}
    content = None if node is None else _convert_node(node, "", where, lines)
    if not isinstance(content, dict):
        given = "nothing" if content is None else f"a {type(content).__name__}"
        raise BadRecipe(
            f"{where} contains {given}", allowed="keys with values", do="start with a line such as `task: ...`"
        )
    return YamlContent(content, lines)


def parse_yaml_value(text: str, where: str) -> Any:
    """Return one value as typed on a command line: `4`, `1e-4`, `[a, b]`, or text without quotes."""
    if text[:1] in ("[", "{", "'", '"'):
        return parse_yaml_with_lines(f"value: {text}", where).content["value"]
    return parse_yaml_scalar(text.strip(), where)


def parse_yaml_scalar(text: str, where: str) -> Any:
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


def build_file_size_error(where: str, size: int) -> BadRecipe:
    """Return the error for a file that is too large for a recipe."""
    return BadRecipe(
        f"{where} is {size:,} bytes long",
        allowed=f"at most {LARGEST_FILE:,} bytes",
        do="give a recipe; put data into separate files",
    )


def decode_utf8(text: str | bytes, where: str) -> str:
    """Return the text of a file; raise BadRecipe if it is not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        # Some editors write a byte order mark at the start of a UTF-8 file.
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRecipe(
            f"{where} is not UTF-8 (byte {error.start})", allowed="text in UTF-8", do="save the file as UTF-8"
        ) from None


def _compose(text: str, where: str, loader: type[PythonLoader | FastLoader]) -> yaml.Node | None:
    try:
        node: yaml.Node | None = loader(text, where).get_single_node()
    except (BadRecipe, Unsafe):
        raise
    except (ValueError, OverflowError):
        # PyYAML converts escapes and version numbers unchecked: `"\\UFFFFFFFF"`, `%YAML 1.999...`.
        raise BadRecipe(
            f"{where}: a character or a version of YAML that does not exist",
            allowed="characters up to \\U0010FFFF, and %YAML 1.2",
            do="look for \\U in double quotes, and for a line that starts with %YAML",
        ) from None
    except ComposerError as error:
        raise BadRecipe(
            f"{where}, line {getattr(error.problem_mark, 'line', 0) + 1}: a second document starts",
            allowed="one document",
            do="delete it, and the line ---",
            line=getattr(error.problem_mark, "line", 0) + 1,
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
        raise BadRecipe(
            f"{where}{line}: {str(problem)[:200]}",
            allowed="YAML: keys with values, indented by spaces",
            do="fix the line; text with special characters needs quotes",
            line=mark.line + 1 if mark else None,
        ) from None
    return node


def _convert_node(node: yaml.Node, path: str, where: str, lines: dict[str, int]) -> Any:
    """Return a node as plain data; add the line of each key to `lines`."""
    if isinstance(node, yaml.SequenceNode):
        return [_convert_node(item, f"{path}.{at}", where, lines) for at, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        # A style means quotes or a block: such a value is text.
        return node.value if node.style else parse_yaml_scalar(node.value, _format_line(node, where))
    content: dict[str, object] = {}
    for key_node, value in node.value:
        key = _convert_node(key_node, "", where, {})
        if not isinstance(key, str):
            raise BadRecipe(
                f"{_format_line(key_node, where)}: the key {key!r}",
                allowed="keys that are words",
                do="name the key, or put it in quotes",
                line=key_node.start_mark.line + 1,
            )
        dotted, line = f"{path}.{key}".lstrip("."), key_node.start_mark.line + 1
        if key in content:
            raise BadRecipe(
                f"{where}: {dotted if dotted.isprintable() else repr(dotted)} is given twice, on lines "
                f"{lines[dotted]} and {line}",
                allowed="each key once",
                do="delete one of the two lines",
            )
        lines[dotted] = line
        content[key] = _convert_node(value, dotted, where, lines)
    return content


def _format_line(marked: Any, where: str) -> str:
    return f"{where}, line {marked.start_mark.line + 1}"


class _Dumper(yaml.SafeDumper):
    """A dumper that keeps the order of the schema, and writes values that read back unchanged."""

    def ignore_aliases(self, data: Any) -> bool:
        # `strict_yaml` refuses anchors, and PyYAML would write one for a value that occurs twice.
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # Quoted if this reader or another would take the word for something else. Single quotes fold Unicode line breaks
    # into spaces; double quotes escape them.
    style = '"' if not value.isprintable() else None if bool(value) and parse_yaml_scalar(value, "") == value else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _represent_number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    # With a dot and a signed exponent, a float is a float in both YAML 1.1 and 1.2.
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    # On one line: lists in a recipe are short, and a block would need a line for each item.
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_number)
_Dumper.add_representer(list, _represent_list)


def dump_recipe_yaml(recipe: Any) -> str:
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


def iterate_dotted_keys(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from iterate_dotted_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
