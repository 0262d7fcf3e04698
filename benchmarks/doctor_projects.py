"""Small projects with and without mistakes: does the doctor find the mistakes, only those, and is every edit right?

    python benchmarks/doctor_projects.py [--only NAME] [--json] [--record]
    python benchmarks/doctor_projects.py --fetched FOLDER --truth FILE [--json] [--record]

The projects are text files in benchmarks/doctor_projects/, one for each kind of mistake; no torch is needed:

    kind: what the mistakes of this file have in common
    === NAME                 a project; `=== NAME (healthy)` has no mistake: the twin of the broken NAME
    ready: yes               whether `halfstep doctor` ends with exit code 0; left out where any end will do
    verdict: WORDS           the start of the first line of `halfstep doctor`; left out where any will do
    precision: WORDS         the start of its line "mixed precision:"; left out where any will do
    finding: RULE [FILE]     a finding that has no line
    --- FILE                 a file of the project, up to the next line of this kind
    some code  <-- RULE      the doctor must report RULE at this line; `<-- unruled`: a mistake that no rule finds yet
    |> some other code       what `--fix` makes of the line above, `|>` alone removes it; others stay as they are

Every other finding is false, and every edit that is not stated is wrong. After all edits no finding may be new, files
must parse, and a second `--fix` must have nothing to do. The last line is
`doctor projects=N findings=N false=N missed=N precision=P% recall=R%`; the exit code is 1 where anything is wrong.

With --fetched, FOLDER/OWNER+NAME are projects of others and FILE is a list of mistakes that were found in them by
reading: {"kind", "rule", "project", "file", "line", "text"}. A mistake counts where `text` is still in the file. Recall
by kind is printed, with every miss and every error. `--record` keeps a result next to this file, without places.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml

from halfstep.doctor.fixing import plan_fixes
from halfstep.doctor.located import LocatedFinding
from halfstep.doctor.patch import write_texts
from halfstep.doctor.project_check import build_project_report, examine_project
from halfstep.doctor.project_page import ProjectReport
from halfstep.draw.terminal import render_plain_text

CORPUS = Path(__file__).with_suffix("")
HEALTHY = " (healthy)"
UNRULED = "unruled"
_WIDE = 500
"""Columns of a page on which no line is wrapped."""
_PRECISION = "  mixed precision: "
NEAR = 3
"""Lines between a mistake of the list and a finding that names it: people point at a call, rules at its statement."""
WHOLE_FILE = frozenset({"code.scaler_with_bf16", "code.autocast_round_loop", "code.ema_on_skipped_steps"})
"""Rules that name one line for a mistake of two or more places: the scaler's, the autocast's, the average's."""


class Place(NamedTuple):
    """A rule and the line of a project where it applies."""

    rule: str
    file: str
    line: int | None

    def __str__(self) -> str:
        return f"{self.rule} at {self.file}" + (f":{self.line}" if self.line else "")


@dataclass
class Project:
    """A project of the corpus, and what the doctor must say about it."""

    kind: str
    name: str
    ready: bool | None = None
    verdict: str = ""
    precision: str = ""
    files: dict[str, list[str]] = field(default_factory=dict)
    expected: list[Place] = field(default_factory=list)
    unruled: int = 0
    edits: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """Lines that `--fix` replaces, by file and number; no line in their place removes one."""

    def text(self, file: str) -> str:
        """Return a file as it is."""
        return "\n".join([*self.files[file], ""])

    def fixed(self, file: str) -> str:
        """Return a file as it must be after `--fix`."""
        lines = ((self.edits.get((file, number), [line])) for number, line in enumerate(self.files[file], 1))
        return "\n".join([*(line for new in lines for line in new), ""])

    @property
    def healthy(self) -> bool:
        """Whether nothing may be found."""
        return self.name.endswith(HEALTHY)


@dataclass(frozen=True)
class Outcome:
    """What the doctor said about a project, compared with what it should have said."""

    project: Project
    findings: int
    false: list[str]
    missed: list[str]
    wrong_edits: list[str]
    wrong_verdicts: list[str]


# -- the corpus ----------------------------------------------------------------------------------------------------


def read_projects(folder: Path = CORPUS) -> list[Project]:
    """Return the projects of all text files of a folder."""
    return [project for path in sorted(folder.glob("*.txt")) for project in _projects_of(path.read_text("utf-8"))]


def _projects_of(text: str) -> Iterator[Project]:
    first, *parts = re.split(r"^=== (.+)\n", text, flags=re.MULTILINE)
    kind = first.strip().removeprefix("kind: ")
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        head, *files = re.split(r"^--- (.+)\n", body, flags=re.MULTILINE)
        project = Project(kind, name)
        _read_head(project, head)
        for file, content in zip(files[::2], files[1::2], strict=True):
            _read_file(project, file, content.rstrip("\n").split("\n"))
        yield project


def _read_head(project: Project, head: str) -> None:
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "ready":
            project.ready = value == "yes"
        elif key == "verdict":
            project.verdict = value
        elif key == "precision":
            project.precision = value
        elif key == "finding":
            rule, _, file = value.partition(" ")
            project.expected.append(Place(rule, file, None))


def _read_file(project: Project, file: str, lines: list[str]) -> None:
    own = project.files.setdefault(file, [])
    for line in lines:
        if line.startswith("|>"):
            project.edits.setdefault((file, len(own)), []).extend([line[3:]] if line[3:] else [])
            continue
        code, _, rules = line.partition("  <-- ")
        own.append(code)
        named = rules.split(", ") if rules else []
        project.unruled += named.count(UNRULED)
        project.expected += [Place(rule, file, len(own)) for rule in named if rule != UNRULED]


# -- one project ---------------------------------------------------------------------------------------------------


def check(project: Project) -> Outcome:
    """Run the doctor on a project in a folder of its own, then its `--fix`, then the doctor again."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "project"
        for name in project.files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(project.text(name), encoding="utf-8")
        examined = examine_project(str(root), {})
        found = examined[2]
        places = [Place(one.id, one.file, one.line) for one in found]
        expected = Counter(_wherever(project.expected, places))
        false = [str(place) for place in (Counter(places) - expected).elements()]
        missed = [str(place) for place in (expected - Counter(places)).elements()]
        verdicts = list(_wrong_verdicts(project, build_project_report(*examined)))
        return Outcome(project, len(places), false, missed, _wrong_edits(project, root, found), verdicts)


def _wrong_verdicts(project: Project, report: ProjectReport) -> Iterator[str]:
    """Yield what the doctor says in place of what the project states."""
    if project.ready not in (None, report.status.aligned):
        yield f"ready: {'yes' if report.status.aligned else 'no'}"
    lines = render_plain_text(report.page(), width=_WIDE).splitlines()
    precision = next(line for line in lines if line.startswith(_PRECISION)).removeprefix(_PRECISION)
    if not lines[0].startswith(project.verdict):
        yield f"verdict: {lines[0]}"
    if not precision.startswith(project.precision):
        yield f"precision: {precision}"


def _wherever(expected: Sequence[Place], found: Sequence[Place]) -> Iterator[Place]:
    """Return the places, with the file and line of the finding where a project leaves them to the doctor."""
    for place in expected:
        same = [one for one in found if one.rule == place.rule]
        yield same[0] if not place.file and same else place


def _wrong_edits(project: Project, root: Path, found: Sequence[LocatedFinding]) -> list[str]:
    """Return in what the files differ from those that the project states after `--fix`, and what is wrong with them."""
    plan = plan_fixes(str(root), variables={})
    before = plan.project.texts
    wrong = []
    for name in project.files:
        stated, made = project.fixed(name), plan.texts.get(name, project.text(name))
        changes = list(difflib.unified_diff(stated.splitlines(), made.splitlines(), n=0, lineterm=""))[2:]
        wrong += ["\n    ".join([f"{name}, as stated and as made:", *changes])] if stated != made else []
    write_texts(root, before, plan.texts)
    wrong += [f"{name} does not parse" for name in plan.texts if not _parses(root / name)]
    again = Counter(one.id for one in examine_project(str(root), {})[2])
    wrong += [f"{rule} after --fix" for rule in (again - Counter(one.id for one in found)).elements()]
    return wrong + [f"a second --fix edits {name}" for name in plan_fixes(str(root), variables={}).texts]


def _parses(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".py":
            ast.parse(text)
        elif path.suffix in (".json", ".ipynb"):
            json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            yaml.safe_load(text)
    except (SyntaxError, ValueError, yaml.YAMLError):
        return False
    return True


# -- projects of others --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A mistake in a project of others, found by reading."""

    kind: str
    rule: str
    project: str
    file: str
    line: int
    text: str

    def line_in(self, folder: Path) -> int | None:
        """Return the line that has the mistake now, the nearest to where it was; None where it is gone."""
        path = folder / self.project / self.file
        if not path.is_file():
            return None
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        same = [number for number, line in enumerate(lines, 1) if line.strip() == self.text]
        return min(same, key=lambda number: abs(number - self.line), default=None)

    def is_named_by(self, finding: LocatedFinding, line: int) -> bool:
        """Return whether a finding names this mistake, which is at `line` now."""
        if finding.id != self.rule or finding.file != self.file or finding.line is None:
            return False
        return self.rule in WHOLE_FILE or abs(finding.line - line) <= NEAR


@dataclass
class Reading:
    """What the doctor finds in projects of others."""

    projects: int = 0
    seconds: float = 0.0
    kinds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    rules: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    edits: int = 0

    @property
    def found(self) -> int:
        """Mistakes of the list that have a finding."""
        return sum(found for found, _ in self.kinds.values())

    @property
    def places(self) -> int:
        """Mistakes of the list that are still in the files."""
        return sum(places for _, places in self.kinds.values())


def read_fetched(folder: Path, truth: Sequence[Mistake]) -> Reading:
    """Run the doctor on every project below `folder`, and compare its findings with a list of mistakes."""
    reading = Reading()
    begun = time.process_time()
    for path in sorted(one for one in folder.iterdir() if one.is_dir()):
        found = examine_project(str(path), {})[2]
        reading.projects += 1
        reading.rules.update(one.id for one in found)
        reading.edits += sum(len(one.edits) for one in found)
        reading.errors += [f"{one.id} at {path.name}/{one.where}" for one in found if one.severity == "error"]
        for mistake in (one for one in truth if one.project == path.name):
            line = mistake.line_in(folder)
            if line is None:
                continue
            hit = any(mistake.is_named_by(one, line) for one in found)
            reading.kinds[mistake.kind][0] += hit
            reading.kinds[mistake.kind][1] += 1
            if not hit:
                reading.missed.append(f"{mistake.kind}: {path.name}/{mistake.file}:{line}")
        print(f"{reading.projects:3} {path.name}: {len(found)} findings", file=sys.stderr, flush=True)
    reading.seconds = time.process_time() - begun
    return reading


# -- the page ------------------------------------------------------------------------------------------------------


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", metavar="NAME", help="only the projects of this name, and their twins")
    options.add_argument("--fetched", metavar="FOLDER", type=Path, help="read projects of others instead")
    options.add_argument("--truth", metavar="FILE", type=Path, help="the mistakes in them, as JSON")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    given = options.parse_args()
    if given.truth and not given.fetched:
        options.error("--truth is a list of mistakes in the projects of --fetched FOLDER")
    if given.fetched:
        if not given.fetched.is_dir():
            options.error(f"--fetched {given.fetched} is no folder")
        rows = json.loads(given.truth.read_text()) if given.truth else []
        return _show_reading(read_fetched(given.fetched, [Mistake(**row) for row in rows]), given.json, given.record)
    chosen = [one for one in read_projects() if given.only in (None, one.name.removesuffix(HEALTHY))]
    if given.record and given.only:
        options.error("--record keeps the result of all projects: leave out --only")
    if not chosen:
        options.error(f"--only {given.only}: no project has this name")
    begun = time.process_time()
    outcomes = [check(project) for project in chosen]
    return _show_outcomes(outcomes, time.process_time() - begun, given.json, given.record)


def _show_outcomes(outcomes: Sequence[Outcome], seconds: float, as_json: bool, record: bool) -> int:
    findings = sum(one.findings for one in outcomes)
    expected = sum(len(one.project.expected) for one in outcomes)
    false, missed = sum(len(one.false) for one in outcomes), sum(len(one.missed) for one in outcomes)
    wrong = sum(len(one.wrong_edits) for one in outcomes)
    verdicts = sum(len(one.wrong_verdicts) for one in outcomes)
    report = {
        "command": "python benchmarks/doctor_projects.py",
        "projects": len(outcomes),
        "healthy": sum(one.project.healthy for one in outcomes),
        "findings": findings,
        "expected": expected,
        "false": false,
        "missed": missed,
        "edits": sum(len(one.project.edits) for one in outcomes),
        "wrong_edits": wrong,
        "wrong_verdicts": verdicts,
        "unruled": sum(one.project.unruled for one in outcomes),
        "precision": _percent(findings - false, findings),
        "recall": _percent(expected - missed, expected),
        "cpu_seconds": round(seconds, 1),
        "kinds": _by_kind(outcomes),
    }
    _keep(report, "doctor_projects.json", record)
    if as_json:
        print(json.dumps(report | {"rows": [_row(one) for one in outcomes]}, indent=1))
    else:
        for one in outcomes:
            for word, places in _wrong(one).items():
                for place in places:
                    print(f"{one.project.name}: {word}: {place}")
        for kind, (found, of) in _by_kind(outcomes).items():
            print(f"{found}/{of}  {kind}")
        done = f"edits={report['edits']} wrong_edits={wrong} wrong_verdicts={verdicts} unruled={report['unruled']}"
        print(f"{done} in {seconds:.1f} s of CPU")
        print(
            f"doctor projects={len(outcomes)} findings={findings} false={false} missed={missed} "
            f"precision={report['precision']}% recall={report['recall']}%"
        )
    return 1 if false or missed or wrong or verdicts else 0


def _by_kind(outcomes: Iterable[Outcome]) -> dict[str, list[int]]:
    """Return how many of each kind's mistakes were found, and how many there are."""
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in outcomes:
        places = len(one.project.expected)
        kinds[one.project.kind][0] += places - len(one.missed)
        kinds[one.project.kind][1] += places + one.project.unruled
    return dict(kinds)


def _row(one: Outcome) -> dict[str, object]:
    return {"project": one.project.name, "kind": one.project.kind, "findings": one.findings, **_wrong(one)}


def _wrong(one: Outcome) -> dict[str, list[str]]:
    return {
        "false": one.false,
        "missed": one.missed,
        "wrong edit": one.wrong_edits,
        "wrong verdict": one.wrong_verdicts,
    }


def _show_reading(reading: Reading, as_json: bool, record: bool) -> int:
    report = {
        "command": "python benchmarks/doctor_projects.py --fetched FOLDER --truth FILE",
        "projects": reading.projects,
        "places": reading.places,
        "found": reading.found,
        "recall": _percent(reading.found, reading.places),
        "kinds": dict(reading.kinds),
        "findings": dict(sorted(reading.rules.items())),
        "errors": len(reading.errors),
        "edits": reading.edits,
        "cpu_seconds": round(reading.seconds),
    }
    _keep(report, "doctor_fetched.json", record)
    if as_json:
        print(json.dumps(report | {"missed": reading.missed, "error_places": reading.errors}, indent=1))
        return 0
    for place in reading.errors:
        print(f"error: {place}")
    for place in reading.missed:
        print(f"missed: {place}")
    for rule, count in sorted(reading.rules.items()):
        print(f"{count:5}  {rule}")
    for kind, (found, of) in reading.kinds.items():
        print(f"{found}/{of}  {kind}")
    print(
        f"doctor fetched projects={reading.projects} findings={reading.rules.total()} errors={len(reading.errors)} "
        f"found={reading.found}/{reading.places} recall={report['recall']}%"
    )
    return 0


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 100.0


def _keep(report: dict[str, object], name: str, record: bool) -> None:
    if record:
        Path(__file__).with_name(name).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
