"""End a rank that would wait forever for a lost rank, in any collective."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from halfstep import distributed
from halfstep.deadline import run_within_deadline
from halfstep.errors import HUNG
from halfstep.peers import Peers
from halfstep.train.watchdog import OnHang, end_hung_process

TICK = 0.5
GRACE = 4.0
"""Seconds after a rank is gone in which this one notices by itself, from a connection that breaks."""
LEAVE = 2.0
"""Seconds in which a rank ends that has noticed that another one is gone."""
TOLD = 1.0
"""Seconds of these for the status and the last line; a disk or a terminal may not answer."""


class PeerWatch:
    """A context in which another rank that is gone ends this process with 76, unless it ends by itself before.

    Where the process is the caller's own, such as a script's that calls `halfstep.fit`, nothing is ended after the
    context: `ends_process` is false there.
    """

    def __init__(self, peers: Peers, *, ends_process: bool) -> None:
        self.peers, self._ends_process = peers, ends_process
        self.on_lost: OnHang = end_hung_process
        """Records and reports why this rank ends."""
        self._is_needed, self._over = True, threading.Event()
        self._leaving: threading.Timer | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._watch, name="halfstep peers", daemon=True)

    def __enter__(self) -> PeerWatch:
        distributed.set_watched_peers(self.peers)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        distributed.set_watched_peers(None)
        if self._leaving is not None and not self._ends_process:
            self._leaving.cancel()

    def release(self) -> None:
        """Note that this rank waits for no other one from here on; they may end before it."""
        self._is_needed = False

    def leave(self, reason: str) -> None:
        """Note that this rank ends because another one is gone; it has `LEAVE` seconds from the first call."""
        self._reason = reason
        if self._leaving is None:
            self._leaving = threading.Timer(LEAVE, lambda: self._end(self._reason))
            self._leaving.daemon = True
            self._leaving.start()

    # -- in separate threads --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        waited = 0.0
        while not self._over.wait(TICK):
            gone = self.peers.gone() if self._is_needed else {}
            waited = waited + TICK if gone else 0.0
            if waited >= GRACE:
                ranks = list(gone)
                is_or_are = "is" if len(ranks) == 1 else "are"
                self._end(f"{distributed.format_rank_numbers(ranks)} {is_or_are} gone: {gone[ranks[0]]}")

    def _end(self, reason: str) -> None:
        run_within_deadline(TOLD, lambda: self.on_lost(reason))
        os._exit(HUNG)
