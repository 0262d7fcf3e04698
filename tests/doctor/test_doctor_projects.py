"""The projects of `benchmarks/doctor_projects.py`: all mistakes found, nothing else, and every edit as stated."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import doctor_projects
from benchmarks.doctor_projects import Mistake, Place, Project, check, read_fetched, read_projects

PROJECTS = read_projects()
KINDS = 18
"""Kinds of mistakes that were found by reading projects of others."""


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_the_doctor_says_what_a_project_states(project: Project) -> None:
    outcome = check(project)
    assert not outcome.false
    assert not outcome.missed
    assert not outcome.wrong_edits
    assert not outcome.wrong_verdicts


def test_every_kind_of_mistake_is_there_twice_with_a_healthy_twin() -> None:
    healthy = {project.name for project in PROJECTS if project.healthy}
    broken = Counter(project.kind for project in PROJECTS if f"{project.name}{doctor_projects.HEALTHY}" in healthy)
    assert len(PROJECTS) >= 60
    assert len(broken) > KINDS
    assert min(broken.values()) >= 2
    assert len({project.name for project in PROJECTS}) == len(PROJECTS)
    for project in PROJECTS:
        assert not (project.healthy and (project.expected or project.edits or project.unruled)), project.name
        assert project.healthy or project.expected or project.unruled, project.name


def test_the_committed_result_is_about_these_projects() -> None:
    kept = json.loads(Path(doctor_projects.__file__).with_suffix(".json").read_text())
    assert kept["projects"] == len(PROJECTS)
    assert kept["expected"] == sum(len(project.expected) for project in PROJECTS)
    assert (kept["false"], kept["missed"], kept["wrong_edits"], kept["wrong_verdicts"]) == (0, 0, 0, 0)


def named(name: str) -> Project:
    return next(project for project in PROJECTS if project.name == name)


def test_a_wrong_statement_is_seen() -> None:
    """What the benchmark counts can be other than 0."""
    project = named("char_gpt")
    [place] = project.expected
    moved = check(replace(project, expected=[Place(place.rule, place.file, 1)], ready=True))
    assert moved.false == [str(place)]
    assert moved.missed == [f"{place.rule} at {place.file}:1"]
    assert moved.wrong_verdicts == ["ready: no"]
    assert check(replace(project, edits={})).wrong_edits
    [wrong] = check(replace(project, edits={**project.edits, ("gpt.yaml", 1): ["device: cpu"]})).wrong_edits
    assert "-device: cpu" in wrong
    assert "+device: cuda" in wrong


def test_a_mistake_that_moved_is_found_and_one_that_is_gone_is_not_counted(tmp_path: Path) -> None:
    project = named("char_gpt")
    [place] = project.expected
    assert place.line
    lines = project.files[place.file]
    folder = tmp_path / "someone+char_gpt"
    folder.mkdir()
    (folder / "moved.py").write_text("\n".join(["# moved", "", *lines, ""]))
    text = lines[place.line - 1].strip()
    mistake = Mistake("clip", place.rule, folder.name, "moved.py", place.line, text)
    others = [replace(mistake, text="gone()"), replace(mistake, file="gone.py"), replace(mistake, rule="code.other")]
    reading = read_fetched(tmp_path, [mistake, *others])
    assert (reading.projects, reading.found, reading.places) == (1, 1, 2)
    assert reading.missed == [f"clip: {folder.name}/moved.py:{place.line + 2}"]
    assert reading.errors == [f"{place.rule} at {folder.name}/moved.py:{place.line + 2}"]
