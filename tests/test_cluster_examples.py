"""The scripts for clusters restart what a restart can mend, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfstep import errors
from halfstep.cli._probe import StatusQuery, parse_status_query
from halfstep.journal.prometheus import HELP
from halfstep.runs.liveness import FOR_A_BEAT
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


def test_a_pod_is_judged_by_the_status_of_its_own_rank(job: dict[str, Any], tmp_path: Path) -> None:
    [container] = job["template"]["spec"]["containers"]
    folder = re.search(r"run\.dir=(\S+)", container["command"][-1])[1]  # type: ignore[index]
    for name, pauses in (("startupProbe", 15 * 60), ("livenessProbe", 60)):
        probe = container[name]
        words = probe["exec"]["command"]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "3"}
        (tmp_path / "halfstep").write_text('#!/bin/sh\necho "$@"\nexit 76\n')
        (tmp_path / "halfstep").chmod(0o755)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
        command, *rest = done.stdout.split()
        assert (done.returncode, command) == (76, "status")
        assert parse_status_query(rest) == StatusQuery(Path(folder), 60, 3)
        # Longer than a rank is watched where its process is not found, and longer than ranks look for each other.
        assert probe["timeoutSeconds"] > FOR_A_BEAT
        assert probe["periodSeconds"] * probe["failureThreshold"] >= pauses


def test_a_slurm_job_is_queued_again_where_the_run_goes_on(tmp_path: Path) -> None:
    script = FOLDER / "slurm.sbatch"
    text = script.read_text()
    assert re.search(r"^#SBATCH --signal=USR1@\d+$", text, re.MULTILINE), (
        "to the ranks: B: would be to the script alone"
    )
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


# -- alerts -----------------------------------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def test_alerts_are_of_metrics_that_runs_write() -> None:
    rules = alerts()
    used = {name for rule in rules for name in re.findall(r"\bhalfstep_\w+", rule["expr"])}
    assert used <= HELP.keys()
    asked_for = {"heartbeat_timestamp_seconds", "exit_code", "restarts", "failed_saves_in_a_row", "bad_samples"}
    assert used >= {f"halfstep_{name}" for name in asked_for | {"disk_free_bytes", "rank_behind"}}
    assert {rule["labels"]["severity"] for rule in rules} == {"page", "ticket"}


def test_the_alert_for_failed_runs_leaves_out_what_goes_on() -> None:
    [failed] = [rule["expr"] for rule in alerts() if rule["alert"] == "HalfstepFailed"]
    assert {int(code) for code in re.findall(r"== (\d+)", failed)} == {*RESTARTABLE, errors.INTERRUPTED}


def test_every_alert_and_every_exit_code_has_its_place_in_the_runbook() -> None:
    text = (FOLDER.parents[1] / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor in anchors or not anchor) == ("docs/runbook.md", True), rule["alert"]
    codes = {value for name, value in vars(errors).items() if name.isupper() and type(value) is int}
    table = re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
    assert codes <= {int(code) for row in table for code in re.findall(r"\b\d+\b", row)} | {errors.HUNG}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus")
def test_promtool_accepts_the_alerts_and_they_fire(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def promtool(*words: str) -> str:
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    for name in ("alerts.yaml", "alerts.test.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    assert f"SUCCESS: {len(alerts())} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yaml")
    for rule in alerts() if request.config.getoption("--full") else alerts()[:1]:
        text = (FOLDER / "alerts.yaml").read_text()
        assert text.count(rule["expr"]) == 1
        (tmp_path / "alerts.yaml").write_text(text.replace(rule["expr"], "vector(0) > 1"))
        assert "FAILED" in promtool("test", "rules", "alerts.test.yaml"), f"{rule['alert']} is not tested"
