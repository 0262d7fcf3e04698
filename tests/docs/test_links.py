"""Every relative link and anchor of the pages leads somewhere, the API pages have every public name, lists are lists.

`scripts/docs` checks the same of the built site. These are the files as the repository's host shows them, and those
that are no pages of the site.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import halfstep
from tests.docs.blocks import ROOT, pages

TOP = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
BESIDE = ["zoo/README.md", "examples/cluster/README.md"]
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<file>[^)\s#]*)(?:#(?P<anchor>[^)\s]+))?\)")
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")


def _text(path: Path) -> str:
    """The page without its code."""
    text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def _anchors(text: str) -> set[str]:
    """The anchors of the headings, as the host and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        again = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.add(f"{slug}-{again}" if again else slug)
    return found


def _broken(page: str, text: str) -> list[str]:
    found = []
    for link in LINK.finditer(text):
        target = (ROOT / page).parent / link["file"] if link["file"] else ROOT / page
        inside = target.resolve().is_relative_to(ROOT)
        if not inside or not target.exists():
            found.append(f"{page}: there is no {link['file']}")
        elif link["anchor"] and link["anchor"] not in _anchors(text if not link["file"] else _text(target)):
            found.append(f"{page}: {link['file']} has no heading #{link['anchor']}")
    return found


@pytest.mark.parametrize("page", [*pages(), *TOP, *BESIDE])
def test_links_lead_somewhere(page: str) -> None:
    assert _broken(page, _text(ROOT / page)) == []


@pytest.mark.parametrize("text", ["[a](nowhere.md)", "[a](step.md#nowhere)", "[a](#nowhere)", "[a](../../outside.md)"])
def test_a_broken_link_is_found(text: str) -> None:
    assert len(_broken("docs/guard.md", text)) == 1


@pytest.mark.parametrize("page", pages())
def test_a_list_begins_after_an_empty_line(page: str) -> None:
    """The site's Markdown would otherwise make a paragraph of it, which the repository's host does not."""
    lines = _text(ROOT / page).splitlines()
    joined = [
        line
        for before, line in pairwise(lines)
        if ITEM.match(line) and before.strip() and not ITEM.match(before) and not before.startswith((" ", "#", "<"))
    ]
    assert joined == []


def test_the_api_pages_have_every_public_name() -> None:
    written = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: halfstep\.(\w+)$", written, flags=re.MULTILINE))
    assert named == set(halfstep.__all__)
