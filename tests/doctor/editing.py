"""Edits of findings, written to their files as `doctor --fix` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfstep.doctor.located import Edit
from halfstep.doctor.patch import apply_text_edits, write_texts


def apply_edits(root: Path, edits: Sequence[Edit]) -> list[str]:
    files = dict.fromkeys(edit.file for edit in edits)
    before = {file: (root / file).read_bytes().decode("utf-8-sig") for file in files}
    return write_texts(root, before, apply_text_edits(before, edits))
