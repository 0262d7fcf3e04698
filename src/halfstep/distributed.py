"""Answer how many ranks train together, and exchange small values between them; one process is a group of one."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.errors import HalfstepError, RankFailed

if TYPE_CHECKING:
    from halfstep.peers import Peers

T = TypeVar("T")
LARGEST_AGREEMENT = 16
"""Numbers in one agreement: 16 doubles are 128 bytes, for a model of any size."""
MOST_NAMED = 8
"""Ranks or hosts that a message names."""

_group: ContextVar[Any] = ContextVar("process group", default=None)


@contextmanager
def use_process_group(group: Any) -> Iterator[None]:
    """Make the functions of this module use `group` inside the context; None means all ranks."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


LOOK = timedelta(seconds=0.5)
"""How long a rank waits in a collective before it checks whether another one has failed."""
GLANCE = timedelta(milliseconds=1)
"""The shortest wait in a collective: torch takes 0 for no limit."""
_peers: Peers | None = None
_waiting: set[int] = set()
"""The threads that wait for another rank."""


def set_watched_peers(peers: Peers | None) -> None:
    """Let every wait of this module notice where one of these ranks is gone."""
    global _peers
    _peers = peers


def is_waiting() -> bool:
    """Return whether the main thread waits for another rank."""
    return threading.main_thread().ident in _waiting


@contextmanager
def mark_thread_waiting() -> Iterator[None]:
    """Note that this thread waits for another rank inside."""
    own, is_outermost = threading.get_ident(), threading.get_ident() not in _waiting
    _waiting.add(own)
    try:
        yield
    finally:
        if is_outermost:
            _waiting.discard(own)


def check_peers() -> None:
    """Raise RankFailed if a rank is known to be gone."""
    if _peers is not None and (gone := _peers.gone()):
        ranks = list(gone)
        is_or_are = "is" if len(ranks) == 1 else "are"
        raise build_rank_failed_error(
            f"{format_rank_numbers(ranks)} {is_or_are} gone: {gone[ranks[0]]}", ranks[0], usable=False
        )


def wait_for_collective(work: Any, look: Callable[[], None] = check_peers, until: float | None = None) -> None:
    """Wait on the host until a collective is done, and call `look` twice a second; raise TimeoutError after `until`."""
    # The time is taken before each look: a collective that the look finds done is done, however long the thread waited
    # for its turn meanwhile.
    is_late = until is not None and time.monotonic() >= until
    if _is_collective_done(work, GLANCE if is_late else LOOK):
        return
    with mark_thread_waiting():
        while not is_late:
            look()
            is_late = until is not None and time.monotonic() >= until
            if _is_collective_done(work, LOOK):
                return
    raise TimeoutError("the other ranks did not come")


def _is_collective_done(work: Any, limit: timedelta) -> bool:
    try:
        work.wait(limit)
    except RuntimeError:
        # A timeout of `wait` and a failed collective raise the same RuntimeError.
        if not work.is_completed():
            return False
        # Completed is not failed: it may have succeeded after the timeout, while this thread waited for the
        # interpreter. A second `wait` returns at once, or raises the collective's own error.
        work.wait()
    return True


def finish_collective(
    work: Any, tensor: Tensor, look: Callable[[], None] = check_peers, until: float | None = None
) -> None:
    """Finish a collective of this tensor: as `wait_for_collective` on a CPU; on a device the host does not wait."""
    if tensor.is_cpu:
        wait_for_collective(work, look, until)
    else:
        # Without a timeout, after which NCCL aborts its communicators: a rank that is late would end the run.
        work.wait()


def build_rank_failed_error(given: str, rank: int | None, *, usable: bool, out_of_memory: bool = False) -> RankFailed:
    """Return the error for a rank that did not fail itself; `usable` tells whether the process group still is."""
    if usable:
        allowed = "no rank has applied anything, and the process group is usable"
        error = RankFailed(given, allowed=allowed, do="see that rank's own error; continue training if it does")
    else:
        allowed = "this rank has applied nothing, but the process group is no longer usable"
        error = RankFailed(given, allowed=allowed, do="end this process and start the job again from its checkpoint")
    error.rank, error.usable, error.out_of_memory = rank, usable, out_of_memory
    return error


def count_ranks() -> int:
    """Return the number of ranks."""
    return dist.get_world_size(_group.get()) if _is_distributed() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank(_group.get()) if _is_distributed() else 0


def format_rank_numbers(ranks: list[int]) -> str:
    """Return the numbers of some ranks in words, the first few of many."""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def sum_counts_over_ranks(numbers: Tensor) -> Tensor:
    """Return the sum over all ranks in float64, which is exact for counts; raise ValueError for over 16 numbers.

    A non-finite number on one rank is non-finite on all of them.
    """
    if not _is_distributed():
        return numbers
    if numbers.numel() > LARGEST_AGREEMENT:
        raise ValueError(f"{numbers.numel()} numbers to agree on; at most {LARGEST_AGREEMENT}")
    # A copy: all_reduce works in place, and the caller may still need its own numbers.
    total = numbers.to(torch.float64, copy=True)
    finish_collective(dist.all_reduce(total, group=_group.get(), async_op=True), total)
    return total


def sum_tensor_over_ranks(numbers: Tensor) -> Tensor:
    """Return the sum over all ranks, of any size and in the tensor's own dtype: once per epoch, not per step."""
    if not _is_distributed():
        return numbers
    total = numbers.to(_choose_collective_device(_group.get()), copy=True)
    finish_collective(dist.all_reduce(total, group=_group.get(), async_op=True), total)
    return total


def compare_across_ranks(numbers: Tensor, group: Any = None) -> Tensor:
    """Return, for each of these integers, whether all ranks of a group have the same."""
    # The complement of the largest complement is the smallest: one collective finds both ends.
    ends = torch.stack([numbers, ~numbers]).to(_choose_collective_device(group))
    finish_collective(dist.all_reduce(ends, dist.ReduceOp.MAX, group=group, async_op=True), ends)
    return ends[0] == ~ends[1]


def gather_rank_numbers(numbers: Tensor, group: Any = None) -> tuple[list[int], list[list[Any]]]:
    """Return the ranks of a group, and the numbers of each; every rank of the group has as many."""
    own = numbers.to(_choose_collective_device(group))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    finish_collective(dist.all_gather(found, own, group=group, async_op=True), own)
    whole = dist.group.WORLD if group is None else group
    return dist.get_process_group_ranks(whole), [one.tolist() for one in found]


def find_replica_group(tensor: Tensor) -> Any | None:
    """Return the group of the ranks that hold copies of this rank's shard, as in HSDP; None if there are none."""
    sharded: Any = tensor
    mesh = sharded.device_mesh
    copied = [place for place, placement in enumerate(sharded.placements) if placement.is_replicate()]
    return mesh.get_group(copied[0]) if copied and mesh.shape[copied[0]] > 1 else None


def is_dtensor_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, which holds only a part of its values on this rank."""
    # Not imported here: that takes most of a second, and without the import no DTensor can exist.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any of these tensors, such as the parameters of a model, is sharded."""
    return any(map(is_dtensor_shard, tensors))


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return all values of a tensor; those of a DTensor are gathered, and every rank of its mesh must call this."""
    if not is_dtensor_shard(tensor):
        return tensor
    sharded: Any = tensor
    with mark_thread_waiting():
        gathered: Tensor = sharded.full_tensor()
    return gathered


def unwrap_local_tensor(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that are on this rank."""
    sharded: Any = tensor
    own: Tensor = sharded.to_local() if is_dtensor_shard(tensor) else tensor
    return own


def count_holding_ranks(tensor: Tensor) -> float:
    """Return how many ranks hold each element of a tensor, over its own mesh and any outer replication."""
    return count_ranks() / math.prod(list_shard_counts(tensor))


def list_shard_counts(tensor: Tensor) -> list[int]:
    """Return into how many parts each sharding mesh dimension cuts a tensor; empty if it is not sharded."""
    if not is_dtensor_shard(tensor):
        return []
    placed: Any = tensor
    cut = zip(placed.placements, placed.device_mesh.shape, strict=True)
    # Not `is_dtensor_shard()`, which is False for the strided shards of FSDP2 over tensor parallel.
    return [parts for placement, parts in cut if not (placement.is_replicate() or placement.is_partial())]


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank. It is sent as bytes, not as a pickle. Not for the hot path."""
    if not _is_distributed():
        return text
    group = _group.get()
    encoded = text.encode() if rank() == 0 else b""
    # The other ranks must allocate before they receive, so the length is sent first.
    length = torch.tensor([len(encoded)], device=_choose_collective_device(group))
    finish_collective(dist.broadcast(length, group=group, group_src=0, async_op=True), length)
    content = torch.zeros(int(length.item()), dtype=torch.uint8)
    if rank() == 0:
        content = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    content = content.to(length.device)
    finish_collective(dist.broadcast(content, group=group, group_src=0, async_op=True), content)
    return bytes(content.tolist()).decode()


def gather_texts(text: str) -> list[str]:
    """Return the texts of all ranks, in rank order. Costs two collectives: not for the hot path."""
    if not _is_distributed():
        return [text]
    group = _group.get()
    mine, ranks = dist.get_rank(group), dist.get_world_size(group)
    # torch.frombuffer refuses an empty buffer; the blank is stripped again below.
    encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(_choose_collective_device(group))
    lengths = torch.zeros(ranks, dtype=torch.int64, device=encoded.device)
    lengths[mine] = len(encoded)
    # Summing rows that are zero on all other ranks is an all-gather, once the common length is known.
    finish_collective(dist.all_reduce(lengths, group=group, async_op=True), lengths)
    padded = torch.zeros(ranks, int(lengths.max()), dtype=torch.uint8, device=encoded.device)
    padded[mine, : len(encoded)] = encoded
    finish_collective(dist.all_reduce(padded, group=group, async_op=True), padded)
    return [bytes(row[:length].tolist()).decode().strip() for row, length in zip(padded, lengths.tolist(), strict=True)]


def run_on_rank_zero(work: Callable[[], Any]) -> Any:
    """Return rank 0's result, as plain JSON data, on every rank; a HalfstepError there is raised on every rank."""
    result, failure = _try_work(work) if rank() == 0 else (None, None)
    [decided] = _exchange_results(result, failure, lambda text: [broadcast_text(text)])
    return decided


def run_and_gather_results(work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank and return all results, as plain JSON data, in rank order.

    A HalfstepError of one rank is raised on all of them.
    """
    result, failure = _try_work(work)
    return _exchange_results(result, failure, gather_texts)


def run_with_shared_errors(work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's own result; a HalfstepError of one rank is raised on all."""
    result, failure = _try_work(work)
    _exchange_results(None, failure, gather_texts)
    return result  # type: ignore[return-value]  # None only where a failure was raised above


def _try_work(work: Callable[[], T]) -> tuple[T | None, HalfstepError | None]:
    try:
        return work(), None
    except HalfstepError as error:
        return None, error


def _exchange_results(result: Any, failure: HalfstepError | None, share: Callable[[str], list[str]]) -> list[Any]:
    # A failure is sent like a result: a rank that raised before the collective would leave the others waiting in it.
    own: dict[str, Any] = {"result": result}
    if failure is not None:
        own = {"failed": [failure.given, failure.allowed, failure.do], "code": failure.exit_code, "id": failure.id}
    messages = [json.loads(text) for text in share(json.dumps(own))]
    if failure is not None:
        raise failure
    for number, message in enumerate(messages):
        if "failed" in message:
            given, allowed, do = message["failed"]
            theirs = HalfstepError(f"rank {number}: {given}", allowed=allowed, do=do, id=message["id"])
            theirs.exit_code = message["code"]
            raise theirs
    return [message["result"] for message in messages]


def broadcast_tensors(tensors: Iterable[Tensor]) -> None:
    """Overwrite every rank's tensors with rank 0's, in place."""
    if _is_distributed():
        for tensor in tensors:
            finish_collective(
                dist.broadcast(tensor.detach(), group=_group.get(), group_src=0, async_op=True), tensor.detach()
            )


ANSWER_WITHIN = 1800.0
"""Seconds that a rank waits for the others in one exchange, as a collective does: a slow disk may take minutes."""
QUESTIONS = 2500.0
"""The number of questions that all ranks together may put to the store in a second; it answers ten times as many."""


class RankGroup:
    """All ranks, for decisions in background threads: the texts go through the store to rank 0, and back.

    Not through a separate process group: with gloo, every rank is connected to every other and gets the texts of all:
    an agreement among 128 ranks took 9.9 s this way, and takes 0.12 s now (`benchmarks/save_agreement.py`). Every rank
    has to create its RankGroup at the same point of the program. It uses a separate client of the store, so the
    training never waits for it.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank(), count_ranks()
        self._prefix = f"halfstep/ranks/{next(_counted)}"
        self._client: Any = None
        self._exchange, self._ends, self._broken = 0, math.inf, ""

    def decide(self, text: str, conclude: Callable[[list[str]], str]) -> str:
        """Return on every rank what `conclude` makes of the texts of all ranks, in rank order; it runs on rank 0 alone.

        Raises TimeoutError if a rank does not answer, and from then on: the ranks may be at different exchanges.
        """
        if self.size == 1:
            return conclude([text])
        if self._broken:
            raise TimeoutError(self._broken)
        self._client = self._client or _find_default_store().clone()
        self._exchange += 1
        return self._collect_texts(text, conclude) if self.rank == 0 else self._await_answer(text)

    def leave(self, seconds: float) -> None:
        """Wait for other ranks only so many seconds more, in this exchange and in later ones: one may be gone."""
        self._ends = min(self._ends, time.monotonic() + seconds)

    def _collect_texts(self, text: str, conclude: Callable[[list[str]], str]) -> str:
        keys = [self._key(rank) for rank in range(1, self.size)]
        self._until(keys)
        decision = conclude([text, *(bytes(one).decode() for one in self._client.multi_get(keys))])
        self._client.set(self._key(0), decision)
        # Every rank has read the decision before: it would not be at this exchange otherwise. Without this, the store
        # of a long run would grow with every save.
        self._client.delete_key(self._key(0, self._exchange - 1))
        return decision

    def _await_answer(self, text: str) -> str:
        self._client.set(self._key(self.rank), text)
        self._until([self._key(0)])
        self._client.delete_key(self._key(self.rank))
        return bytes(self._client.get(self._key(0))).decode()

    def _key(self, rank: int, exchange: int | None = None) -> str:
        return f"{self._prefix}/{self._exchange if exchange is None else exchange}/{rank}"

    def _until(self, keys: list[str]) -> None:
        """Wait until these keys are in the store."""
        # Asked again and again: a wait of the store itself cannot be ended from another thread before its timeout.
        began, pause = time.monotonic(), 0.001
        looks = began + LOOK.total_seconds()
        while True:
            # Before the question: an answer that is there counts, even if this thread had to wait for its turn.
            now = time.monotonic()
            if self._client.check(keys):
                return
            if now > looks:
                looks += LOOK.total_seconds()
                self._look()
            if now > min(self._ends, began + ANSWER_WITHIN):
                silent = [int(key.rpartition("/")[2]) for key in keys if not self._client.check([key])]
                if not silent:
                    return
                self._broken = f"no answer from {format_rank_numbers(silent)} for {time.monotonic() - began:.0f} s"
                raise TimeoutError(self._broken)
            time.sleep(pause)
            pause = min(2 * pause, max(0.02, self.size / QUESTIONS))

    def _look(self) -> None:
        """Give up where a rank is gone: its text will not come."""
        try:
            check_peers()
        except RankFailed as failed:
            self._broken = failed.given
            raise TimeoutError(failed.given) from failed


class SharedFlag:
    """A flag that any rank can raise and that all ranks see, without waiting for one another: it is kept in the store.

    Every rank has to create its Flag at the same point of the program.
    """

    def __init__(self) -> None:
        self._key = f"halfstep/flag/{next(_counted)}"
        self._is_raised = False

    def hoist(self) -> None:
        """Raise the flag, for all ranks."""
        if not self._is_raised and _is_distributed():
            _find_default_store().set(self._key, "")
        self._is_raised = True

    def is_raised(self) -> bool:
        """Return whether a rank has raised the flag; a question to the store takes about 0.1 ms."""
        if not self._is_raised and _is_distributed():
            self._is_raised = bool(_find_default_store().check([self._key]))
        return self._is_raised


_counted = itertools.count()
"""Numbers what this process keeps in the store; all ranks make as many."""


def _find_default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _choose_collective_device(group: Any = None) -> torch.device:
    """Return the device that tensors must be on for collectives: the CPU, unless the group has no CPU backend."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(_group.get()) > 1
