"""The ranks that train one model: how they agree, and how one of them reports a failure.

Collectives carry numbers and need every rank; the store, which every process group has, carries text and needs no other
rank. A rank that cannot reach the next collective leaves its message there, and waiting ranks look for one now and
then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep import distributed
from halfstep.distributed import LOOK, build_rank_failed_error
from halfstep.errors import RankFailed, format_error_line
from halfstep.out_of_memory import is_step_too_large

_FAIL_TOGETHER = 1.5
"""Seconds within which ranks that fail for the same reason do so."""
GONE = "another rank is gone: "
"""The start of the message about a lost rank whose number is unknown."""
_GONE, _UNKNOWN, _MEMORY = "gone", "?", "memory"

_ALL_RANKS = nullcontext()
_made: Counter[str] = Counter()
"""Instances per group, for the prefix of their keys: keys must not mix, and all ranks create them in the same order."""


class Ranks:
    """The ranks of one process group, or all ranks if it is None; a single process is a group too."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        with distributed.use_process_group(group):
            self.size, self.rank = distributed.count_ranks(), distributed.rank()
        self._store = _create_prefix_store(group) if self.size > 1 else None

    def here(self) -> AbstractContextManager[None]:
        """Return a context in which the functions of `halfstep.distributed` refer to these ranks."""
        return _ALL_RANKS if self.group is None else distributed.use_process_group(self.group)

    # -- numbers ------------------------------------------------------------------------------------------------

    def agree(self, numbers: Tensor) -> Tensor:
        """Return the sum over all ranks in float64; raise RankFailed if one of them is gone."""
        if self.size == 1:
            return numbers
        total = numbers.to(torch.float64, copy=True)
        with self.explained():
            # Asynchronous: a blocking call could not be left when another rank fails, before the backend's own timeout.
            self._finish(dist.all_reduce(total, group=self.group, async_op=True), total)
        return total

    def wait(self, work: Any, *, until: float | None = None) -> None:
        """Wait on the host until a collective is done, while checking for failed ranks.

        Raises TimeoutError after `until`.
        """
        distributed.wait_for_collective(work, self.look, until)

    def _finish(self, work: Any, tensor: Tensor) -> None:
        # With a GPU the host waits where it reads the numbers.
        distributed.finish_collective(work, tensor, self.look)

    def send_from_rank_zero(self, tensor: Tensor) -> None:
        """Overwrite a tensor with rank 0's, in place."""
        with self.explained():
            self._finish(dist.broadcast(tensor, group=self.group, group_src=0, async_op=True), tensor)

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor of any size over all ranks, in place."""
        with self.explained():
            self._finish(dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the largest number over all ranks, of each element."""
        found = tensor.clone()
        with self.explained():
            self._finish(dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True), found)
        return found

    def collectives(self) -> int:
        """Return the number of collectives of the group started on this rank."""
        group: Any = dist.group.WORLD if self.group is None else self.group
        return int(group._get_sequence_number_for_group())

    # -- words --------------------------------------------------------------------------------------------------

    def _set(self, key: str, words: str) -> None:
        if self._store is not None:
            self._store.set(key, words)

    def publish_failure(self, window: int, error: BaseException) -> None:
        """Publish why this rank failed in this window."""
        if is_step_too_large(error):
            self._set(f"{window}/{_MEMORY}", "")
        self._set(f"{window}/{self.rank}", format_error_line(error))

    def request_rebuild(self, window: int) -> None:
        """Publish that this failure left something incomplete, which all ranks must rebuild after the window."""
        self._set(f"{window}/rebuild", "")

    def rebuild_requested(self, window: int) -> bool:
        """Return whether any rank requested a rebuild after this window."""
        return self._store is not None and bool(self._store.check([f"{window}/rebuild"]))

    def all_failed(self, window: int, place: str) -> bool:
        """Return whether every rank failed in this window at the same `place`: then no rank waits for another.

        That is the case if all of them made the same wrong call, or share a mistake in the loss function.
        """
        store: Any = self._store
        store.set(f"{window}/place/{self.rank}", place)
        keys = [f"{window}/place/{rank}" for rank in range(self.size)]
        until = time.monotonic() + _FAIL_TOGETHER
        while not store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return len({store.get(key) for key in keys}) == 1

    def leave(self, error: BaseException) -> None:
        """Publish that this rank takes part in nothing any more, so that the others stop waiting for it."""
        if is_step_too_large(error):
            self._set(f"{_GONE}/{_MEMORY}", "")
        self._set(_GONE, f"{self.rank} {format_error_line(error)}")

    def look(self) -> None:
        """Raise RankFailed if a rank has left, or if its process is gone."""
        if self._store is None:
            return
        if not self._store.check([_GONE]):
            distributed.check_peers()
            return
        failed, _, words = self._store.get(_GONE).decode().partition(" ")
        if failed == _UNKNOWN:
            raise build_rank_failed_error(words, None, usable=False)
        given, memory = f"rank {failed} failed in this window: {words}", self._store.check([f"{_GONE}/{_MEMORY}"])
        raise build_rank_failed_error(given, int(failed), usable=False, out_of_memory=memory)

    def failed(self, window: int) -> RankFailed:
        """Return the error that names the ranks that failed in a window."""
        failures = self._failures(window)
        if not failures:
            return build_rank_failed_error("a rank failed in this window, for an unknown reason", None, usable=True)
        names = "; ".join(f"rank {rank} failed in this window: {words}" for rank, words in failures)
        memory = self._store is not None and self._store.check([f"{window}/{_MEMORY}"])
        return build_rank_failed_error(names, failures[0][0], usable=True, out_of_memory=memory)

    def _failures(self, window: int) -> list[tuple[int, str]]:
        """Return the ranks that left a message about a window, with their messages."""
        store = self._store
        if store is None:
            return []
        keys = {rank: f"{window}/{rank}" for rank in range(self.size)}
        return [(rank, store.get(key).decode()) for rank, key in keys.items() if store.check([key])]

    def publish(self, what: str, words: str) -> None:
        """Publish this rank's current text under a name."""
        self._set(f"{what}/{self.rank}", words)

    def published_texts(self, what: str) -> list[str]:
        """Return the current texts of all ranks that published one."""
        store: Any = self._store
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        return [store.get(key).decode() for key in keys if store.check([key])]

    def offer(self, window: int, what: str, value: float | None) -> None:
        """Publish this rank's value for `first_of`; None if it has none, so that no rank waits for it."""
        self._set(f"{window}/{what}/{self.rank}", "" if value is None else repr(value))

    def first_of(self, window: int, what: str) -> float | None:
        """Return the value of the lowest rank that has one. Not a collective: a rank may fail on its way here."""
        for rank in range(self.size):
            if (text := self._error_from(rank, window, what)) != "":
                return float(text)
        return None

    def _error_from(self, rank: int, window: int, what: str) -> str:
        store: Any = self._store
        key, failed = f"{window}/{what}/{rank}", f"{window}/{rank}"
        while not store.check([key]):
            if store.check([failed]):
                return ""
            self.look()
            with suppress(RuntimeError):  # not there yet
                store.wait([key], LOOK)
        return str(store.get(key).decode())

    # -- connections --------------------------------------------------------------------------------------------

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise RankFailed for a connection that breaks inside: another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank_error(error):
                raise
            raise self._gone() from error

    def _gone(self) -> RankFailed:
        """Return the error for a broken connection, and publish it for ranks that have none to the lost one."""
        given = f"{GONE}its connection closed while this one waited for it"
        try:
            self.look()
            self._set(_GONE, f"{_UNKNOWN} {GONE}a connection to it closed")
        except RankFailed as known:
            return known
        except RuntimeError:  # the store went with it
            pass
        return build_rank_failed_error(given, None, usable=False)


def is_lost_rank_error(error: BaseException) -> bool:
    """Return whether torch raised this error because another rank went away."""
    # gloo raises a plain RuntimeError, which only its message tells from others.
    network = isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError))
    return network or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _create_prefix_store(group: Any) -> Any:
    whole = dist.distributed_c10d._get_default_group() if group is None else group
    store = dist.distributed_c10d._get_process_group_store(whole)
    name = str(whole.group_name)
    _made[name] += 1
    # Keys of two Steppers in one group, or of an earlier Stepper, must not be taken for this one's.
    return dist.distributed_c10d.PrefixStore(f"halfstep/{name}/{_made[name]}", store)


# -- failures ---------------------------------------------------------------------------------------------------------
# Report a failure to the other ranks, so that errors are part of the one decision.
# Where the ranks can still meet, a failed rank votes in the window's agreement: every rank then drops the window, and
# the process group stays usable. Where they cannot, it leaves a message in the store, and the others stop waiting.


class RankFailureHandler:
    """The end of a window on every rank after one of them failed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._gone: BaseException | None = None

    def check(self) -> None:
        """Raise RankFailed if the process group became unusable in an earlier window."""
        if self._gone is not None:
            given = f"a window after one in which ranks diverged: {format_error_line(self._gone)}"
            raise build_rank_failed_error(given, None, usable=False)

    def fail(
        self,
        window: int,
        error: BaseException,
        complete: Callable[[], bool],
        vote: Callable[[], object],
        begun: Callable[[], str],
    ) -> None:
        """Inform the other ranks of an error here.

        `complete` joins the collectives in which they wait, `vote` votes to abort in the agreement, and `begun` returns
        the collectives that this rank has started.
        """
        # Read first: `complete` starts further collectives.
        place = begun()
        if not _publish_error(self.ranks, window, error):
            self._part(error)
        # No rank waits either if all of them failed at the same place, as with a mistake in the loss function.
        elif self._meets(complete, vote) or self.ranks.all_failed(window, place):
            return
        else:
            self.ranks.leave(error)
            self._part(error)
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    "the other ranks waited for this one in a collective: the process group is no longer usable"
                )

    def _meets(self, complete: Callable[[], bool], vote: Callable[[], object]) -> bool:
        try:
            if not complete():
                return False
            vote()
        except Exception:
            return False
        return True

    def _part(self, error: BaseException) -> None:
        self._gone = error
        if not isinstance(error, RankFailed):
            with self.ranks.explained():
                if is_lost_rank_error(error):
                    raise error


def _publish_error(ranks: Ranks, window: int, error: BaseException) -> bool:
    """Publish an error for the other ranks; return False if it came from them, or if they cannot be reached."""
    if isinstance(error, RankFailed):
        return error.usable
    if is_lost_rank_error(error):
        return False
    ranks.publish_failure(window, error)
    return True
