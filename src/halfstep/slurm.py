"""Name the ranks that srun starts directly, one task a rank, as torchrun names its own. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

PORTS = range(10_000, 30_000)
"""Ports for ranks under srun: below those that Linux gives to outgoing connections, from 32768 on."""
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(\[(?P<number>\d+)[^\]]*\](?P<rest>[^\[,]*))?")


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a rank that srun started; none where torchrun did, or for a single task."""
    # A batch script has these variables too, and is no rank: only srun sets the step.
    if any(name in environment for name in _SLURM) or "SLURM_STEP_ID" not in environment:
        return {}
    if int(environment.get("SLURM_NTASKS", "1")) < 2 or any(name not in environment for name in _SLURM.values()):
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
    """Return a port that all tasks compute alike, and that other jobs and steps on the same host rarely share."""
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return PORTS[(31 * job + step) % len(PORTS)]
