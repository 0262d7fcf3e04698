"""Changed texts of files as a unified diff, and written to the files: all of them, or none. Imports no torch."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.doctor.located import Edit, LocatedFinding, apply_line_edits, split_lines
from halfstep.errors import WrongUse
from halfstep.files import replace_file
from halfstep.json_data import JsonResult

_MARK = b"\xef\xbb\xbf"
"""What some editors write before the first character; it stays where it is."""


def collect_edits(findings: Iterable[LocatedFinding]) -> list[Edit]:
    """Return the edits of all findings; where two change one line, the first finding's."""
    found: dict[tuple[str, int], Edit] = {}
    for finding in findings:
        if not any((edit.file, edit.line) in found for edit in finding.edits):
            found |= {(edit.file, edit.line): edit for edit in finding.edits}
    return list(found.values())


def apply_text_edits(texts: Mapping[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """Return the texts of the files that the edits change, with the edits made."""
    by_file: dict[str, list[Edit]] = {}
    for edit in sorted(edits, key=lambda edit: (edit.file, edit.line)):
        by_file.setdefault(edit.file, []).append(edit)
    return {file: apply_line_edits(texts[file], own) for file, own in by_file.items()}


def format_unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the changes of `after` as a patch that `git apply` and `patch -p1` take."""
    parts = []
    for file, text in after.items():
        lines = difflib.unified_diff(
            _split_bare_lines(before[file]), _split_bare_lines(text), f"a/{file}", f"b/{file}", lineterm=""
        )
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _split_bare_lines(text: str) -> list[str]:
    return [line.rstrip("\r\n") for line in split_lines(text)]


def write_texts(root: Path, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Write the texts of `after` and return their files; on an error every file is restored.

    Raise `WrongUse` if a file has changed since it was read.
    """
    originals: dict[Path, bytes] = {}
    try:
        for file, text in after.items():
            path = root / file
            content = path.read_bytes()
            mark = _MARK if content.startswith(_MARK) else b""
            if content[len(mark) :] != before[file].encode("utf-8"):
                raise WrongUse(
                    f"{file} has changed since it was read",
                    allowed="files that do not change in the meantime",
                    do="run halfstep doctor again",
                )
            originals[path] = content
            _rewrite_file(path, mark + text.encode("utf-8"))
    except BaseException:
        for path, content in originals.items():
            _rewrite_file(path, content)
        raise
    return list(after)


def _rewrite_file(path: Path, content: bytes) -> None:
    """Replace the file behind a symlink, and keep its permissions."""
    with replace_file(path.resolve()) as draft:
        draft.write_bytes(content)
        shutil.copymode(path, draft)


@dataclass(frozen=True)
class ProjectPatch(JsonResult):
    """The changes of --fix to a folder, made or only shown."""

    patch: str
    """As a unified diff; empty if no finding has an edit."""
    refused: str
    """Settings that are left alone, and why."""
    files_modified: list[str] | None
    """None if the patch is only shown."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the files where some were to be written."""
        return {key: value for key, value in super().as_dict().items() if value is not None}
