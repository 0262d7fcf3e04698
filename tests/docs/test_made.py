"""Tables and pictures of the documentation are what the data say, and are small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from halfstep.measure.memory.devices import list_device_ids
from tests.docs import made
from zoo import pains


def test_every_made_part_is_new() -> None:
    assert [str(path.relative_to(made.ROOT)) for path in made.old()] == [], "run python -m tests.docs.made"


def test_every_part_is_on_a_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in made.made() if path.suffix == ".md"]
    assert {name for page in pages for name in re.findall(r"<!-- made: (\w+) -->", page)} == set(made.PARTS)


def test_a_page_with_another_figure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(made.PARTS, "gpus", lambda: "another table")
    assert [path.name for path in made.old()] == ["choosing.md"]


def test_all_gpus_and_all_pains_are_there() -> None:
    choosing = (made.DOCS / "choosing.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in choosing for name in list_device_ids())
    gallery = (made.DOCS / "zoo.md").read_text(encoding="utf-8")
    assert all(f"### {pain.title}\n" in gallery for pain in pains())


def test_pictures_are_small_and_name_what_they_show() -> None:
    for path, drawn in made.made().items():
        if path.suffix == ".svg":
            root = ElementTree.fromstring(drawn)
            assert root.attrib["aria-label"]
            assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
            assert len(drawn) < 12_000
