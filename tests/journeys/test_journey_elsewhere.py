"""A run measured on photographs from elsewhere, some of which have names that are made to do harm."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.journeys.desk import Desk
from tests.journeys.photos import photographs
from tests.journeys.terminal import Terminal
from tests.journeys.trained import Trained

pytestmark = pytest.mark.full

HOSTILE = {
    "markup": "x[/b].png",
    "style": "[bold red]y[link=file:///etc].png",
    "title": "a\x1b]0;owned\x07b.png",
    "clear": "c\x1b[2J\x1b[Hd.png",
    "lines": "two\nlines.png",
    "backwards": "e\u202egpj.png",
    "eight bits": "f\x9b2Jg.png",
}
RAW = (b"\x1b]0;owned", b"\x1b[2J", "\u202e".encode(), "\x9b2J".encode())


@pytest.fixture(scope="module")
def other(segmented: Trained) -> Path:
    """Twelve healthy photographs, and as many hostile names as there are, each with its mask."""
    folder = photographs(segmented.desk.folder / "other_photos", 12, seed=77)
    for kind in ("images", "masks"):
        for name in HOSTILE.values():
            planted = folder / kind / name  # a name with a slash is a folder with half of the harm in it
            planted.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / kind / "scan-5.final.png", planted)
    return folder


@pytest.fixture(scope="module")
def evaluated(segmented: Trained, other: Path) -> tuple[Terminal, set[Path]]:
    before = segmented.desk.files("*")
    files = ("--csv", "others.csv", "--picture", "others.png")
    terminal = segmented.desk.run("evaluate", segmented.run, "other_photos", *files)
    return terminal, segmented.desk.files("*") - before


def harmless(terminal: Terminal) -> None:
    assert [control for control in RAW if control in terminal.raw] == []
    assert terminal.screen.system_commands == []
    assert "Traceback" not in terminal.text


def test_a_table_has_every_class(evaluated: tuple[Terminal, set[Path]]) -> None:
    terminal, _ = evaluated
    assert terminal.shows("IoU")
    assert terminal.shows(r"\b19\b"), terminal.text


def test_a_csv_has_a_line_for_every_image(evaluated: tuple[Terminal, set[Path]], other: Path) -> None:
    terminal, written = evaluated
    wanted = [path for path in (other / "images").rglob("*") if path.suffix.lower() in {".png", ".jpg"}]
    tables = [path for path in written if path.suffix == ".csv"]
    assert tables, terminal.text
    most = max((table_of(path) for path in tables), key=len)
    assert len(most) - 1 >= 19 == len(wanted), most
    assert any("iou" in cell.lower() for cell in most[0])
    assert any(path.name in terminal.letters for path in tables), terminal.text


def table_of(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_a_picture_is_drawn_for_a_screen(evaluated: tuple[Terminal, set[Path]]) -> None:
    terminal, written = evaluated
    pictures = [path for path in written if path.suffix == ".png"]
    assert pictures, terminal.text
    for path in pictures:
        with Image.open(path) as opened:
            assert max(opened.size) <= 2000, f"{path.name}: {opened.size}"


def test_hostile_names_do_nothing_in_evaluate(evaluated: tuple[Terminal, set[Path]]) -> None:
    harmless(evaluated[0])


def test_hostile_names_do_nothing_in_predict(segmented: Trained, other: Path) -> None:
    terminal = segmented.desk.run("predict", segmented.run, "other_photos/images", "--out", "masks_of_others")
    harmless(terminal)
    written = [path for path in segmented.desk.files("*b[]]*.png") if "other_photos" not in path.parts]
    assert written, terminal.text


def test_hostile_names_do_nothing_in_data_check(segmented: Trained, other: Path, desk: Desk) -> None:
    folder = Path(shutil.copytree(other, desk.folder / "other"))
    for path in (folder / "masks").rglob("*.png"):
        path.unlink()  # so that every name is told
    with desk.type("data", "check", "other") as terminal:
        assert terminal.finish(60) not in {0, 1, 64, 70}, terminal.text
    harmless(terminal)
