"""Five folders of one's own pictures, a class each."""

from __future__ import annotations

import csv
import re

import pytest

from tests.journeys.trained import Trained

pytestmark = pytest.mark.full

CLASSES = ("circle", "cross", "square", "stripes", "triangle")


def test_five_folders_become_a_model_without_a_warning(classified: Trained) -> None:
    said = " ".join(classified.screen.split())
    assert "Traceback" not in said
    assert not re.search(r"\bwarn", said, re.IGNORECASE), classified.screen
    assert re.search(r"Top-1|accuracy", said, re.IGNORECASE)
    assert (classified.folder / "best.safetensors").exists()


def test_the_classes_are_called_by_their_names(classified: Trained) -> None:
    terminal = classified.desk.run("evaluate", classified.run)
    assert [name for name in CLASSES if name not in terminal.words] == []


def test_predict_names_a_class_for_every_picture(classified: Trained) -> None:
    classified.desk.run("predict", classified.run, "classes/cross")
    tables = [path for path in classified.desk.files("*.csv") if "predict" in str(path)]
    assert tables, classified.desk.files("*")
    with tables[0].open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) - 1 == len(list((classified.desk.folder / "classes" / "cross").iterdir()))
    assert all(set(row) & set(CLASSES) for row in rows[1:]), rows[:3]
