"""The fault matrix in its small form: every row holds, and the runner can say when one does not."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from faults import __main__ as runner
from faults import f03_malice, mutants
from faults.outcome import Outcome
from faults.recipe_check import Ending, in_process
from faults.record import RECORD
from halfstep import peers
from halfstep.recipe import names

ROOT = Path(__file__).parents[1]
ROWS = runner.rows()
AT_LEAST = {
    "F01": 100,
    "F02": 40,
    "F03": 25,
    "F04": 12,
    "F05": 10,
    "F06": 36,
    "F07": 2,
    "F08": 6,
    "F09": 30,
    "F10": 25,
    "F11": 21,
    "F12": 20,
    "F13": 30,
    "F14": 10,
    "F15": 20,
    "F16": 20,
    "F17": 100,
    "F18": 52,
    "F19": 87,
    "F20": 120,
    "F21": 100,
    "F22": 30,
    "F23": 30,
    "F24": 20,
    "F25": 300,
    "F26": 87,
    "F27": 20,
    "F28": 30,
    "F29": 14,
    "F30": 20,
    "F31": 12,
    "F32": 8,
    "F33": 70,
    "F34": 20,
    "F35": 37,
    "F36": 12,
    "F37": 11,
    "F38": 15,
    "F39": 60,
    "F40": 2000,
    "F41": 31,
    "F42": 25,
    "F43": 25,
    "F44": 30,
    "F45": 11,
    "F46": 10,
    "F47": 40,
    "F48": 35,
    "F49": 8,
    "F50": 400,
    "F51": 28,
    "F52": 17,
    "F53": 3,
    "F54": 13,
    "F55": 75,
}
"""How many faults a row puts in, in full."""


def test_there_are_rows() -> None:
    assert set(AT_LEAST) == set(ROWS)
    assert len(ROWS) == 55
    assert all(row.WHAT for row in ROWS.values())


def test_the_record_has_every_row_in_full_and_every_defect_killed() -> None:
    kept = json.loads(RECORD.read_text())
    found = {row["id"]: row for row in kept["rows"]}
    assert found.keys() == ROWS.keys(), "run scripts/faults --full --record"
    for name, row in found.items():
        assert row["pass"] == row["n"] >= AT_LEAST[name], row
        assert row["what"] == ROWS[name].WHAT
    killed = {mutant["mutant"]: mutant["killed"] for mutant in kept["mutants"]}
    assert killed == dict.fromkeys(mutants.mutants(), True), "run scripts/faults --mutants --record"
    assert len(killed) >= 25


def test_a_defect_replaces_only_names_that_halfstep_has() -> None:
    every = "from faults import mutants\nfor name in mutants.mutants(): mutants.apply(name)"
    done = subprocess.run([sys.executable, "-c", every], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("owner", "name"), [(peers, r"halfstep\.peers"), (peers.Peers, r"halfstep\.peers\.Peers")])
def test_a_defect_with_a_stale_name_is_no_kill(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    class Stale:
        apply = staticmethod(lambda: monkeypatch.setattr(owner, "no_such_name", 1, raising=False))

    monkeypatch.setattr(mutants, "mutants", lambda: {"M00": Stale})
    with pytest.raises(LookupError, match=f"M00 sets no_such_name of {name}, which"):
        mutants.apply("M00")


FOR_FULL = ("F18", "F21", "F22", "F32", "F33", "F38", "F44", "F49")
"""Rows that wait for timeouts of a job, or begin many runs: half a minute each even in their small form."""


NAMED = (
    "F01", "F02", "F04", "F05", "F07", "F09", "F10", "F12", "F23", "F28", "F29", "F30",
    "F31", "F34", "F37", "F39", "F41", "F42", "F43", "F45", "F46", "F50", "F53", "F55",
)  # fmt: skip
"""Rows that read in a message what was wrong."""


def _row(name: str) -> Any:
    marks = [pytest.mark.full] * (name in FOR_FULL) + [pytest.mark.wording] * (name in NAMED)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(map(_row, ROWS)))
@pytest.mark.slow
def test_a_row_holds(name: str) -> None:
    outcome = ROWS[name].run(False)
    assert runner.held(outcome), outcome
    assert outcome.n >= {"F01": 100, "F02": 40, "F03": 25, "F07": 25, "F08": 9}.get(name, 1)


def _wasteful(full: bool) -> dict[str, tuple[bool, float]]:
    """The attacks, each with more memory taken than is allowed."""

    def with_waste(*given: Any) -> Ending:
        ending = in_process(*given)
        if given[0] != "segmentation_tiny":
            assert len(b"1" * int(1.5 * f03_malice.MOST_BYTES)) > 0
        return ending

    f03_malice.in_process = with_waste
    return f03_malice.attacked(full)


@pytest.mark.full
def test_attacks_that_take_memory_are_seen_whatever_this_process_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(b"1" * int(3 * f03_malice.MOST_BYTES)) > 0
    monkeypatch.setattr(f03_malice, "attacked", _wasteful)
    outcome = f03_malice.run(False)
    assert outcome.n >= 25
    assert outcome.passed == 0


@pytest.mark.parametrize("name", [pytest.param("F01", marks=pytest.mark.full), "F02"])
def test_a_check_that_makes_a_file_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    real = names.parse_typed_settings

    def making(*given: Any) -> Any:
        Path("runs").touch()
        return real(*given)

    monkeypatch.setattr(names, "parse_typed_settings", making)
    outcome = ROWS[name].run(False)
    assert outcome.passed < outcome.n
    assert Path.cwd() == tmp_path
    assert not list(tmp_path.iterdir())


def _row(name: str, outcome: Outcome | Exception) -> types.ModuleType:
    row = types.ModuleType(name)
    row.ID, row.WHAT = name, "a row of the test"  # type: ignore[attr-defined]

    def run(full: bool) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    row.run = run  # type: ignore[attr-defined]
    return row


def test_the_runner_prints_a_line_for_each_row_and_fails_where_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = _row("F91", Outcome(3, 3, "5ms")), _row("F92", Outcome(2, 3, "9ms"))
    none, broken = _row("F93", Outcome(0, 0, "none")), _row("F94", ValueError("x"))
    rows = {row.ID: row for row in (good, bad, none, broken)}  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "rows", lambda: rows)
    assert runner.main(["F91"]) == 0
    assert capsys.readouterr().out == "F91 pass=3 n=3 worst=5ms\n"
    for name, code in (("F92", 1), ("F93", 1), ("F94", 3)):
        assert runner.main([name]) == code
    assert "F94 pass=0 n=1 worst=stopped with ValueError" in capsys.readouterr().out
    assert runner.main(["--json"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == list(rows)
    with pytest.raises(SystemExit):
        runner.main(["F99"])
