"""Runs that wait for ever: for a disk, for a rank that is gone, for ranks that never came."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from halfstep import distributed, peers, stop_signals
from halfstep.data import worker_processes
from halfstep.train import peer_watch, process_group, run, signals, status, watchdog
from halfstep.train.loop import Loop


@dataclass(frozen=True)
class Waiting:
    WHAT: str
    ROWS: tuple[str, ...]
    apply: Callable[[], None]


def _for_ever(seconds: float, work: Callable[[], object]) -> bool:
    work()
    return True


def _judge_writes() -> None:
    """The thread that judges writes the heartbeat in every tick."""

    def marked(self: Any) -> bool:
        self._status.running(*self._position())
        return False

    watchdog.Watchdog._is_marked = property(marked, lambda self, value: None)  # type: ignore[assignment]


def _report_without_deadline() -> None:
    watchdog.run_within_deadline = _for_ever


def _end_without_deadline() -> None:
    status.run_within_deadline = _for_ever


def _peers_unwatched() -> None:
    peers.Peers.gone = lambda self: {}  # type: ignore[method-assign]


def _stopped_is_gone() -> None:
    alive = peers.is_process_alive  # type: ignore[attr-defined]
    peers.is_process_alive = lambda pid, since: (  # type: ignore[attr-defined]
        alive(pid, since) and psutil.Process(pid).status() != psutil.STATUS_STOPPED
    )


def _waits_for_the_lost() -> None:
    """The end of a run waits half a minute for the part that a rank would have had in the last save."""
    run.LOST = run.LEAVING
    peer_watch.PeerWatch.leave = lambda self, reason: None  # type: ignore[method-assign]
    peer_watch.PeerWatch._watch = lambda self: None  # type: ignore[method-assign]
    distributed.check_peers = lambda: None
    distributed.wait_for_collective.__defaults__ = (lambda: None, None)


def _rendezvous_uninterrupted() -> None:
    process_group.interrupt_on_signal = contextlib.nullcontext  # type: ignore[assignment]


def _only_sigterm() -> None:
    for module in (stop_signals, signals, worker_processes):
        module.list_stop_signals = lambda: [signal.SIGTERM]  # type: ignore[attr-defined]


def _given_up_unnoticed() -> None:
    Loop._tell_given_up = lambda self, name, reason: None  # type: ignore[method-assign]


MUTANTS = {
    "M56": Waiting("the thread that detects a hang writes to the disk", ("F44",), _judge_writes),
    "M57": Waiting("the report of a hang waits for the disk", ("F44",), _report_without_deadline),
    "M58": Waiting("the end of a run waits for its status to be written", ("F44",), _end_without_deadline),
    "M59": Waiting("the processes of other ranks are not checked", ("F45",), _peers_unwatched),
    "M60": Waiting("a stopped rank counts as lost", ("F45",), _stopped_is_gone),
    "M61": Waiting("a rank that lost another one waits for its part of the save", ("F46",), _waits_for_the_lost),
    "M62": Waiting("a signal does not end the wait for other ranks", ("F47",), _rendezvous_uninterrupted),
    "M63": Waiting("only SIGTERM is handled", ("F48",), _only_sigterm),
    "M64": Waiting("a skipped sample does not count as progress", ("F49",), _given_up_unnoticed),
}
