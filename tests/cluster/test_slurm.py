"""The script of examples/cluster on a real Slurm: preempted, queued again, and gone on with to the bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.files import read_json, write_json
from halfstep.train.status import name_status_file
from tests.support import slurm
from tests.train.test_loop import events

pytestmark = [pytest.mark.full, pytest.mark.ranks, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "slurm.json"
STEPS = 60
RECIPE = f"""
task: tiny
precision: fp32
model: {{width: 16}}
data: {{samples: 256}}
optimizer: {{name: adamw, lr: 0.01}}
train: {{steps: {STEPS}, batch_size: 4, num_workers: 0, seed: 5, ema: 0.9}}
world: fsdp
checkpoint: {{every_steps: 1000}}
run: {{log_every: 5, pictures: 0}}
"""
TASK = """
import os, time
from tests.support.tiny_task import Tiny

class Slow(Tiny):
    def loss(self, model, batch, metrics=None):
        time.sleep(float(os.environ["SECONDS_A_STEP"]))
        return super().loss(model, batch, metrics)
"""


@pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "a cluster")
def test_a_preempted_job_is_queued_again_and_ends_with_the_same_bits(tmp_path: Path, request: Any) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "cluster").mkdir()
    with slurm.slurm(tmp_path / "cluster") as cluster:
        preempted, whole = tmp_path / "preempted", tmp_path / "whole"
        job = submit(cluster, tmp_path, preempted, seconds_a_step=1.0)
        slurm.wait_for(lambda: len(steps(preempted)) >= 5, 400, "the first steps")
        high = cluster.call(
            "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "--wrap", "sleep 1", "-o/dev/null"
        )
        slurm.wait_for(lambda: read_status(preempted).get("code") == 75, 120, "the preempted run to save itself")
        at = len(steps(preempted))
        slurm.wait_for(lambda: cluster.state(high).startswith("COMPLETED"), 200, "the job that preempted it")
        other = submit(cluster, tmp_path, whole, seconds_a_step=0.0)
        slurm.wait_for(lambda: cluster.state(other).startswith("COMPLETED"), 400, "the run without an interruption")
        slurm.wait_for(lambda: cluster.state(job) == "COMPLETED 1", 600, "the run that was queued again")
        version = cluster.call("sinfo", "--version")
    assert 5 <= at < STEPS
    assert steps(preempted) == steps(whole) == list(range(1, STEPS + 1))
    [first, again] = events(preempted, "start")
    assert (first["job"], again["job"], first["batch"]["devices"]) == (job, job, 4)
    assert (again["resumed"]["attempt"], again["resumed"]["exact"]) == (at, True), again["resumed"]
    digests = [read_json(run / "result.json")["weights"] for run in (preempted, whole)]  # type: ignore[index]
    assert digests[0] == digests[1]
    assert [event["loss"] for event in events(preempted, "step")] == [e["loss"] for e in events(whole, "step")]
    printed = (tmp_path / f"slurm-{job}.out").read_text()
    assert (printed.count("reading the recipe"), printed.count("Finished")) == (2, 1), "one rank prints"
    if request.config.getoption("--full") and os.environ.get("RECORD"):
        write_json(RECORD, facts(version, at, digests))


def submit(cluster: slurm.Slurm, folder: Path, run: Path, seconds_a_step: float) -> str:
    environment = {
        # The virtual nodes have names that nothing resolves.
        "MASTER_ADDR": "127.0.0.1",
        "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "SECONDS_A_STEP": str(seconds_a_step),
        "RECIPE": str(folder / "recipe.yaml"),
        "RUN": str(run),
    }
    words = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0", f"--chdir={folder}")
    script = str(ROOT / "examples" / "cluster" / "slurm.sbatch")
    return cluster.call("sbatch", "--parsable", *words, script, "--task", str(folder / "slow.py"), **environment)


def steps(run: Path) -> list[int]:
    return [event["attempt"] for event in events(run, "step")] if (run / "journal.jsonl").exists() else []


def read_status(run: Path) -> dict[str, Any]:
    return read_json(run / name_status_file(0)) or {}


def facts(version: str, at: int, digests: list[str]) -> dict[str, Any]:
    return {
        "command": "RECORD=1 scripts/test --full tests/cluster/test_slurm.py",
        "slurm": version,
        "nodes": 2,
        "tasks_a_node": 2,
        "world": "fsdp",
        "steps": STEPS,
        "preempted_at_step": at,
        "weights": dict(zip(("preempted", "never_preempted"), digests, strict=True)),
        "bitwise_equal": digests[0] == digests[1],
    }
