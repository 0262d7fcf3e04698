"""Start a run: join the process group, select the device, and protect the caller's random state."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from halfstep import distributed
from halfstep.errors import NotBegun, WrongUse, format_error_line
from halfstep.launch_variables import convert_slurm_variables, read_count_variable, read_launched_rank
from halfstep.peers import Peers, compute_host_id, parse_processes, read_own_process
from halfstep.precision.hardware import describe_device, list_device_types
from halfstep.random_state import preserve_random_state
from halfstep.recipe.schema import AUTO
from halfstep.train.peer_watch import PeerWatch
from halfstep.train.signals import build_not_begun_error, interrupt_on_signal

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""The variable that makes torchrun give every attempt a separate store."""


_groups = itertools.count()
"""Numbers the process groups of this process; all ranks make as many."""


@contextmanager
def join_process_group(timeout: float, *, ends_process: bool = False) -> Iterator[PeerWatch | None]:
    """Join the ranks that torchrun or srun started, and leave the group at the end; yield None if there are none.

    A collective fails after `timeout` seconds, until another timeout is set. Raises WrongUse for a launch whose
    restarts would hang, NotBegun where this rank is asked to stop before all have met, and RankFailed where one does
    not come.
    """
    os.environ.update(convert_slurm_variables(os.environ))
    launched = read_launched_rank()
    # A caller that has its own process group keeps it.
    if launched.world_size == 1 or dist.is_initialized():
        yield None
        return
    # Collectives run on the current device of each rank, so it is set first.
    _take_own_device()
    longest = timedelta(seconds=timeout)
    # Counted: a process that trains twice would meet the keys of its first group, as a restarted one would.
    prefix = f"{build_store_prefix(os.environ)}/{next(_groups)}"
    rank, size = launched.rank, launched.world_size
    until = time.monotonic() + timeout
    with interrupt_on_signal():
        mine = dist.distributed_c10d.PrefixStore(prefix, _connect_store(os.environ, rank, until))
        mine.set_timeout(longest)
        peers = _wait_for_ranks(mine, rank, size, until)
    with PeerWatch(peers, ends_process=ends_process) as watch:
        dist.init_process_group(choose_backends(), store=mine, rank=rank, world_size=size, timeout=longest)
        try:
            yield watch
        finally:
            dist.destroy_process_group()


PAUSE = 0.1
"""Seconds between two looks for other ranks; a signal is obeyed in between."""
SOON = timedelta(seconds=5.0)
"""Time for a connection to a server that has just answered: torch cannot be interrupted while it tries."""


def _connect_store(environment: Mapping[str, str], rank: int, until: float) -> Any:
    """Return the store of all ranks, which torchrun's agent or rank 0 serves."""
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    longest = timedelta(seconds=max(1.0, until - time.monotonic()))
    open_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    if rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return open_store(host, port, is_master=True, timeout=longest, wait_for_workers=False, multi_tenant=True)
    while True:
        # Not by torch, which cannot be interrupted while it waits for the server.
        why = _explain_unreachable(host, port)
        if not why:
            try:
                store = open_store(host, port, is_master=False, timeout=SOON, wait_for_workers=False)
                store.set_timeout(longest)
                return store
            except dist.DistError as error:  # the server ended after the look at its port
                why = format_error_line(error)
        if time.monotonic() > until:
            given = f"{host}:{port}, the address of rank 0 or torchrun, cannot be reached: {why}"
            raise distributed.build_rank_failed_error(given, None, usable=False)
        time.sleep(PAUSE)


def _explain_unreachable(host: str, port: int) -> str:
    """Return why nobody answers at an address; empty where somebody does."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError as error:
        return str(error)
    return ""


def _wait_for_ranks(store: Any, rank: int, size: int, until: float) -> Peers:
    """Wait until all ranks are here, and return the others."""
    here = f"here/{compute_host_id()}"
    store.append(here, str(read_own_process(rank)))
    store.set(f"here/{rank}", "")
    everyone = [f"here/{other}" for other in range(size)]
    try:
        while True:
            # Before the questions: a rank that is there counts, even if this process had to wait for its turn.
            is_late = time.monotonic() > until
            if store.check(["all"]):
                break
            if rank == 0 and store.check(everyone):
                store.set("all", "")
                break
            if store.check(["left"]):
                raise build_not_begun_error(store.get("left").decode())
            if is_late:
                missing = [other for other, key in enumerate(everyone) if not store.check([key])]
                given = (
                    f"{distributed.format_rank_numbers(missing)} did not come" if missing else "rank 0 did not answer"
                )
                raise distributed.build_rank_failed_error(f"{given} in time (world.start_timeout)", None, usable=False)
            time.sleep(PAUSE)
    except NotBegun as stopped:
        # This rank alone may have the signal; the others would wait for it.
        store.set("left", stopped.signal)
        raise
    processes = parse_processes(store.get(here).decode())
    own = {process.rank for process in processes}
    return Peers((one for one in processes if one.rank != rank), (other for other in range(size) if other not in own))


def build_store_prefix(environment: Mapping[str, str]) -> str:
    """Return the prefix of this attempt's keys in the store; raise WrongUse if a restart would read stale keys.

    torchrun's store outlives an attempt, and torch 2.13 does not separate attempts: gloo then connects to the addresses
    of dead ranks, and waits forever. On one node the restart count is the same for all ranks and separates them. On
    several nodes it is not: an agent counts only the restarts that it took part in.
    """
    if environment.get("GROUP_WORLD_SIZE", "1") == "1":
        return f"attempt-{read_count_variable('TORCHELASTIC_RESTART_COUNT', environment)}"
    restarts = any(
        read_count_variable(name, environment) for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    )
    if restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise WrongUse(
            "torchrun with restarts on several nodes, and one store for all attempts: a restarted run would wait for "
            "the ranks of the previous attempt",
            allowed="a store for each attempt, or --max-restarts 0",
            do=f"export {SHARED_STORE}=1 on every node, and start torchrun with --rdzv-backend c10d",
        )
    # Without a shared store rank 0 opens a new one for every attempt; with no restarts there is one attempt.
    return "attempt"


def preserve_rng() -> AbstractContextManager[None]:
    """Return a context that restores all random generators at its end: a run seeds them for itself."""
    # Also those of an accelerator that nothing has used so far: a run seeds them, too.
    return preserve_random_state(torch.accelerator.current_accelerator(check_available=True))


def resolve_device(name: str) -> torch.device:
    """Return the device of this rank; an accelerator without an index means each rank's own."""
    _take_own_device()
    found = torch.device(describe_device(None if name == AUTO else name).place)
    if found.type not in list_device_types():
        raise WrongUse(
            f"train.device={name}, which is not available on this machine",
            allowed=", ".join(list_device_types()),
            do=f"leave it out, or write train.device={list_device_types()[0]}",
        )
    return found


def choose_backends() -> str | None:
    """Return the backends: gloo on the host for texts and decisions, the accelerator's own for gradients."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return f"{torch.empty(0).device}:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def _take_own_device() -> None:
    if torch.accelerator.is_available():
        # Modulo: several ranks may share one device.
        torch.accelerator.set_device_index(read_launched_rank().local_rank % torch.accelerator.device_count())
