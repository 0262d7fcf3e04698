"""The ranks that tests run on: what returns, raises, dies and hangs on them reaches the test."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.commands import Command
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
MANY = 64


@pytest.fixture
def four() -> Iterator[Ranks]:
    started = Ranks(4, deadline=20.0)
    yield started
    started.stop()


def meets(rank: int, times: int = 1) -> dict[str, Any]:
    total = torch.tensor([float(rank * times)])
    dist.all_reduce(total)
    told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")}
    return {**told, "total": total.item(), "pid": os.getpid(), "mine": os.environ.get("MINE"), "folder": os.getcwd()}


def test_every_rank_returns_what_it_found_and_serves_again(
    four: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = four(meets)
    assert [one["total"] for one in first] == [6.0] * 4
    assert [one["RANK"] for one in first] == [one["LOCAL_RANK"] for one in first] == ["0", "1", "2", "3"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in first} == {
        ("4", "4", "127.0.0.1")
    }
    assert first[0]["mine"] is None
    monkeypatch.setenv("MINE", "here")
    monkeypatch.chdir(tmp_path)
    again = four(meets, times=2)
    assert [one["total"] for one in again] == [12.0] * 4
    assert [one["pid"] for one in again] == [one["pid"] for one in first]
    assert {(one["mine"], one["folder"]) for one in again} == {("here", str(tmp_path))}


def raises_on(rank: int, bad: int) -> int:
    if rank == bad:
        raise ValueError("sample 7")
    return rank


def test_what_a_rank_raises_reaches_the_test_with_its_traceback(four: Ranks) -> None:
    with pytest.raises(AssertionError) as told:
        four(raises_on, 2)
    assert str(told.value).startswith("rank 2: Traceback")
    assert "in raises_on" in str(told.value)
    assert "ValueError: sample 7" in str(told.value)
    assert "rank 1" not in str(told.value)
    assert four(raises_on, 9) == [0, 1, 2, 3], "they are started anew"


def answers_nothing(rank: int) -> Any:
    return lambda: None


def test_what_cannot_be_sent_is_told(four: Ranks) -> None:
    with pytest.raises(AssertionError, match="pickle"):
        four(answers_nothing)


def waits_for_the_end_of(rank: int, other: int, folder: str) -> str:
    """What the others find when one is gone: gloo tells them that its connection was closed."""
    Path(folder, str(rank)).touch()
    if rank == other:
        signal.pause()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return type(error).__name__
    return "met"


def until_all_are_in(folder: Path, ranks: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_rank_that_is_killed_leaves_the_others_results(four: Ranks, tmp_path: Path) -> None:
    four(raises_on, 9)
    four.begin(waits_for_the_end_of, 0, str(tmp_path))
    until_all_are_in(tmp_path, 4)
    four.send_signal(0, signal.SIGKILL)  # also where it is rank 0: the store is not its own
    gone, *others = four.outcomes()
    assert gone.failure == "ended by SIGKILL"
    assert [one.value for one in others] == ["RuntimeError"] * 3, others


def leaves(rank: int) -> None:
    if rank == 1:
        os._exit(17)


def test_a_rank_that_leaves_is_told_with_its_code(four: Ranks) -> None:
    with pytest.raises(AssertionError, match="rank 1: ended with 17"):
        four(leaves)


def sleeps_on(rank: int, those: list[int]) -> int:
    if rank in those:
        never_comes_back()
    return rank


def never_comes_back() -> None:
    time.sleep(600)


@pytest.mark.parametrize("number", [None, signal.SIGSTOP])
def test_a_rank_that_hangs_is_ended_and_its_stack_shown(number: signal.Signals | None) -> None:
    ranks = Ranks(2, deadline=4.0)
    try:
        assert ranks(raises_on, 9) == [0, 1]
        ranks.begin(sleeps_on, [1])
        if number is not None:
            ranks.send_signal(1, number)
        pid = ranks._started[1].pid
        good, hung = ranks.outcomes()
    finally:
        ranks.stop()
    assert (good.value, good.failure) == (0, "")
    assert hung.failure.startswith("hung for 4 s, here:")
    assert "never_comes_back" in hung.failure or number is not None
    assert "_serve" in hung.failure
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def own_group(rank: int) -> tuple[bool, float]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return before, total.item()


def test_without_a_backend_what_runs_makes_its_group_as_under_torchrun() -> None:
    ranks = Ranks(2, backend=None)
    try:
        assert ranks(own_group) == [(False, 2.0)] * 2
    finally:
        ranks.stop()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc")
def test_the_server_has_one_thread_and_torch() -> None:
    assert Command("--version").ended()[0] == 0
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    assert "\nThreads:\t1\n" in Path(f"/proc/{pid}/status").read_text()


def loaded(rank: int) -> list[str]:
    return [
        name for name in ("torch.distributed.fsdp", "torch._dynamo", "torchmetrics", "halfstep") if name in sys.modules
    ]


def test_the_server_loads_whatever_folder_it_is_started_in(four: Ranks) -> None:
    assert len(four(loaded)[0]) == 4


def sharded_step(rank: int) -> dict[str, float]:
    """One update of a model in as many shards as there are ranks, against the same update of one process."""
    from torch.distributed.fsdp import fully_shard

    def update(model: nn.Module, x: torch.Tensor) -> float:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    everything = torch.randn(4 * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 8)))
    alone, cut = models
    fully_shard(cut)
    update(alone, everything)
    loss = update(cut, everything[rank :: dist.get_world_size()])
    same = zip(alone.parameters(), cut.parameters(), strict=True)
    apart = max((one - other.full_tensor()).abs().max().item() for one, other in same)
    total = torch.tensor([loss])
    dist.all_reduce(total)
    return {"apart": apart, "loss": total.item() / dist.get_world_size()}


@pytest.mark.full
def test_many_ranks_meet_and_train_one_model_in_shards(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(MANY, deadline=120.0)
    try:
        began = time.monotonic()
        assert [one["total"] for one in ranks(meets)] == [float(sum(range(MANY)))] * MANY
        met = time.monotonic()
        found = ranks(sharded_step)
        ended = time.monotonic()
    finally:
        ranks.stop()
    assert len({one["loss"] for one in found}) == 1
    assert max(one["apart"] for one in found) < 1e-6
    with capsys.disabled():
        print(f"\n{MANY} ranks: met after {met - began:.1f} s, one step of FSDP2 in {ended - met:.1f} s")
