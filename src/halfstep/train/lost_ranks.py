"""Name the ranks that are gone where a connection to one of them broke."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep import distributed
from halfstep.distributed import build_rank_failed_error
from halfstep.errors import HalfstepError, RankFailed, format_error_line
from halfstep.status_files import ENDED, RankStatusRecord
from halfstep.step.ranks import GONE, is_lost_rank_error
from halfstep.train.peer_watch import PeerWatch
from halfstep.train.status import RESTARTABLE, read_last_statuses

LOOK_FOR = 1.0
"""Seconds in which a rank whose connection broke is looked for."""


class LostRanks:
    """The ranks of an attempt that are gone, looked for once; this rank ends after that."""

    def __init__(self, folder: Path, token: str, watch: PeerWatch | None = None) -> None:
        self._folder, self._token, self._watch = folder, token, watch
        self._found: list[int] | None = None

    def leave(self, reason: str) -> None:
        """Note that this rank ends because another one is gone."""
        if self._watch is not None:
            self._watch.leave(reason)

    def found(self) -> list[int]:
        """Return the ranks that failed, or whose process on this host is gone, in order.

        A rank of another host that was killed is not known here: those next to it name it.
        """
        if self._found is None:
            self._found = find_lost_ranks(self._folder, self._token)
        return self._found


@contextmanager
def name_lost_ranks(lost: LostRanks | None = None) -> Iterator[None]:
    """Raise RankFailed for a connection to another rank that breaks inside, with the ranks that `lost` finds."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankFailed) and not error.usable:
            given = error.given.removeprefix(GONE)
        elif isinstance(error, HalfstepError) or not is_lost_rank_error(error):
            raise
        else:
            given = format_error_line(error)
        # A rank that ran out of memory says so, and all of them end with that.
        if lost is not None and not (isinstance(error, RankFailed) and error.out_of_memory):
            lost.leave(error.given if isinstance(error, RankFailed) else f"{GONE}{given}")
        # The error names the rank itself, or there is no folder yet in which ranks are looked for.
        if isinstance(error, RankFailed) and (error.rank is not None or lost is None):
            raise
        gone = [] if lost is None else lost.found()
        who = f"{distributed.format_rank_numbers(gone)} {'is' if len(gone) == 1 else 'are'} gone: " if gone else GONE
        if lost is not None:
            lost.leave(f"{who}{given}")
        raise build_rank_failed_error(f"{who}{given}", gone[0] if gone else None, usable=False) from error


def find_lost_ranks(folder: Path, token: str) -> list[int]:
    """Return the ranks of an attempt that failed, or whose process on this host is gone, in order."""
    until = time.monotonic() + LOOK_FOR
    while True:
        lost = [rank for rank, status in read_last_statuses(folder, token).items() if _is_lost(status)]
        if lost or time.monotonic() > until:
            return lost
        time.sleep(LOOK_FOR / 10)  # a process that ends closes its connections a moment before


def _is_lost(status: RankStatusRecord) -> bool:
    if status.state == ENDED:
        return status.code not in (0, *RESTARTABLE)  # those that lost another rank themselves are not meant
    return status.is_of_this_host and status.is_gone(0.0)
