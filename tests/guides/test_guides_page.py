"""docs/guides.md: all items of the guides, with evidence that exists and counts that agree."""

from __future__ import annotations

import pytest

from halfstep.errors import HalfstepError
from tests.guides import cited
from tests.guides.items import PAGE, STATES, Item, counts, items, with_counts

ITEMS = {
    "U-Net": 69,
    "ResNet-50 on ImageNet-100": 75,
    "Concepts, with a diffusion model": 44,
    "Slots in video": 31,
    "Radio maps: a report": 30,
}
GPU_FIGURES = 20
LEAST_DONE = 226
TEXT = PAGE.read_text(encoding="utf-8")
FOUND = items(TEXT)
SHOWN = sorted({shown for item in FOUND for shown in item.shown})


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
    assert sum(item.state == "GPU" for item in FOUND) == GPU_FIGURES


@pytest.mark.parametrize("item", FOUND, ids=lambda item: f"{item[0]} {item[1]}")
def test_every_item_has_something_to_show(item: Item) -> None:
    assert any(cited.kind(shown) for shown in item.shown), item
    assert "(merge)" not in item.evidence
    if item.state == "decided":
        assert len(item.said.split()) >= 8, "a decision needs its reason"


@pytest.mark.parametrize("shown", SHOWN)
def test_what_is_shown_exists(shown: str) -> None:
    cited.check(shown)


def test_the_exercise_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = TEXT.partition("   ```python\n")[2].partition("   ```")[0]
    exec("\n".join(line.removeprefix("   ") for line in block.splitlines()), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "(False, {'gradient_overflow': 24})"
    assert second.startswith("(True, ")


@pytest.mark.parametrize(
    "wrong",
    [
        "tests/guides/no_such.py",
        "tests/guides/no_such.py::test_none",
        "tests/guides/test_guides_page.py::test_none",
        "tests/guides/test_radiomap_guide.py::doctor",
        "tests/guides/items.py::test_none",
        "docs/guides.md#nothing",
        "zoo/p00_no_such_exhibit",
        "halfstep fly",
        "halfstep doctor --fly",
        "halfstep train unet no_such=3",
        "halfstep bench no_such_recipe",
        "halfstep recipes copy --script no_such",
        "python -m halfstep.no_such",
        "halfstep.no_such",
    ],
)
def test_a_row_with_a_wrong_citation_is_seen(wrong: str) -> None:
    (row,) = items(f"## U-Net\n| 1 | item | done | as it says: `{wrong}` |\n")
    assert row.shown == [wrong]
    with pytest.raises((AssertionError, HalfstepError)):
        cited.check(wrong)
