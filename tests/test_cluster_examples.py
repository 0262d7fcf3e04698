"""The scripts for clusters restart what a restart can mend, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep import errors
from halfstep.train.status import RESTARTABLE

FOLDER = Path(__file__).parents[1] / "examples" / "cluster"
HOPELESS = {errors.USAGE, errors.DATA, errors.REFUSED, errors.CONFIGURATION, errors.INCOMPATIBLE, errors.GAVE_UP}


@pytest.fixture
def job() -> dict[str, Any]:
    service, found = yaml.safe_load_all((FOLDER / "kubernetes-job.yaml").read_text())
    assert (service["kind"], found["apiVersion"], found["kind"]) == ("Service", "batch/v1", "Job")
    assert service["spec"]["selector"] == {"job-name": found["metadata"]["name"]}
    return dict(found["spec"])


def test_a_pod_is_started_again_where_the_run_goes_on(job: dict[str, Any]) -> None:
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in rules} == {
        "Ignore": set(RESTARTABLE),
        # A pod does not know that it was started again, so it would not take smaller micro-batches.
        "FailJob": {*HOPELESS, errors.OUT_OF_MEMORY},
    }
    # Kubernetes accepts such a policy only with this.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    [container] = job["template"]["spec"]["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}


def test_every_pod_is_a_rank(job: dict[str, Any]) -> None:
    [container] = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["WORLD_SIZE"]) == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    assert 'RANK="$JOB_COMPLETION_INDEX"' in container["command"][-1]
    assert environment["MASTER_ADDR"].endswith(job["template"]["spec"]["subdomain"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_a_slurm_job_is_queued_again_where_the_run_goes_on(tmp_path: Path) -> None:
    script = FOLDER / "slurm.sbatch"
    text = script.read_text()
    assert re.search(r"^#SBATCH --signal=TERM@\d+$", text, re.MULTILINE)
    for name, body in (("srun", 'exit "$CODE"'), ("scontrol", 'echo "$@" >> requeued')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert "--kill-on-bad-exit=0" in text, "with 1 the first rank that ends with 75 makes srun end with 143"
    again = (*RESTARTABLE, errors.OUT_OF_MEMORY, 128 + 9, 128 + 15)
    for code in (0, 1, *again, *HOPELESS):
        (tmp_path / "requeued").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "RECIPE": "unet", "RUN": "runs"}
        environment["SLURM_JOB_ID"] = "7"
        done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, timeout=20)
        assert done.returncode == code
        assert (tmp_path / "requeued").exists() == (code in again), code
