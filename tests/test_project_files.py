"""Files that people and services read, held to the source: workflows, versions, names, licenses, environments."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import halfstep
from halfstep.checkpoint import sealed
from halfstep.guard.failed_steps import reading
from halfstep.journal import events

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSIONING = (ROOT / "docs" / "versioning.md").read_text()
CHANGES = (ROOT / "CHANGELOG.md").read_text()
ENVIRONMENTS: list[dict[str, Any]] = json.loads((ROOT / "docs" / "environments.json").read_text())["environments"]


# -- workflows --------------------------------------------------------------------------------------------------------


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "release"]


def test_ci_runs_what_the_script_runs() -> None:
    script = re.findall(r"^scripts/\w+(?: --\w+)?", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    steps = {
        name: [step["run"] for step in jobs[name]["steps"] if "run" in step] for name in ("library", "rest", "docs")
    }
    # There one after another: the first that fails is named.
    every = {re.sub(r" (--ignore=)?tests/.*", "", command) for commands in steps.values() for command in commands}
    assert every == set(script)
    assert len(script) == 6
    # The tests of one job are those that the other leaves out.
    tested, left_out = (steps[name][-1].split()[1:] for name in ("library", "rest"))
    assert [f"--ignore={folder}" for folder in tested] == left_out
    assert all((ROOT / folder).is_dir() for folder in tested)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_nothing_is_permitted_by_default(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use)] == []
    flow = yaml.safe_load(text)
    assert flow["permissions"] == {}
    for job in flow["jobs"].values():
        writes = {name for name, right in job["permissions"].items() if right == "write"}
        assert not writes or job.get("environment"), "what may write waits for an environment's approval"
        assert job["timeout-minutes"] <= 60


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_scripts_of_workflows_are_there(path: Path) -> None:
    for name in re.findall(r"scripts/\w+", path.read_text()):
        assert (ROOT / name).is_file()


# -- versions ---------------------------------------------------------------------------------------------------------


def test_one_version_and_one_date() -> None:
    version, date = re.search(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", CHANGES, flags=re.MULTILINE).groups()  # type: ignore[union-attr]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version == halfstep.__version__ == PROJECT["version"] == citation["version"]
    assert date == citation["date-released"]
    assert citation["license"] == PROJECT["license"]


def test_the_public_names_are_those_that_the_page_names() -> None:
    table = VERSIONING.partition("| for | names |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) == len(set(names))
    assert sorted(names) == halfstep.__all__


def test_the_forms_on_disk_are_those_that_the_page_states() -> None:
    said = dict(re.findall(r"^\| (checkpoint|failed step|journal)[^|]*\| (\d+) \|", VERSIONING, flags=re.MULTILINE))
    assert said == {
        "checkpoint": str(sealed.FORMAT),
        "failed step": str(reading.FORMAT),
        "journal": str(events.FORMAT),
    }


# -- environments -----------------------------------------------------------------------------------------------------


def minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def environments_table() -> str:
    """Return the table of docs/versioning.md from the record: `python -m tests.test_project_files` prints it."""
    lines = ["| Python | torch | in an empty environment | tests of the step |", "|---|---|---|---|"]
    for row in ENVIRONMENTS:
        inside = ", ".join(["core", *row["extras"]])
        lines.append(f"| {row['python']} | {row['torch']} | {inside} | {row.get('tests_passed', 'not run')} |")
    return "\n".join(lines)


def test_the_page_shows_the_environments_that_were_tried() -> None:
    inside = VERSIONING.partition("<!-- environments -->")[2].partition("<!-- /environments -->")[0]
    assert inside.strip() == environments_table()
    assert all(row["command"].startswith("scripts/environments ") for row in ENVIRONMENTS)


def test_classifiers_and_floors_are_what_was_tested() -> None:
    pythons = {minor(row["python"]) for row in ENVIRONMENTS if row.get("tests_passed")}
    torches = {minor(row["torch"]) for row in ENVIRONMENTS if row.get("tests_passed")}
    named = {line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert named == pythons
    allowed = {f"Python 3.{number}" for number in range(11, 15)} | {f"torch 2.{number}" for number in range(10, 16)}
    tested = {f"Python {one}" for one in pythons} | {f"torch {one}" for one in torches}
    untested = re.search(r"^Untested, though nothing forbids them: (.*)\.$", VERSIONING, flags=re.MULTILINE)
    assert set(untested[1].split(", ") if untested else []) == allowed - tested - {f"torch {minor(pinned_torch())}"}
    assert (PROJECT["requires-python"], "torch>=2.10" in PROJECT["dependencies"]) == (">=3.11", True)


def pinned_torch() -> str:
    """Return the version with which the whole suite runs."""
    return re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[0]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_wheel_works_in_an_empty_environment_with_each_extra() -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "scripts/environments", "--extras", "--tests"], cwd=ROOT, check=True)


# -- licenses ---------------------------------------------------------------------------------------------------------


def test_the_licences_are_of_the_versions_that_are_pinned() -> None:
    """What needs no package: `scripts/licences --check`, in scripts/check, also reads what is installed."""
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = {name: version for name, version in re.findall(r"^\| ([\w.-]+) \| ([\w.]+) \|", page, flags=re.MULTILINE)}
    pinned = {
        name.lower().replace("_", "-"): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }
    assert {
        name: version for name, version in rows.items() if version not in (pinned.get(name, "any"), "version")
    } == {}
    groups = {"core": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    direct = {
        re.split(r"[<>=!~\[ ]", need)[0] for group in groups if group not in ("dev", "docs") for need in groups[group]
    }
    assert direct <= rows.keys()
    assert not re.search(r"https?://", page)


def test_every_direct_dependency_is_explained() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    for group, needs in PROJECT["optional-dependencies"].items():
        for need in needs:
            assert re.split(r"[<>=!~\[ ]", need)[0].lower() in page, f"{need} of {group}"


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/versioning.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / target).exists(), target


if __name__ == "__main__":
    print(environments_table())
