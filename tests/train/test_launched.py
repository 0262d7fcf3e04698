"""Ranks that die or hang under torchrun: the run ends or goes on, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import Agent
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


@pytest.mark.parametrize(("what", "code"), [("memory", 81), pytest.param("bug", 70, marks=FULL)])
def test_the_rank_that_fails_is_named_by_the_others(agent: Agent, what: str, code: int) -> None:
    agent.start(what)
    codes = agent.codes()
    told = agent.statuses()
    assert [one["code"] for one in told] == ([81, 81] if what == "memory" else [76, 70]), told
    assert codes[0] == told[0]["code"]
    assert "rank 1" in told[0]["reason"]
    assert ("ZeroDivisionError: of a test" in told[1].get("traceback", "")) == (what == "bug")
