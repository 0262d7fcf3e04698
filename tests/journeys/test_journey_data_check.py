"""`halfstep data check FOLDER` before anything is trained: fifteen planted faults, all found and named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.journeys.desk import Desk
from tests.journeys.photos import classes, photographs
from tests.journeys.planted import FAULTS, messy
from tests.journeys.terminal import Terminal


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Terminal:
    desk = Desk(tmp_path_factory.mktemp("check"), shared / "cache")
    messy(desk.folder / "mine")
    with desk.type("data", "check", "mine") as terminal:
        code = terminal.finish(60)
    assert code not in {0, 1, 64, 70}, terminal.text
    return terminal


def found(screen: str, name: str, words: str) -> bool:
    """Whether a file is named, with words that say what is wrong: on its line, or in what stands around it."""
    flat = " ".join(screen.split())
    return any(
        re.search(words, flat[max(0, at.start() - 400) : at.end() + 200], re.IGNORECASE)
        for at in re.finditer(rf"\b{name}", flat)
    )


@pytest.mark.wording
def test_fifteen_of_fifteen_are_found_and_named(checked: Terminal) -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 15
    missed = [f"{fault.name}: {fault.plant.__name__}" for fault in FAULTS if not found(checked.text, *fault[::2])]
    print(f"{len(FAULTS) - len(missed)} of {len(FAULTS)} planted faults found and named")
    assert missed == [], checked.text


def test_no_healthy_photograph_is_called_wrong(checked: Terminal) -> None:
    """Remarks on them are welcome: how they are turned, or that some are gray."""
    wrong = checked.text.split("\nwarning ")[0]
    assert [name for name in ("IMG_0000", "DSC00001", "house 2", "Straße", "été") if name in wrong] == []


def test_how_masks_are_read_and_how_classes_balance_is_said(checked: Terminal) -> None:
    assert checked.shows(r"255")
    assert re.search(r"\d+(\.\d+)? ?%", checked.text)


def test_a_healthy_folder_is_called_healthy(desk: Desk) -> None:
    photographs(desk.folder / "photos", 20, seed=9)
    terminal = desk.run("data", "check", "photos")
    assert terminal.shows(r"\b20\b")
    assert terminal.text.count("\n") <= 40


@pytest.mark.wording
def test_a_folder_of_classes_is_checked_too(desk: Desk) -> None:
    folder = classes(desk.folder / "mine", of_each=6)
    (folder / "empty").mkdir()
    broken = folder / "cross" / "blurred.jpg"
    broken.write_bytes((folder / "cross" / "IMG_0000.JPG").read_bytes()[:300])
    (folder / "square" / "borrowed.JPG").write_bytes((folder / "circle" / "IMG_0000.JPG").read_bytes())
    with desk.type("data", "check", "mine") as terminal:
        code = terminal.finish(60)
    assert code not in {0, 1, 64, 70}, terminal.text
    for name, words in (("empty", "no image|empty"), ("blurred", "read|cut|trunc"), ("borrowed", "two classes")):
        assert found(terminal.text, name, words), terminal.text
    assert "stripes" in terminal.words
