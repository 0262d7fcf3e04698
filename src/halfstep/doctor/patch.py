"""Edits of a project as a unified diff, and written to its files: all of them, or none. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from halfstep.doctor.fixing import rewrite
from halfstep.doctor.located import Edit, LocatedFinding, lines_of, patched


def edits_of(findings: Iterable[LocatedFinding]) -> list[Edit]:
    """Return the edits of all findings; where two change one line, the first finding's."""
    found: dict[tuple[str, int], Edit] = {}
    for finding in findings:
        if not any((edit.file, edit.line) in found for edit in finding.edits):
            found |= {(edit.file, edit.line): edit for edit in finding.edits}
    return list(found.values())


def unified_diff(texts: Mapping[str, str], edits: Sequence[Edit]) -> str:
    """Return the edits as a patch that `git apply` and `patch -p1` take."""
    parts = []
    for file, own in _by_file(edits).items():
        before, after = texts[file], patched(texts[file], own)
        lines = difflib.unified_diff(_bare(before), _bare(after), f"a/{file}", f"b/{file}", lineterm="")
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _bare(text: str) -> list[str]:
    return [line.rstrip("\r\n") for line in lines_of(text)]


def apply_edits(root: Path, edits: Sequence[Edit]) -> list[str]:
    """Write the edits and return the files that changed; on an error every file is as it was.

    Raise `WrongUse` where a file has changed since it was read.
    """
    originals: dict[Path, bytes] = {}
    try:
        for file, own in _by_file(edits).items():
            path = root / file
            content = path.read_bytes()
            # Decoded without the byte order mark of some editors, which stays where it is.
            mark = content[:3] if content.startswith(b"\xef\xbb\xbf") else b""
            new = patched(content[len(mark) :].decode("utf-8"), own)
            originals[path] = content
            rewrite(path, mark + new.encode("utf-8"))
    except BaseException:
        for path, content in originals.items():
            rewrite(path, content)
        raise
    return list(_by_file(edits))


def _by_file(edits: Sequence[Edit]) -> dict[str, list[Edit]]:
    found: dict[str, list[Edit]] = {}
    for edit in sorted(edits, key=lambda edit: (edit.file, edit.line)):
        found.setdefault(edit.file, []).append(edit)
    return found
