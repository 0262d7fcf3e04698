"""YAML as plain data: what is read, what is refused, and what reading may cost."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import BadRecipe, HalfstepError, Unsafe
from halfstep.recipe.strict_yaml import LARGEST_FILE, parse_yaml, parse_yaml_value, parse_yaml_with_lines


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("10", 10),
        ("+3", 3),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1e", "1e"),
        ("-", "-"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
def test_scalars_are_those_of_yaml_1_2(written: str, meant: Any) -> None:
    read = [parse_yaml_value(written, "line")] + ([parse_yaml(f"x: {written}", "file")["x"]] if written != "-" else [])
    assert all(value == meant and type(value) is type(meant) for value in read)


def test_nan_is_read_and_left_to_the_schema() -> None:
    assert math.isnan(parse_yaml("x: .nan", "file")["x"])


def test_quoted_scalars_are_text() -> None:
    assert parse_yaml("a: '1'\nb: \"true\"\nc: |\n  5\n", "file") == {"a": "1", "b": "true", "c": "5\n"}


def test_nesting_and_the_line_of_every_key() -> None:
    read = parse_yaml_with_lines("a:\n  b: 1\n  c:\n    - x: 2\n    - x: 3\nd: []\n", "file")
    assert read.content == {"a": {"b": 1, "c": [{"x": 2}, {"x": 3}]}, "d": []}
    assert read.lines == {"a": 1, "a.b": 2, "a.c": 3, "a.c.0.x": 4, "a.c.1.x": 5, "d": 6}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["nothing"]),
        ("# only a comment", ["nothing"]),
        ("- 1", ["a list"]),
        ("word", ["a str"]),
        ("a: 1\nb: 2\na: 3", ["a is given twice", "lines 1 and 3"]),
        ("s:\n  a: 1\n  a: 2", ["s.a is given twice", "lines 2 and 3"]),
        ("a: &x 1", ["line 1", "'x'"]),
        ("a: *x", ["line 1", "'x'"]),
        ("a: 1\n---\nb: 2", ["second document"]),
        ("1: 2", ["the key 1"]),
        ("[a]: 2", ["the key ["]),
        ("a: [1", ["line 1, column 6"]),
        ("a:\n\tb: 1", ["line 2, column 1"]),
        ("a: " + "9" * 65, ["65 characters"]),
        ("a: \x07", ["file"]),
        ('a: "\\U00110000"', ["does not exist"]),
        ('a: "\\UFFFFFFFF"', ["does not exist"]),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", ["does not exist"]),
        (b"a: \xff", ["not UTF-8"]),
    ],
)
def test_refusals_say_where_and_what(text: str | bytes, words: list[str]) -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_yaml(text, "file")
    assert all(word in str(caught.value) for word in [*words, "allowed:", "do:"])


@pytest.mark.parametrize("tag", ["!!str", "!", "!include", "!!python/object/apply:os.system", "!<tag:x>"])
@pytest.mark.parametrize("place", ["a: {} 1", "{} k: 1", "a: [{} 1]", "a: {} [1]", "a: {} {{b: 1}}"])
def test_every_tag_is_unsafe_wherever_it_stands(tag: str, place: str) -> None:
    with pytest.raises(Unsafe) as caught:
        parse_yaml(place.format(tag), "file")
    assert caught.value.exit_code == 77


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 10_000,
        "a: " + "{b: " * 10_000,
        "".join(" " * depth + "a:\n" for depth in range(700)),
        "a: [" + "1," * 300_000 + "]",
        "".join(f"k{n}: 1\n" for n in range(60_000)),
        "a: " + "9" * 1_000_000,
        "a: '" + "x" * (LARGEST_FILE + 1) + "'",
        "? " * 100_000,
        "- " * 100_000,
    ],
    ids=["lists", "maps", "blocks", "values", "keys", "digits", "size", "key-in-key", "list-in-list"],
)
def test_what_is_too_much_is_refused_quickly(text: str) -> None:
    began = time.process_time()
    with pytest.raises(BadRecipe):
        parse_yaml(text, "file")
    assert time.process_time() - began < 4.0


def test_the_limits_themselves_pass() -> None:
    assert parse_yaml("a: " + "[" * 31 + "]" * 31, "file")
    assert len(parse_yaml("a: [" + "1," * 9_000 + "]", "file")["a"]) == 9_000


def test_a_variable_is_never_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SECRET", "canary")
    assert parse_yaml("a: ${SECRET}", "file") == {"a": "${SECRET}"}


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab:- \n[]{},&*!'\"#|>?%\t01.e~\x00é", max_size=60))
def test_any_text_is_a_mapping_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(HalfstepError):
        assert isinstance(parse_yaml(text, "file"), dict)


def test_values_of_a_command_line_need_no_quotes() -> None:
    assert parse_yaml_value("[a, 1, true]", "line") == ["a", 1, True]
    assert parse_yaml_value("'8'", "line") == "8"
    assert parse_yaml_value("C: #x", "line") == "C: #x"
    assert parse_yaml_value("", "line") is None
    with pytest.raises(BadRecipe):
        parse_yaml_value("[a", "line")
    with pytest.raises(Unsafe):
        parse_yaml_value("[!!python/name:os.system]", "line")
