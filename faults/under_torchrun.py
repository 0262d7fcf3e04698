"""A run under torchrun itself, which restarts its ranks: `python -m faults.under_torchrun` is what it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from faults import child, mutants
from faults.trouble import Trouble

LONGEST = 420.0
"""Seconds for a launch with its restarts: every attempt loads torch anew, on each rank."""
_ATTEMPTS = "attempts"


class Ended(NamedTuple):
    code: int
    starts: list[float]
    """When rank 0 began, in each attempt."""


def launch(
    folder: Path,
    settings: Mapping[str, Any],
    trouble: Trouble | None = None,
    *,
    restarts: int = 1,
    always: bool = False,
    ranks: int = 2,
) -> Ended:
    """Run to the end of the last attempt; `trouble` happens in the first one, or in every one."""
    asked = {
        "folder": str(folder),
        "settings": dict(settings),
        "trouble": None if trouble is None else asdict(trouble),
        "always": always,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, f"--max-restarts={restarts}", "-m", __name__, json.dumps(asked)]
    with tempfile.TemporaryFile() as output:
        ended = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=LONGEST)
    counted = child.own_file(folder, f".{_ATTEMPTS}", 0)
    return Ended(ended.returncode, list(map(float, counted.read_text().split())) if counted.exists() else [])


def main(text: str) -> None:
    asked = json.loads(text)
    with child.own_file(asked["folder"], f".{_ATTEMPTS}").open("a") as file:
        file.write(f"{time.time()}\n")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    trouble = Trouble(**asked["trouble"]) if asked["trouble"] and (first or asked["always"]) else None
    child.run(asked["folder"], asked["settings"], before=trouble, mutant=mutants.current())


if __name__ == "__main__":
    main(sys.argv[1])
