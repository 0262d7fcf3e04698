"""Ctrl-C in the middle of a part, on a terminal of 80 columns: no process and no folder is left."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.selftest.names import PARTS
from tests.selftest.test_sabotage import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
_MOMENTS = {"ranks": 12.0}
"""Seconds into the part: where it has processes of its own, they should be there."""


def interrupted(part: str, folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Run a part alone on a terminal, end it with a signal in the middle, and return its exit code and its words."""
    ours, theirs = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}",
        "TMPDIR": str(folder),
        "COLUMNS": "80",
        "TERM": "xterm",
    }
    command = [sys.executable, "-m", "halfstep", "selftest", "--only", part, "--device", "cpu"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=folder)
    os.close(theirs)
    said = _read(ours, until=rf"1 of 1, {part}")
    said += _read(ours, seconds=_MOMENTS.get(part, 0.3))
    child.send_signal(number)
    said += _read(ours)
    os.close(ours)
    return child.wait(), said


def _read(source: int, until: str = "(?!)", seconds: float = 300.0) -> str:
    """Read until a pattern, for some seconds, or to the end."""
    said, deadline = "", time.monotonic() + seconds
    while not re.search(until, said) and (left := deadline - time.monotonic()) > 0:
        if select.select([source], [], [], left)[0]:
            try:
                said += os.read(source, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
    return said


def mine(folder: Path) -> list[str]:
    """The command lines of processes whose temporary folder is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left(part: str, number: signal.Signals, tmp_path: Path) -> None:
    code, said = interrupted(part, tmp_path, number)
    if "1 passed" not in said:  # the part may have been done already, and the signal have come at the very end
        assert code == 130, said
        assert "interrupted: 0 passed, 0 failed, 1 skipped" in said
    assert code in (0, 130, -number), said
    deadline = time.monotonic() + 5.0
    while (left := mine(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert list(tmp_path.iterdir()) == []
