"""Recognize files that can run code when their usual reader opens them; only the first bytes are inspected.

A damaged file must not be mistaken for one of these: a damaged checkpoint is skipped, but code in a checkpoint ends the
run.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator

LOOKED_AT = 2**16
"""The number of bytes that are inspected."""
LONGEST_HEADER = 100_000_000
"""The maximum length of a safetensors header, a limit of the safetensors library itself."""
_ENOUGH = 4
"""The number of valid opcodes in a row, after the protocol mark (pickle protocol 2, 2003), that prove a pickle."""
_PLENTY = 64
"""The same without the mark; it is higher because letters and digits are valid opcodes of protocol 0."""
_MARK = re.compile(rb"\x80[\x00-\x05]", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*")
"""The argument of the opcodes `GLOBAL` and `INST`: a module and a name in it."""


def runs_code(start: bytes) -> str | None:
    """Return a description of a file that could run code when read with its usual reader, else None."""
    # A safetensors file. Checked first: the bytes of its header's length can look like those of a pickle or an archive.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return None
    if start[:4] == b"PK\x03\x04":
        return "an archive with a pickle in it, as torch.save writes"
    if start[257:262] == b"ustar":
        return "an archive with pickles in it, as torch.save once wrote"
    is_pickle = _is_marked_pickle if _MARK.match(start) else _is_old_pickle
    return "a pickle" if is_pickle(start) else None


def _is_marked_pickle(start: bytes) -> bool:
    for count, (name, _) in enumerate(_instructions(start), start=1):
        # The shortest valid pickle has three opcodes: the mark, one value and STOP.
        if count >= _ENOUGH or (name == "STOP" and count == _ENOUGH - 1):
            return True
    return False


def _is_old_pickle(start: bytes) -> bool:
    """Return whether the bytes are a pickle of protocol 0 or 1."""
    # These have no mark, and random bytes are often a few valid opcodes. But random bytes name no module, and soon
    # contain an invalid opcode.
    for count, (name, argument) in enumerate(_instructions(start), start=1):
        names_code = name in ("GLOBAL", "INST") and _NAME.fullmatch(str(argument)) is not None
        if names_code or count >= _PLENTY:
            return True
    return False


def _instructions(start: bytes) -> Iterator[tuple[str, object]]:
    """Yield opcodes and arguments up to the first invalid one; nothing is executed."""
    try:
        for instruction, argument, _ in pickletools.genops(start):
            yield instruction.name, argument
    except Exception:
        # A decoder can raise anything for bytes that are no pickle.
        return
