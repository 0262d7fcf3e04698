"""Commands, files and headings that pages name in their text exist; every pain of the zoo is among the symptoms."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.guides import cited
from tests.guides.items import ROOT
from zoo import pains

DOCS = ROOT / "docs"
TROUBLE = (DOCS / "trouble.md").read_text(encoding="utf-8")
PAGES = [
    *(DOCS / name for name in ("start.md", "choosing.md", "trouble.md", "zoo.md", "reliability.md", "security.md")),
    *(
        path
        for folder in ("own-loop", "concepts", "migration", "exercises")
        for path in sorted((DOCS / folder).iterdir())
    ),
]
TEXTS = {path: re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
         for path in PAGES if path.suffix == ".md"}  # fmt: skip
COMMANDS = sorted({code for text in TEXTS.values() for code in re.findall(r"`(halfstep [^`]+)`", text)})
# Places in a command that the reader fills in, each with something that fits.
FOR_EXAMPLE = {"RECIPE": "segmentation_tiny", "D": "folder", "FOLDER": "folder", "train.yaml": "segmentation_tiny"}

# What a command takes in the place of a recipe, and an option without one.
NO_RECIPE = {"CASE", "folder", ".", "--device", "--gpus", "--formats", "--fresh", "--known-bad"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_the_text_is_one_that_there_is(command: str) -> None:
    name, *rest = (FOR_EXAMPLE.get(word, word) for word in shlex.split(command)[1:])
    if name in cited.TAKE_A_RECIPE and rest and rest[0] not in NO_RECIPE:
        cited.check_command([name, *rest])
    else:
        assert len(cited.known_options(name, rest)) <= 2, command


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[path]):
        if not target.startswith("http"):
            file, _, heading = target.partition("#")
            place = (path.parent / file).resolve() if file else path
            cited.check_file(f"{place.relative_to(ROOT).as_posix()}{'#' if heading else ''}{heading}")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_files_in_the_text_exist(path: Path) -> None:
    for shown in re.findall(r"`((?:tests|zoo|examples|benchmarks|src|docs|scripts)/[^`\s]+)`", TEXTS[path]):
        cited.check_file(shown)


def test_every_pain_of_the_zoo_is_a_symptom() -> None:
    # Defects of one library have their own exhibits; what they look like is among the symptoms.
    named = set(re.findall(r"\b[pd]\d\d\w?\b", TROUBLE))
    assert {pain.number for pain in pains() if pain.number.startswith("p")} <= named
    assert named <= {pain.number for pain in pains()}


def test_the_exercise_has_the_figures_of_its_record() -> None:
    page = " ".join((DOCS / "exercises" / "three-precisions.md").read_text(encoding="utf-8").split())
    record = json.loads((DOCS / "exercises" / "three_precisions.json").read_text(encoding="utf-8"))
    emulated = record["bf16_emulated"]["rows"]
    assert record["command"] in page
    assert all(verdict in page for verdict in record["verdicts"])
    for row in [*record["rows"], *emulated]:
        if not row["failed"]:
            assert f"{row['metric']['mean']:.4f} ± {row['metric']['sd']:.4f}" in page
            assert f"{row['memory'] / 2**20:.1f} MiB" in page
    (parity,) = (row["parity"] for row in emulated)
    spread = (parity["high"] - parity["low"]) / 2
    assert f"difference {100 * parity['difference']:+.2f} ± {100 * spread:.2f} points" in page
