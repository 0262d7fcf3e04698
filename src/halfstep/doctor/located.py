"""A finding at a line of a project's file, and the change that removes it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.page import Box, build_finding_box

_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


_TESTS = frozenset({"test", "tests", "testing", "unittests"})
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|conftest\.py")


class Edit(NamedTuple):
    """One line of a file, as it is and as it should be."""

    file: str
    line: int
    before: str
    after: str
    """May be several lines; an empty text removes the line."""


@dataclass(frozen=True)
class LocatedFinding(Finding):
    """A finding with its place in a project, and the edits that remove it, if a program can make them."""

    json_keys: ClassVar = ("id", "severity", "evidence", "fix", "file", "line", "edits", "in_tests")

    file: str = ""
    line: int | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def where(self) -> str:
        """The place as compilers print it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def in_tests(self) -> bool:
        """Return whether it is in a test, which decides nothing about the project."""
        return is_test_file(self.file)


def is_test_file(file: str) -> bool:
    """Return whether a file of a project is a test, by its path in the project."""
    *folders, name = file.split("/")
    return bool(_TESTS & set(folders)) or bool(_TEST_FILE.fullmatch(name))


def build_located_box(finding: Finding) -> Box:
    """Return the box of a finding for a page, with its place if it has one."""
    place = finding.where if isinstance(finding, LocatedFinding) else ""
    return build_finding_box(finding.id, finding.severity, finding.evidence, finding.fix, place)


def split_lines(text: str) -> list[str]:
    """Return the lines of a text with their ends, as editors count them; str.splitlines breaks at form feeds too."""
    return _LINES.findall(text)


def apply_line_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return a file's text with its edits made; the ends of all other lines stay as they are.

    Raises WrongUse if a line is not what it was.
    """
    lines = split_lines(text)
    for edit in edits:
        line = lines[edit.line - 1] if edit.line <= len(lines) else ""
        body = line.rstrip("\r\n")
        if body != edit.before:
            raise WrongUse(
                f"{edit.file}, line {edit.line} has changed since it was read",
                allowed="files that do not change in the meantime",
                do="run halfstep doctor again",
            )
        end = line[len(body) :]
        # New lines end as the line that they come with; the last one of a file may have no end.
        lines[edit.line - 1] = edit.after.replace("\n", end or "\n") + end if edit.after else ""
    return "".join(lines)
