"""Ranks that die or hang under torchrun: the run ends or goes on, and nobody waits for ever."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import halfstep
from tests.support.launched import RECIPE, Agent, Troubled
from tests.train.test_loop import events

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(240)]
QUICK = ("world.timeout=6", "world.start_timeout=60")
FULL = pytest.mark.full


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.end()


def test_a_killed_rank_is_restarted_and_the_run_goes_on(agent: Agent) -> None:
    agent.start("kill")
    assert agent.codes() == [76, -9]
    lost, killed = agent.statuses()
    assert (lost["code"], lost["restartable"], killed["state"]) == (76, True, "running")
    agent.start("nothing", attempt=1)
    assert agent.codes() == [0, 0]
    assert [(one["code"], one["restarts"]) for one in agent.statuses()] == [(0, 1), (0, 1)]
    # The save of step 6 may be under way when the rank dies.
    assert events(agent.run, "start")[-1]["resumed"]["attempt"] in (4, 6)
    assert [event["attempt"] for event in events(agent.run, "step")] == list(range(1, 17))


def test_a_rank_killed_before_the_first_step_is_named_and_leaves_no_folder(agent: Agent) -> None:
    agent.start("kill_building", restarts=0)
    assert agent.codes() == [76, -9]
    assert not agent.run.exists()


@pytest.mark.parametrize("what", ["stop", pytest.param("sleep", marks=FULL), pytest.param("hold", marks=FULL)])
def test_a_rank_that_hangs_is_named_and_ends_the_run(agent: Agent, what: str) -> None:
    waits, hangs = agent.start(what, *QUICK)
    waits.join(90.0)
    assert waits.exitcode == 76
    status = agent.statuses()[0]
    assert (status["code"], status["restartable"]) == (76, True)
    assert status["reason"].startswith("rank 1 "), status["reason"]
    assert "in step 6 (computing)" in status["reason"]
    assert "halfstep/train/loop.py" in (agent.run / "stacks" / "rank-00000.txt").read_text()
    if what == "sleep":
        hangs.join(10.0)
        assert hangs.exitcode == 76
        assert "tests/support/launched.py" in (agent.run / "stacks" / "rank-00001.txt").read_text()


@pytest.mark.full
def test_a_straggler_is_waited_for(agent: Agent) -> None:
    agent.start("late", *QUICK)
    assert agent.codes() == [0, 0]
    assert not (agent.run / "stacks").exists()


@pytest.mark.full
def test_the_rank_that_fails_is_named_by_the_others(agent: Agent) -> None:
    agent.start("bug")
    codes = agent.codes()
    told = agent.statuses()
    assert [one["code"] for one in told] == [76, 70], told
    assert codes[0] == told[0]["code"]
    assert "rank 1" in told[0]["reason"]
    assert "ZeroDivisionError: of a test" in told[1].get("traceback", "")


@pytest.mark.wording
def test_a_restart_after_want_of_memory_takes_the_same_steps_in_halves(agent: Agent, tmp_path: Path) -> None:
    begins, sizes = [], []
    for attempt, what in enumerate(("memory", "nothing")):
        agent.start(what, attempt=attempt)
        assert agent.codes() == ([0, 0] if what == "nothing" else [81, 81])
        status = agent.statuses()[0]
        assert "rank 1" in status["reason"] or what == "nothing"
        begins.append(max(status["checkpoint"], 0))
        sizes.append((status["batch_size"], status["divided_by"], status["fruitless"]))
    assert sizes == [(8, 1, 0), (8, 2, 0)]
    resumed = events(agent.run, "start")[-1]
    assert resumed["batch"] == {"per_device": 4, "devices": 2, "microbatches": 2, "total": 16}
    assert (resumed["host"], resumed["rank"], resumed["job"]) == (socket.gethostname(), 0, "a job")
    assert [(one["rank"], one["job"]) for one in agent.statuses()] == [(0, "a job"), (1, "a job")]
    assert "memory ran out with larger micro-batches: a step takes the same samples, 4 at a time" in " ".join(
        resumed["notes"]
    )
    assert resumed["resumed"]["reasons"] == ["a micro-batch had 8 samples, and has 4"]

    assert "Finished" in (tmp_path / "printed-0.txt").read_text()
    assert (tmp_path / "printed-1.txt").read_text() == "", "one rank prints"
    run, expected = on_one_device(tmp_path / "whole")
    taken: dict[int, list[list[float]]] = {}
    for attempt, (begin, parts) in enumerate(zip(begins, (1, 2), strict=True)):
        calls = agent.seen(attempt)
        for first in range(0, len(calls), parts):
            taken[begin + first // parts] = [one for call in calls[first : first + parts] for one in call]
    assert sorted(taken) == list(range(len(expected))) == list(range(16))
    for step, samples in enumerate(expected):
        assert sorted(taken[step]) == sorted(samples), step
    assert len({tuple(sample) for step in range(4) for sample in taken[step]}) == 64, "each once in an epoch"
    steps, others = events(agent.run, "step"), events(run, "step")
    assert [event["attempt"] for event in steps] == list(range(1, 17))
    assert [event["loss"] for event in steps] == pytest.approx([event["loss"] for event in others], rel=1e-5)
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (agent.run, run))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


def on_one_device(folder: Path) -> tuple[Path, list[list[list[float]]]]:
    """The run with the same samples a step on one device, never interrupted, and the samples of each step."""
    folder.mkdir()
    (folder / "tiny.yaml").write_text(RECIPE)
    Troubled.seen = folder / "seen.jsonl"
    settings = {"run.dir": str(folder / "run"), "train.batch_size": 16}
    halfstep.fit(folder / "tiny.yaml", task=Troubled, settings=settings, quiet=True)
    return folder / "run", [json.loads(line) for line in Troubled.seen.read_text().splitlines()]
