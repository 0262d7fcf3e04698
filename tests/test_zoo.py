"""The zoo is evidence: each pain must still hurt without halfstep and still be held with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo import pages
from zoo.outcome import Outcome

ROOT = Path(__file__).parents[1]
PAINS = zoo.pains()
ARMS = ("plain", "by_hand", "accelerated", "held")
# A number that stands alone: not the 16 of fp16, not the number of an issue.
FIGURE = re.compile(r"(?<![\w.#/])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\w)")

pytest.importorskip("accelerate")
pytest.importorskip("diffusers")
pytest.importorskip("lightning")
pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _one_thread_and_a_fresh_accelerate() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


def test_the_zoo_is_not_empty() -> None:
    assert len(PAINS) >= 39


NAMED = (
    "p03", "p06", "p07", "p11", "p15", "p16", "p17b", "p18", "p19", "p24", "p26", "p34", "p35", "p39", "p72",
)  # fmt: skip
"""Entries that read in a message what was wrong."""


SEVERAL_RANKS = ("d21",)


def _pain(pain: zoo.Pain) -> Any:
    marks = [pytest.mark.wording] * (pain.number in NAMED) + [pytest.mark.ranks] * (pain.number in SEVERAL_RANKS)
    return pytest.param(pain, marks=marks)


@pytest.mark.parametrize("pain", list(map(_pain, PAINS)), ids=[pain.folder for pain in PAINS])
def test_hurts_without_halfstep_and_is_held_with_it(pain: zoo.Pain) -> None:
    outcomes = {arm: pain.run(arm) for arm in ARMS if pain.has(arm)}
    assert outcomes["plain"].broken, outcomes["plain"].seen
    assert outcomes["held"].held, outcomes["held"].seen
    assert not _figures_without_a_source(pain, outcomes)


def _figures_without_a_source(pain: zoo.Pain, outcomes: dict[str, Outcome]) -> set[str]:
    """Figures in the README that no arm printed and no arm was given."""
    told = pain.readme.split("**Met in**")[0]
    code = "".join((ROOT / "zoo" / pain.folder / f"{arm}.py").read_text(encoding="utf-8") for arm in outcomes)
    seen = " ".join(outcome.seen for outcome in outcomes.values())
    known = set(FIGURE.findall(f"{seen} {code}"))
    return set(FIGURE.findall(told)) - known


@pytest.mark.parametrize("pain", PAINS, ids=lambda pain: pain.folder)
def test_readme_has_its_four_paragraphs(pain: zoo.Pain) -> None:
    for beginning in ("**You see**", "**Why**", "**halfstep**", "**Met in**"):
        assert pain.sentence(beginning)
    for beginning in ("**You see**", "**halfstep**"):
        assert pain.sentence(beginning)[-1] in ".`", "its first line goes into the zoo's table, so it is a sentence"
    assert re.search(r"[\w.-]+/[\w.-]+#\d+", pain.readme.split("**Met in**")[1])


def test_side_by_side_table_is_measured_has_five_rows_and_is_in_the_readme() -> None:
    table = pages.table()
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert header == ["", "torch", "accelerate", "halfstep"]
    assert [row[0] for row in rows] == list(pages.SIDE_BY_SIDE.values())
    assert len(rows) == 5
    assert {row[3] for row in rows} == {"held"}
    assert "held" not in {row[2] for row in rows}


def test_committed_readme_is_what_the_command_prints() -> None:
    assert (ROOT / "zoo" / "README.md").read_text(encoding="utf-8") == _zoo("--readme").stdout


@pytest.mark.slow
@pytest.mark.full
def test_command_runs_them_all() -> None:
    finished = _zoo("--json")
    results = json.loads(finished.stdout)
    assert [result["folder"] for result in results] == [pain.folder for pain in PAINS]
    assert all(result["plain"]["verdict"] == "broken" for result in results)
    assert all(result["halfstep"]["verdict"] == "held" for result in results)
    assert finished.returncode == 0


@pytest.mark.full
def test_command_says_how_many_were_held() -> None:
    assert _zoo().stdout.splitlines()[-1] == f"{len(PAINS)}/{len(PAINS)} held"


def test_a_folder_without_its_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p99_half_a_pain").mkdir()
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match="p99_half_a_pain has no plain"):
        zoo.pains()


def _zoo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zoo", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
