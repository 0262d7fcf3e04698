"""How a process ended, in a file that torchrun does not make a 1 of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import BadData, HalfstepError, Stopped, StorageFailed, Unsafe
from halfstep.runs.fit import status_file, status_saved


def kept(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / status_file(0)).read_text())
    return content


def test_a_process_that_came_to_its_end_says_so(tmp_path: Path) -> None:
    with status_saved(tmp_path):
        assert not list(tmp_path.iterdir()), "nothing is known before the end"
    assert kept(tmp_path) == {"code": 0, "reason": "finished", "restartable": False}


@pytest.mark.parametrize(
    ("error", "code", "restartable"),
    [
        (Stopped("stopped by SIGTERM at step 3", do="again"), 75, True),
        (StorageFailed("no room"), 74, False),
        (BadData("no samples", allowed="some"), 65, False),
        (Unsafe("code"), 77, False),
        (KeyboardInterrupt(), 130, False),
        (SystemExit(3), 70, False),
        (ZeroDivisionError("in a task\nand more"), 70, False),
    ],
)
def test_an_error_is_kept_in_its_first_line_and_goes_on(
    tmp_path: Path, error: BaseException, code: int, restartable: bool
) -> None:
    with pytest.raises(type(error)) as caught, status_saved(tmp_path):
        raise error
    assert caught.value is error
    told = error.given if isinstance(error, HalfstepError) else str(error).split("\n")[0] or type(error).__name__
    assert kept(tmp_path) == {"code": code, "reason": told, "restartable": restartable}


def test_the_last_launch_counts(tmp_path: Path) -> None:
    with pytest.raises(Stopped), status_saved(tmp_path):
        raise Stopped("stopped")
    with status_saved(tmp_path):
        pass
    assert kept(tmp_path)["code"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["status.rank-00000.json"]


def test_a_file_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / status_file(0)).mkdir()
    with pytest.raises(StorageFailed, match="no room"), status_saved(tmp_path):
        raise StorageFailed("no room")
    with status_saved(tmp_path):
        pass


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(BadData), status_saved(tmp_path / "gone"):
        raise BadData("never began")
    assert not (tmp_path / "gone").exists()
