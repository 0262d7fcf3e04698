"""Read the variables by which torchrun, srun and others start a rank, in one place. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.errors import WrongLaunch

MOST_RANKS = 1_000_000
MOST_DIGITS = 18
"""Digits of a number in a variable; a longer one is no count."""
LARGEST_PORT = 65_535


@dataclass(frozen=True)
class LaunchedRank:
    """This process among those that were started with it; one process is a group of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The rank among those of this host."""
    local_world_size: int | None = None
    """The ranks of this host; None if the launcher does not say."""


def read_launched_rank(variables: Mapping[str, str] = os.environ) -> LaunchedRank:
    """Return this rank as its launcher named it; raise WrongLaunch for variables that name no rank of a group."""
    size = read_number_variable("WORLD_SIZE", variables, 1, 1, MOST_RANKS)
    local_rank = read_number_variable("LOCAL_RANK", variables, 0, 0, MOST_RANKS)
    here = read_number_variable("LOCAL_WORLD_SIZE", variables, 0, 0, MOST_RANKS) or None
    if "WORLD_SIZE" not in variables:
        # One process; another program may set RANK for itself.
        return LaunchedRank(local_rank=local_rank, local_world_size=here)
    if size > 1:
        _check_rendezvous_variables(variables)
    rank = read_number_variable("RANK", variables, 0, 0, size - 1)
    return LaunchedRank(rank, size, local_rank, here)


def _check_rendezvous_variables(variables: Mapping[str, str]) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        raise WrongLaunch(
            f"WORLD_SIZE={variables['WORLD_SIZE']} without {', '.join(missing)}",
            allowed="all variables of a rank: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
            do="start the ranks with torchrun or srun, or unset WORLD_SIZE for one process",
        )
    read_number_variable("MASTER_PORT", variables, 0, 1, LARGEST_PORT)


def read_number_variable(name: str, variables: Mapping[str, str], default: int, least: int, most: int) -> int:
    """Return the whole number in a variable, `default` where it is not set; raise WrongLaunch for anything else."""
    text = variables.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    if not is_number or not least <= int(text) <= most:
        raise WrongLaunch(
            f"the variable {name} is {text[:40]!r}",
            allowed=f"an integer from {least} to {most}",
            do=f"start the ranks with torchrun or srun, which set it, or unset {name} and WORLD_SIZE for one process",
        )
    return int(text)


def read_count_variable(name: str, variables: Mapping[str, str]) -> int:
    """Return the count in a variable that a launcher need not set; 0 if it is none, such as `none`."""
    text = variables.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0


PORTS = range(10_000, 30_000)
"""Ports for ranks under srun: below those that Linux gives to outgoing connections, from 32768 on."""
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_FIRST_HOST = re.compile(r"(?P<name>[^\[,]+)(\[(?P<number>\d+)[^\]]*\](?P<rest>[^\[,]*))?")


def convert_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a rank that srun started; none where torchrun did, or for a single task."""
    # A batch script has these variables too, and is no rank: only srun sets the step.
    if any(name in environment for name in _SLURM) or "SLURM_STEP_ID" not in environment:
        return {}
    if read_number_variable("SLURM_NTASKS", environment, 1, 1, MOST_RANKS) < 2 or any(
        name not in environment for name in _SLURM.values()
    ):
        return {}
    # The host of task 0: the first of the step, as in `node[03-07,12],other`.
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    found = _FIRST_HOST.match(listed)
    host = "".join(part or "" for part in found.group("name", "number", "rest")) if found else "localhost"
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(_choose_port(environment))}
    ranks = {ours: environment[theirs] for ours, theirs in _SLURM.items()}
    return {**ranks, **{name: environment.get(name, value) for name, value in place.items()}}


def _choose_port(environment: Mapping[str, str]) -> int:
    """Return a port that is the same on all tasks, and rarely shared by other jobs and steps on the same host."""
    # Slurm numbers the steps of a batch script itself, and of containers, from the end of 32 bits.
    job, step = (read_number_variable(name, environment, 0, 0, 2**32) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return PORTS[(31 * job + step) % len(PORTS)]


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_cores_per_rank() -> int:
    """Return the cores of this host for each rank on it."""
    return max(1, count_cores() // (read_launched_rank().local_world_size or 1))
