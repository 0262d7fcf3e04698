"""Who wins in each tool: the doctor's table against accelerate, transformers and Lightning themselves.

`precedence.json` records what each library made of every combination of places; its first lines name the command and
the versions. Here the doctor's answer is compared with all of them, and a sample is run again with the libraries that
are installed (all of them with --full).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from halfstep.doctor import precedence
from halfstep.doctor.linking import link_project_runs
from halfstep.doctor.precedence import RULES, ReadingOrder
from halfstep.doctor.project import read_project
from halfstep.doctor.sources import from_environment
from tests.doctor.precedence_cells import RECORD, Cell, cells, observe, write_project

RECORDED = json.loads(RECORD.read_text())["cells"]
PACKAGE = {"lightning cli": "jsonargparse", "fabric": "lightning"}


def answer(tool: str, cell: Cell, folder: Path) -> str:
    """Return what the doctor says of a cell, from the files of a project: a precision, or that the tool refuses."""
    write_project(tool, cell, folder)
    (run,) = link_project_runs(read_project(str(folder)), from_environment({}))
    rows = [row for row in run.provenance() if row.tool == tool]
    if not rows:
        return "fp32"
    refused = rows[0].refuses and any(rows[0].disagreeing())
    return "error" if refused else rows[0].precision


@pytest.mark.parametrize("tool", sorted(RECORDED))
def test_the_table_agrees_in_every_cell(tool: str, tmp_path: Path) -> None:
    wrong = []
    for number, row in enumerate(RECORDED[tool]):
        cell = {key: value for key, value in row.items() if key != "runs in"}
        said = answer(tool, cell, tmp_path / str(number))
        wrong += [] if said == row["runs in"] else [f"{cell}: runs in {row['runs in']}, and the doctor says {said}"]
    assert not wrong, f"{len(wrong)} of {len(RECORDED[tool])}: " + "\n".join(wrong[:5])


def test_every_combination_is_recorded() -> None:
    for tool, chosen in cells().items():
        recorded = [{key: value for key, value in row.items() if key != "runs in"} for row in RECORDED[tool]]
        assert recorded == chosen, tool
    assert sum(map(len, RECORDED.values())) == 928


def test_the_table_can_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one order turned round, cells disagree."""
    turned = tuple(ReadingOrder(r.tool, r.starts, r.order[::-1], r.refuses) for r in RULES)
    monkeypatch.setattr(precedence, "RULES", turned)
    cell = {"start": "accelerate", "code": "bf16", "file": "fp16"}
    recorded = next(row["runs in"] for row in RECORDED["accelerate"] if row == {**cell, "runs in": row["runs in"]})
    assert recorded == "bf16"
    assert answer("accelerate", cell, tmp_path) == "fp16"


def test_a_sample_runs_as_it_was_recorded(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    installed = [tool for tool in RECORDED if importlib.util.find_spec(PACKAGE.get(tool, tool))]
    assert installed, "none of the libraries is installed"
    every = 1 if request.config.getoption("--full") else 13
    rows = {tool: RECORDED[tool][1::every] for tool in installed}
    chosen = {tool: [{k: v for k, v in row.items() if k != "runs in"} for row in own] for tool, own in rows.items()}
    assert observe(chosen, tmp_path) == {tool: [row["runs in"] for row in own] for tool, own in rows.items()}
