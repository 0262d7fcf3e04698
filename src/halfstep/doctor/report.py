"""`halfstep.doctor(folder)`: the check of a project as a Python object. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.doctor.located import LocatedFinding
from halfstep.doctor.project_check import examine_project, status_of_project


@dataclass(frozen=True)
class DoctorReport:
    """The verdict on a project, and what was found in it."""

    folder: str
    ready: bool
    """Whether there is no error outside of tests; `halfstep doctor FOLDER` then ends with exit code 0."""
    summary: str
    precision: str | None
    """What all settings ask for; `several` where runs differ, None where nothing speaks of it."""
    files: int
    findings: tuple[LocatedFinding, ...]

    def __str__(self) -> str:
        lines = [f"{self.folder}: {self.summary}, {self.files} files looked at"]
        for finding in self.findings:
            aside = " (in tests)" if finding.in_tests else ""
            lines += [f"{finding.severity} {finding.id}  {finding.where}{aside}", f"  {finding.evidence}"]
            lines += [f"  do: {finding.fix}"] if finding.fix else []
        return "\n".join(lines)


def doctor(folder: str | os.PathLike[str] = ".", *, variables: Mapping[str, str] = os.environ) -> DoctorReport:
    """Check a project's settings, scripts, notebooks and checkpoints; nothing in the folder is imported or run.

    `variables` is the environment that a run would have. Raise `WrongUse` where there is no such folder.
    """
    place = os.fspath(folder)
    project, runs, findings = examine_project(place, variables)
    status = status_of_project(runs, findings)
    return DoctorReport(place, status.aligned, status.final, status.precision, project.files, tuple(findings))
