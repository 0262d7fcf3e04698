"""Names of checkpoints: numbered through, never used twice, and nothing else taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.checkpoint.paths import list_drafts, list_generations, name_generation, name_next_generation


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()


def test_the_latest_save_comes_first_whatever_its_step(tmp_path: Path) -> None:
    make(tmp_path, "step-00000120.0007", "step-00000090.0008", "step-00000150.0006")
    assert [one.number for one in list_generations(tmp_path)] == [8, 7, 6]
    assert list_generations(tmp_path)[0] == name_generation(tmp_path, 90, 8)


@pytest.mark.parametrize("last", ["step-00000003.0009", "step-00000003.0009.tmp", "step-00000003.0009.bad"])
def test_a_number_is_above_all_that_are_there(last: str, tmp_path: Path) -> None:
    make(tmp_path, "step-00000006.0004", last)
    assert name_next_generation(tmp_path, 6) == name_generation(tmp_path, 6, 10)
    assert name_next_generation(tmp_path, 6).name == "step-00000006.000a"


def test_many_saves_and_long_runs_keep_their_order(tmp_path: Path) -> None:
    make(tmp_path, "step-00000001.ffff", "step-100000000000.10000")
    assert [one.attempt for one in list_generations(tmp_path)] == [10**11, 1]
    assert name_next_generation(tmp_path, 2).name == "step-00000002.10001"
    assert name_generation(tmp_path, 10**11, 2**16) == list_generations(tmp_path)[0]


def test_what_is_not_committed_is_not_found(tmp_path: Path) -> None:
    make(tmp_path, "step-00000003.0001.tmp", "step-00000003.0002.bad", "step-3.0001", "step-00000003", "latest")
    make(tmp_path, "step-00000003.0001.tmp.tmp", "xstep-00000003.0001", "step-00000003.000G", "step-00000003.0001 ")
    assert list_generations(tmp_path) == []
    assert list_drafts(tmp_path) == [tmp_path / "step-00000003.0001.tmp"]


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent", tmp_path / "file"):
        assert (list_generations(path), list_drafts(path)) == ([], [])
    assert name_next_generation(tmp_path / "absent", 5).number == 1
