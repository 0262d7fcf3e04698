"""No figure in README, SECURITY or docs without where it comes from.

A number with a unit, or with decimals, is one of four things:

- in a block, or in a part between `<!-- made: ... -->` comments: other tests run and compare those;
- a value of a record that its section names (`benchmarks/NAME.json`, `.md` or `.py`, `docs/NAME.json`), rounded;
- a value of a record that `docs/figures.json` names for it, by its key;
- a constant: `docs/figures.json` names the line of code that has it, or says what it is (a version, a vendor's figure).

Anything else fails.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, pages

LISTED: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "figures.json").read_text(encoding="utf-8"))
PAGES = [
    *(page for page in pages() if page not in {"docs/recipes.md", "docs/licences.md", "docs/devices.md"}),
    "SECURITY.md",
]  # those three are written by commands, and other tests hold them to what they are made from
UNIT = r"(?:(?<=\d)[x×](?!\w|\s?\d)|%|(?:s|ms|µs|min|h|seconds?|minutes?|hours?|[kMG]i?B|bytes|times|dB)\b)"
FIGURE = re.compile(
    rf"(?<![\w.\-/(§])(?P<number>\d[\d,]*(?:\.\d+)?)(?:\s?±\s?(?P<spread>\d+\.\d+))?"
    rf"(?:\s?(?P<unit>{UNIT})|(?<=\.\d)(?![\w.])|(?<=\.\d\d)(?![\w.])|(?<=\.\d\d\d)(?![\w.])|(?<=\.\d\d\d\d)(?![\w.]))"
)
RECORD = re.compile(r"(?:\.\./)*((?:benchmarks|docs)/\w+)\.(?:json|md|py)\b")
SCALES: dict[str, tuple[float, ...]] = {
    "%": (1, 100),
    "GiB": (1, 2**-30),
    "GB": (1, 1e-9, 2**-30),
    "MB": (1, 1e-6, 2**-20),
    "MiB": (1, 2**-20),
    "ms": (1, 1000),
    "µs": (1, 1e6),
    "min": (1, 1 / 60),
    "minutes": (1, 1 / 60),
    "h": (1, 1 / 3600),
}


def _prose(text: str) -> str:
    """The page without code, made parts, comments and addresses."""
    text = re.sub(r"<!-- made: (\w+) -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # Names of records are kept; other code is a setting or a name, not a claim.
    return re.sub(r"`[^`\n]*`", lambda code: " ".join(one.group() for one in RECORD.finditer(code.group())), text)


def _sections(page: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """Every section with the records that it names."""
    for section in re.split(r"^(?=##? )", _prose(text), flags=re.MULTILINE):
        named = dict.fromkeys(path for one in RECORD.findall(section) for path in _records(one))
        yield re.sub(r"\]\([^)]*\)|https?://\S+", "]", section), list(named)


def _records(stem: str) -> list[str]:
    return [f"{stem}{kind}" for kind in (".json", ".md") if (ROOT / f"{stem}{kind}").exists()]


@functools.cache
def _values(record: str) -> frozenset[float]:
    """Every number in a record."""
    text = (ROOT / record).read_text(encoding="utf-8").replace(",", " ")
    return frozenset(abs(float(one)) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text))


def _holds(shown: str, unit: str, values: frozenset[float] | list[float]) -> bool:
    """Whether a number that is shown is one of these, rounded as it is."""
    number, digits = float(shown.replace(",", "")), len(shown.partition(".")[2])
    step = 0.5 * 10**-digits
    return any(abs(value * scale - number) <= step * 1.001 for value in values for scale in SCALES.get(unit, (1,)))


def _unfounded(page: str, text: str) -> list[str]:
    constants = LISTED["constants"].get(page, {})
    keyed = {one["text"]: one for one in LISTED["figures"] if one["page"] == page}
    found = []
    for section, records in _sections(page, text):
        for figure in FIGURE.finditer(section):
            shown, unit = figure.group(), figure["unit"] or ""
            numbers = [figure["number"], *filter(None, [figure["spread"]])]
            if shown in constants or shown in keyed:
                continue
            if not all(any(_holds(one, unit, _values(record)) for record in records) for one in numbers):
                around = section[max(0, figure.start() - 60) : figure.end() + 30].replace("\n", " ")
                found.append(f"{page}: {shown}: ...{around}...")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_source(page: str) -> None:
    assert _unfounded(page, (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("one", LISTED["figures"], ids=lambda one: f"{one['page']}-{one['text']}")
def test_a_listed_figure_is_the_records(one: dict[str, Any]) -> None:
    figure = FIGURE.search(one["text"])
    assert figure is not None
    assert one["text"] in _prose((ROOT / one["page"]).read_text(encoding="utf-8"))
    assert _holds(figure["number"], figure["unit"] or "", [_looked_up(one["record"], one["key"])])


def _looked_up(record: str, key: str) -> float:
    """A value by its keys and places, or the largest or smallest of a list: `cells.*.error.max`."""
    value: Any = json.loads((ROOT / record).read_text(encoding="utf-8"))
    *way, last = key.split(".")
    for index, step in enumerate(way):
        if step == "*":
            value = [row for row in (value.values() if isinstance(value, dict) else value)]
            value = [abs(float(row[way[index + 1]])) for row in value if way[index + 1] in row]
            break
        value = value[int(step)] if isinstance(value, list) else value[step]
    if last in {"max", "min"}:
        return float({"max": max, "min": min}[last](value))
    return float(value[last])


CODE = re.compile(r"(?P<file>[\w/]+\.py):(?P<name>\w+)")
IN_CODE = [
    (page, text, at) for page, of in LISTED["constants"].items() for text, at in of.items() if CODE.fullmatch(at)
]


@pytest.mark.parametrize(("page", "text", "at"), IN_CODE, ids=lambda one: one.replace("\n", " "))
def test_a_constant_is_the_codes(page: str, text: str, at: str) -> None:
    figure, place = FIGURE.search(text), CODE.fullmatch(at)
    assert figure is not None
    assert place is not None
    values = list(_assigned(ROOT / "src" / "halfstep" / place["file"], place["name"]))
    # A factor of 1.03 is written as 3 %, and a share of 0.9 as what is left of it.
    values += [abs(1 - value) for value in values]
    assert _holds(figure["number"], figure["unit"] or "", values), f"{page}: {text} is {values} in {at}"


def _assigned(path: Path, name: str) -> Iterator[float]:
    """The numbers that a name is given in a file, as constants, defaults or fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flat = [(one, node.value) for one in targets]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                flat = list(zip(targets[0].elts, node.value.elts, strict=True))
            for target, value in flat:
                if isinstance(target, ast.Name) and target.id == name:
                    yield _number(value)


def _number(node: ast.expr) -> float:
    """A constant, or a product or power of constants."""
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left), _number(node.right)
        return left**right if isinstance(node.op, ast.Pow) else left * right
    assert isinstance(node, ast.Constant)
    return float(node.value)


def test_most_constants_are_held_to_the_code() -> None:
    assert len(IN_CODE) >= 30


def test_no_constant_is_listed_in_vain() -> None:
    for page, constants in LISTED["constants"].items():
        prose = _prose((ROOT / page).read_text(encoding="utf-8"))
        assert [text for text in constants if text not in prose] == [], page
        assert all(len(reason) > 5 for reason in constants.values())


@pytest.mark.parametrize(
    "text",
    [
        "trains 9.87x as fast",
        "It takes 12.3 s.",
        "within 0.7 % of it",
        "an IoU of 0.671 ± 0.009 (`benchmarks/real_data.json`)",
        "2.99x as fast (`benchmarks/step_overhead.json`)",
        "| a | 41.7 GiB |",
    ],
)
def test_a_figure_from_nowhere_is_found(text: str) -> None:
    assert len(_unfounded("docs/nowhere.md", text)) == 1


def test_a_records_figure_holds() -> None:
    assert _unfounded("docs/nowhere.md", "halfstep takes 1.13 (`benchmarks/step_overhead.json`)") == []
