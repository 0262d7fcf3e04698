"""Small projects of every form, clean and broken: all findings are found where they are, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from halfstep.doctor.fixing import plan_fixes
from halfstep.doctor.patch import collect_edits
from halfstep.doctor.project_check import build_project_report, examine_project
from tests.doctor.editing import apply_edits

CORPUS = Path(__file__).parent / "corpus"
PROJECTS = sorted(path.parent for path in CORPUS.glob("*/expected.json"))
"""Each has an expected.json: the findings with their places, whether all is aligned, and the precision."""


def placed(finding: Any) -> list[str]:
    return [finding.id, finding.where]


def copied(project: Path, folder: Path) -> Path:
    """Return a copy without what is expected of it, which is a JSON file of another kind."""
    return Path(shutil.copytree(project, folder / project.name, ignore=shutil.ignore_patterns("expected.json")))


def test_the_corpus_is_there() -> None:
    assert len(PROJECTS) >= 50
    broken = [path for path in PROJECTS if not json.loads((path / "expected.json").read_text())["aligned"]]
    assert len(broken) >= 20
    assert len(PROJECTS) - len(broken) >= 20


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_all_is_found_and_nothing_else(project: Path, tmp_path: Path) -> None:
    expected = json.loads((project / "expected.json").read_text())
    found = examine_project(str(copied(project, tmp_path)), variables={})
    assert sorted(map(placed, found[2])) == sorted(expected["findings"])
    status = build_project_report(*found).status
    assert status.aligned is expected["aligned"]
    if expected["aligned"]:
        assert status.precision == expected["precision"]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_repair_removes_its_finding_and_brings_no_other(project: Path, tmp_path: Path) -> None:
    folder = copied(project, tmp_path)
    before = examine_project(str(folder), variables={})[2]
    mended = [finding for finding in before if finding.edits]
    if not mended:
        pytest.skip("no finding with an edit")
    apply_edits(folder, collect_edits(before))
    after = [placed(finding) for finding in examine_project(str(folder), variables={})[2]]
    assert not [finding for finding in mended if placed(finding) in after]
    assert {name for name, _ in after} <= {finding.id for finding in before}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
@pytest.mark.wording
def test_every_contradiction_says_what_to_write_and_no_setting_is_edited_in_python(
    project: Path, tmp_path: Path
) -> None:
    for finding in examine_project(str(copied(project, tmp_path)), variables={})[2]:
        # A word that only the project's own code knows has no advice.
        assert bool(finding.fix) is (finding.id != "settings.own_word"), finding.id
        if not finding.id.startswith("code."):
            assert not any(edit.file.endswith(".py") for edit in finding.edits)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_plan_ends_aligned_or_leaves_the_settings_alone(project: Path, tmp_path: Path) -> None:
    folder = copied(project, tmp_path)
    plan = plan_fixes(str(folder), variables={})
    after = build_project_report(*examine_project(str(folder), {}, plan.texts)).status.aligned
    assert after or plan.refused
    assert not plan.refused or not plan.texts


CODE = sorted(path.parent for path in (CORPUS.parent / "corpus_code").glob("*/expected.json"))


@pytest.mark.parametrize("project", CODE, ids=lambda path: path.name)
def test_a_project_shows_what_its_code_has_and_no_setting_that_is_false(project: Path, tmp_path: Path) -> None:
    rows = json.loads((project / "expected.json").read_text())
    found = examine_project(str(copied(project, tmp_path)), variables={})[2]
    assert sorted([f.id, f.where] for f in found) == sorted([row["id"], f"{row['file']}:{row['line']}"] for row in rows)


def test_the_corpus_of_code_is_there() -> None:
    assert len(CODE) >= 30
