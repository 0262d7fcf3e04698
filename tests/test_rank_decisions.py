"""Decisions of all ranks through the store: one rank concludes, and nobody waits for the dead."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep import distributed
from halfstep.checkpoint.commit import CheckpointSaver, RankSnapshot
from halfstep.checkpoint.paths import list_generations
from halfstep.checkpoint.reading import verify_checkpoint
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def decided_often(rank: int, times: int) -> dict[str, Any]:
    party, concluded = distributed.RankGroup(), []

    def conclude(texts: list[str]) -> str:
        concluded.append(texts)
        return json.dumps([*texts, "ü"])

    keys = []
    for number in range(times):
        found = json.loads(party.decide(f"{number} of {rank}", conclude))
        assert found == [f"{number} of 0", f"{number} of 1", "ü"]
        distributed.gather_texts("")  # both ranks have tidied up, and neither goes on before they are counted
        keys.append(distributed._find_default_store().num_keys())
        distributed.gather_texts("")
    return {"concluded": len(concluded), "keys": keys}


def test_rank_zero_alone_concludes_and_the_store_does_not_grow(on_ranks: Ranks) -> None:
    first, second = on_ranks(decided_often, 8)
    assert (first["concluded"], second["concluded"]) == (8, 0)
    assert len(set(first["keys"])) == 1


def asked_beside(rank: int) -> float:
    party, flag = distributed.RankGroup(), distributed.SharedFlag()
    flag.is_raised()
    if rank == 1:
        time.sleep(1.0)
    thread = threading.Thread(target=party.decide, args=("", lambda texts: ""))
    thread.start()
    began = time.perf_counter()
    for _ in range(10):
        flag.is_raised()
    took = time.perf_counter() - began
    thread.join()
    return took


def test_a_rank_that_waits_for_a_decision_does_not_hold_up_its_own_training(on_ranks: Ranks) -> None:
    assert on_ranks(asked_beside)[0] < 0.5


def left_alone(rank: int) -> list[str]:
    party, told = distributed.RankGroup(), []
    if rank == 0:
        threading.Timer(0.2, party.leave, [0.3]).start()
        for _ in range(2):
            with pytest.raises(TimeoutError) as error:
                party.decide("", lambda texts: "")
            told.append(str(error.value))
    return told


def test_who_leaves_does_not_wait_for_a_rank_that_is_gone(on_ranks: Ranks) -> None:
    began = time.monotonic()
    told = on_ranks(left_alone)[0]
    # The second of them at once: the ranks may be at different exchanges by then.
    assert [text.partition(" for ")[0] for text in told] == ["no answer from rank 1"] * 2
    assert time.monotonic() - began < 30.0


def saved_by_one(rank: int, folder: str) -> list[str]:
    """Rank 1 is gone when rank 0 ends with a save in flight."""
    saver = CheckpointSaver(Path(folder) / "checkpoints", keep=2, party=distributed.RankGroup())
    if rank == 0:
        saver.save(RankSnapshot(3, {}, {"w": torch.ones(2)}))
    saver.close(0.5)
    return [str(one.failure) for one in saver.results()]


def test_a_run_that_ends_does_not_wait_for_the_save_of_a_rank_that_is_gone(on_ranks: Ranks, tmp_path: Path) -> None:
    began = time.monotonic()
    told = on_ranks(saved_by_one, str(tmp_path))[0]
    assert len(told) == 1
    assert told[0].startswith("no answer from rank 1 for "), told
    assert time.monotonic() - began < 30.0
    assert not list_generations(tmp_path / "checkpoints")


def saved_by_both(rank: int, folder: str) -> list[str]:
    """Rank 1 is two seconds behind; both end with the save in flight."""
    saver = CheckpointSaver(Path(folder) / "checkpoints", keep=2, party=distributed.RankGroup())
    time.sleep(2.0 * rank)
    saver.save(RankSnapshot(3, {"rank": rank}, {"w": torch.full((2,), float(rank))}))
    saver.close()
    return [str(one.failure) for one in saver.results()]


def test_a_save_in_flight_is_committed_where_all_ranks_end_alive(on_ranks: Ranks, tmp_path: Path) -> None:
    assert on_ranks(saved_by_both, str(tmp_path)) == [["None"], ["None"]]
    (found,) = list_generations(tmp_path / "checkpoints")
    verdict = verify_checkpoint(found)
    assert verdict.problem is None
    assert verdict.manifest is not None
    assert verdict.manifest.world_size == 2
