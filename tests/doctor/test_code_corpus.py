"""Small projects, clean and broken, each with the findings that it must have: all found, none false, all mended."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from halfstep.doctor.code import check_code, check_file
from halfstep.doctor.code.checking import all_rules
from halfstep.doctor.located import Edit, LocatedFinding

CORPUS = Path(__file__).parent / "corpus_code"
PROJECTS = sorted(path.parent for path in CORPUS.glob("*/expected.json"))
Place = tuple[str, str, int | None]


def expected(project: Path) -> list[Place]:
    rows = json.loads((project / "expected.json").read_text())
    return sorted((row["id"], row["file"], row["line"]) for row in rows)


def findings(project: Path) -> list[LocatedFinding]:
    names = sorted(str(path.relative_to(project)) for path in project.rglob("*.py"))
    return [finding for name in names for finding in check_file(project, name)]


def places(found: Iterable[LocatedFinding]) -> list[Place]:
    return sorted((finding.id, finding.file, finding.line) for finding in found)


def applied(text: str, edits: Iterable[Edit]) -> str:
    """The text with its edits made, from the last line to the first."""
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda one: one.line, reverse=True):
        assert lines[edit.line - 1] == edit.before
        lines[edit.line - 1 : edit.line] = edit.after.split("\n") if edit.after else []
    return "\n".join(lines)


def test_the_corpus_is_there() -> None:
    assert len(PROJECTS) >= 30
    assert sum(not expected(project) for project in PROJECTS) >= 12, "clean projects"
    assert sum(len(expected(project)) for project in PROJECTS) >= 30, "mistakes"


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_all_are_found_and_none_is_false(project: Path) -> None:
    found = findings(project)
    assert places(found) == expected(project)
    for finding in found:
        assert f"line {finding.line}" in finding.evidence
        assert finding.fix


MENDABLE = [
    pytest.param(project, finding, id=f"{project.name}-{finding.where}-{finding.id}")
    for project in PROJECTS
    for finding in findings(project)
    if finding.edits
]


@pytest.mark.parametrize(("project", "finding"), MENDABLE)
def test_a_repair_removes_its_finding_and_brings_no_other(project: Path, finding: LocatedFinding) -> None:
    text = (project / finding.file).read_text()
    before = [one.id for one in check_code(finding.file, text)]
    mended = applied(text, finding.edits)
    after = [one.id for one in check_code(finding.file, mended)]
    before.remove(finding.id)
    # One cast may be behind two findings, and go with both.
    assert set(after) <= set(before)
    assert after.count(finding.id) == before.count(finding.id)
    if "!pip" not in mended and "!nvidia" not in mended:
        ast.parse(mended)


def test_every_rule_has_a_broken_sample_and_nearly_every_one_a_repair() -> None:
    found = [finding for project in PROJECTS for finding in findings(project)]
    names = {f"code.{rule.__module__.rpartition('.')[2]}" for rule in all_rules()}
    assert {finding.id for finding in found} == names
    assert {finding.id for finding in found if finding.edits} == names


def test_all_repairs_together_leave_a_file_without_findings(tmp_path: Path) -> None:
    """One repair after the other, as `--fix` makes them."""
    for project in PROJECTS:
        for path in project.rglob("*.py"):
            text = path.read_text()
            for _ in range(10):
                mendable = [finding for finding in check_code(path.name, text) if finding.edits]
                if not mendable:
                    break
                text = applied(text, mendable[0].edits)
            assert not mendable, path
