"""A file that was touched is another one."""

from __future__ import annotations

from halfstep.data import file_state

WHAT = "a file with a new modification time counts as changed, even with the same content"
ROWS = ("F51",)


def apply() -> None:
    file_state.compute_block_digest = lambda path, starts: "unknown"
