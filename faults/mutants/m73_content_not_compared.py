"""A file that was touched is another one."""

from __future__ import annotations

from halfstep.data import file_state

WHAT = "a file counts as unchanged only if its times are"
ROWS = ("F51",)


def apply() -> None:
    file_state.compute_block_digest = lambda path, starts: "unknown"
