"""docs/guides.md: all items of the guides, with evidence that exists and counts that agree."""

from __future__ import annotations

import shlex

import pytest

from tests.guides import cited
from tests.guides.items import PAGE, STATES, Item, counts, items, with_counts

ITEMS = {
    "U-Net": 69,
    "ResNet-50 on ImageNet-100": 75,
    "Concepts, with a diffusion model": 44,
    "Slots in video": 31,
    "Radio maps: a report": 30,
}
LEAST_DONE = 195
TEXT = PAGE.read_text(encoding="utf-8")
FOUND = items(TEXT)
SHOWN = sorted({(shown, item.awaits_a_merge) for item in FOUND for shown in item.shown})


def test_every_item_of_every_guide_is_there_once() -> None:
    assert {guide: [item.number for item in FOUND if item.guide == guide] for guide in ITEMS} == {
        guide: list(range(1, number + 1)) for guide, number in ITEMS.items()
    }
    assert len(FOUND) == sum(ITEMS.values()) == 249
    assert {item.state for item in FOUND} <= set(STATES)


def test_the_counts_at_the_top_are_those_of_the_tables() -> None:
    assert with_counts(TEXT) == TEXT, "run python -m tests.guides.items"
    assert counts(FOUND).splitlines()[-1].startswith("| all | 249 | ")
    assert sum(item.state == "done" for item in FOUND) >= LEAST_DONE


@pytest.mark.parametrize(
    "item", [item for item in FOUND if item.state == "done"], ids=lambda item: f"{item[0]} {item[1]}"
)
def test_what_is_done_has_something_to_show(item: Item) -> None:
    assert any(cited.kind(shown) for shown in item.shown), item


@pytest.mark.parametrize(("shown", "awaited"), SHOWN)
def test_what_is_shown_exists(shown: str, awaited: bool) -> None:
    kind = cited.kind(shown)
    if kind == "file" and not awaited:
        cited.check_file(shown)
    elif kind == "command":
        cited.check_command(shlex.split(shown)[1:])


def test_the_exercise_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = TEXT.partition("   ```python\n")[2].partition("   ```")[0]
    exec("\n".join(line.removeprefix("   ") for line in block.splitlines()), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "(False, {'gradient_overflow': 24})"
    assert second.startswith("(True, ")


def test_a_wrong_citation_is_seen() -> None:
    for wrong in ("tests/guides/no_such.py", "tests/guides/items.py::test_none", "docs/guides.md#nothing"):
        with pytest.raises(AssertionError):
            cited.check_file(wrong)
    for words in ("fly", "doctor --fly", "train unet no_such=3", "bench no_such_recipe"):
        with pytest.raises(Exception, match=r".+"):
            cited.check_command(words.split())
