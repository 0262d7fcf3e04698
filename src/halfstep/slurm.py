"""Name the ranks that srun starts directly, one task a rank, as torchrun names its own. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from halfstep.launch_variables import MOST_RANKS, number_in

PORTS = range(10_000, 30_000)
"""Ports for ranks under srun: below those that Linux gives to outgoing connections, from 32768 on."""
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(\[(?P<number>\d+)[^\]]*\](?P<rest>[^\[,]*))?")


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a rank that srun started; none where torchrun did, or for a single task."""
    # A batch script has these variables too, and is no rank: only srun sets the step.
    if any(name in environment for name in _SLURM) or "SLURM_STEP_ID" not in environment:
        return {}
    if number_in("SLURM_NTASKS", environment, 1, 1, MOST_RANKS) < 2 or any(
        name not in environment for name in _SLURM.values()
    ):
        return {}
    place = {"MASTER_ADDR": _first_host(environment), "MASTER_PORT": str(_port(environment))}
    ranks = {ours: environment[theirs] for ours, theirs in _SLURM.items()}
    return {**ranks, **{name: environment.get(name, value) for name, value in place.items()}}


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the host of task 0: the first of the step, as in `node[03-07,12],other`."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    found = _FIRST_HOST.match(listed)
    return "".join(part or "" for part in found.group("name", "number", "rest")) if found else "localhost"


def _port(environment: Mapping[str, str]) -> int:
    """Return a port that is the same on all tasks, and rarely shared by other jobs and steps on the same host."""
    # Slurm numbers the steps of a batch script itself, and of containers, from the end of 32 bits.
    job, step = (number_in(name, environment, 0, 0, 2**32) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return PORTS[(31 * job + step) % len(PORTS)]
