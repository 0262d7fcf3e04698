"""Files that run code when the usual reader opens them, known by their first bytes. Nothing is opened as what it is.

A file that is merely damaged must not be taken for one of these: a checkpoint that is damaged is passed over, and one
that somebody put code into ends the run.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator

LOOKED_AT = 2**16
"""Bytes from the beginning of a file that tell what it is."""
LONGEST_HEADER = 100_000_000
"""Bytes that a safetensors file's header has at most."""
_ENOUGH = 4
"""Instructions in a row that no damaged file has by chance, behind the mark that pickles begin with since 2003."""
_PLENTY = 64
"""The same without the mark: letters and digits are instructions, too."""
_MARK = re.compile(rb"\x80[\x00-\x05]", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*")
"""A module and what is taken from it, as the instructions `GLOBAL` and `INST` have them."""


def runs_code(start: bytes) -> str | None:
    """What a file is, in words, where reading it the usual way could run code; None for everything else."""
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return None  # a safetensors file, behind the length of its header
    if start[:4] == b"PK\x03\x04":
        return "an archive with a pickle in it, as torch.save writes"
    if start[257:262] == b"ustar":
        return "an archive with pickles in it, as torch.save once wrote"
    is_pickle = _is_marked_pickle if _MARK.match(start) else _is_old_pickle
    return "a pickle" if is_pickle(start) else None


def _is_marked_pickle(start: bytes) -> bool:
    for count, (name, _) in enumerate(_instructions(start), start=1):
        # The shortest that can be read is the mark, one value, and the end.
        if count >= _ENOUGH or (name == "STOP" and count == _ENOUGH - 1):
            return True
    return False


def _is_old_pickle(start: bytes) -> bool:
    """Those have no mark, and random bytes are often a few instructions; but they name no module, and end soon."""
    for count, (name, argument) in enumerate(_instructions(start), start=1):
        names_code = name in ("GLOBAL", "INST") and _NAME.fullmatch(str(argument)) is not None
        if names_code or count >= _PLENTY:
            return True
    return False


def _instructions(start: bytes) -> Iterator[tuple[str, object]]:
    """The instructions as far as there are any. They are read, and none is carried out."""
    try:
        for instruction, argument, _ in pickletools.genops(start):
            yield instruction.name, argument
    except Exception:  # whatever a decoder stumbles over in bytes that are no pickle
        return
