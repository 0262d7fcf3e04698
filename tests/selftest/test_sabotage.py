"""A defect in halfstep makes the self-test fail, and it names the part; without one, each part passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.precision.hardware import describe_device
from halfstep.selftest import worker
from halfstep.selftest.names import PARTS
from halfstep.selftest.part import PartContext, PartFailed
from halfstep.selftest.parts import overhead, parity, ranks
from tests.selftest.sabotages import ALL, Sabotage
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
HERE = {name: sabotage for name, sabotage in ALL.items() if sabotage.here}


def row(part: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return worker._answer_question(PartContext(describe_device("cpu"), Path(folder)), {"do": part})[1]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fewer pairs and seeds than the command does, which all run under --full."""
    monkeypatch.setattr(overhead, "_PAIRS", 6)
    monkeypatch.setattr(overhead, "_ROUNDS", 2)
    monkeypatch.setattr(parity, "SEEDS", 3)


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 8
    assert {sabotage.part for sabotage in ALL.values()} == set(PARTS)


@pytest.mark.parametrize("part", sorted({sabotage.part for sabotage in HERE.values()}))
def test_a_part_passes(part: str) -> None:
    found = row(part)
    assert found["result"] == "passed", found
    assert found["figure"]
    assert found["error"] is None


@pytest.mark.parametrize("name", HERE)
@pytest.mark.wording
def test_a_sabotage_makes_its_part_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage = HERE[name]
    sabotage.apply(lambda owner, attribute, value: monkeypatch.setattr(owner, attribute, value))
    found = row(sabotage.part)
    assert (found["part"], found["result"]) == (sabotage.part, "failed"), found
    assert sabotage.says in found["error"]


def _decisions(_rank: int, name: str) -> dict[str, Any]:
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, attribute: str, value: Any) -> None:
        replaced.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    if name:
        ALL[name].apply(replace)
    try:
        return ranks.run_windows(torch.device("cpu"))
    finally:
        for owner, attribute, value in replaced:
            setattr(owner, attribute, value)


@pytest.mark.ranks
def test_ranks_agree(on_ranks: Ranks) -> None:
    ranks.check_rank_decisions(dict(enumerate(on_ranks(_decisions, ""))))


@pytest.mark.ranks
def test_ranks_whose_votes_are_ignored_fail(on_ranks: Ranks) -> None:
    sabotage = ALL["one rank's vote ignored"]
    answers = dict(enumerate(on_ranks(_decisions, "one rank's vote ignored")))
    with pytest.raises(PartFailed, match=sabotage.says):
        ranks.check_rank_decisions(answers)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "sabotage"), ALL.items(), ids=ALL)
def test_the_command_fails_and_names_the_part(name: str, sabotage: Sabotage, tmp_path: Path) -> None:
    code, out, report = command(tmp_path, sabotage.part, SELFTEST_SABOTAGE=name)
    assert code == 70, out
    assert f"failed here: {sabotage.part}" in out
    (found,) = report["parts"]
    assert (found["part"], found["result"]) == (sabotage.part, "failed")
    assert sabotage.says in found["error"]


def command(folder: Path, part: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Run the command in processes that have the folder `site` on their path; return its code, words and JSON."""
    path = os.pathsep.join(map(str, (ROOT / "tests" / "selftest" / "site", ROOT / "src", ROOT)))
    ended = subprocess.run(
        [sys.executable, "-m", "halfstep", "selftest", "--only", part, "--json", "result.json"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    return ended.returncode, ended.stdout + ended.stderr, json.loads((folder / "result.json").read_text())
