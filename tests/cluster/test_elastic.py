"""Agents of torchrun that leave and join: the run goes on with another number of ranks, and the same samples a step."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import halfstep
from halfstep.files import write_json
from tests.support.slurm import wait_for
from tests.support.tiny_task import Tiny
from tests.train.test_loop import events

pytestmark = [pytest.mark.full, pytest.mark.ranks, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "elastic.json"
STEPS = 150
RECIPE = f"""
task: tiny
precision: fp32
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.0, fused: false}}
schedule: {{name: constant}}
train: {{steps: {STEPS}, batch_size: 16, global_batch: 12, num_workers: 0, seed: 5}}
checkpoint: {{every_steps: 5}}
run: {{log_every: 2, pictures: 0}}
"""
TASK = """
import time
from tests.support.tiny_task import Tiny

class Slow(Tiny):
    def loss(self, model, batch, metrics=None):
        time.sleep(1.0 if model.training else 0.0)
        return super().loss(model, batch, metrics)
"""


class Agents:
    """Agents of one rank each; the first one hosts the rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.started: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def start(self) -> subprocess.Popen[bytes]:
        conf = f"join_timeout=300,last_call_timeout=5,is_host={int(not self.started)}"
        torchrun = ["-m", "torch.distributed.run", "--nnodes=1:3", "--nproc_per_node=1", "--max_restarts=3"]
        torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{self._port}", "--rdzv_id=elastic"]
        torchrun += [f"--rdzv_conf={conf}", "--local_addr=127.0.0.1", "-m", "halfstep", "train"]
        own = [str(self.folder / "tiny.yaml"), "--task", str(self.folder / "slow.py"), f"run.dir={self.run}"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"agent-{len(self.started)}.txt").open("wb") as printed:
            agent = subprocess.Popen([sys.executable, *torchrun, *own], env=environment, stdout=printed, stderr=printed)
        self.started.append(agent)
        return agent

    def steps_with(self, ranks: int) -> int:
        """Steps of the last launch, where it has so many ranks."""
        if not (self.run / "journal.jsonl").exists():
            return 0
        launched = events(self.run, "start")
        if not launched or launched[-1]["batch"]["devices"] != ranks:
            return 0
        since = (launched[-1]["resumed"] or {}).get("attempt") or 0
        return len(events(self.run, "step")) - since


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "slow.py").write_text(TASK)
    made = Agents(tmp_path)
    yield made
    for agent in made.started:
        killed(agent)


def killed(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its rank, as a node is lost; torchrun starts ranks in sessions of their own."""
    if agent.poll() is None:
        ranks = psutil.Process(agent.pid).children(recursive=True)
        for one in (agent, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        agent.wait()


def test_agents_leave_and_join_and_a_step_keeps_its_samples(agents: Agents, tmp_path: Path) -> None:
    first, second = agents.start(), agents.start()
    wait_for(lambda: agents.steps_with(2) >= 6, 300, "two ranks")
    killed(second)
    wait_for(lambda: agents.steps_with(1) >= 6, 300, "one rank")
    agents.start()
    wait_for(lambda: agents.steps_with(2) >= 6, 300, "two ranks again")
    agents.start()
    wait_for(lambda: agents.steps_with(3) >= 3, 300, "three ranks")
    assert first.wait(600) == 0
    starts = events(agents.run, "start")
    assert {start["batch"]["total"] for start in starts} == {12}
    assert [event["attempt"] for event in events(agents.run, "step")] == list(range(1, STEPS + 1))
    alone = tmp_path / "alone"
    settings = {"run.dir": str(alone), "train.batch_size": 12}
    halfstep.fit(tmp_path / "tiny.yaml", task=Tiny, settings=settings, quiet=True)
    ours, theirs = ([event["loss"] for event in events(run, "step")] for run in (agents.run, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)
    if os.environ.get("RECORD"):
        facts = {"command": "RECORD=1 scripts/test --full tests/cluster/test_elastic.py", "steps": STEPS}
        worlds = [[start["batch"]["devices"], (start["resumed"] or {}).get("attempt") or 0] for start in starts]
        furthest = max(abs(one - other) / other for one, other in zip(ours, theirs, strict=True))
        write_json(RECORD, {**facts, "global_batch": 12, "ranks_and_first_step": worlds, "loss_difference": furthest})
