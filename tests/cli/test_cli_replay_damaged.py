"""`halfstep replay` of records that are cut off, or in whose place lies something else: no advice leads in a circle."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from halfstep.checkpoint.sealed import name_tensors_file
from halfstep.guard.failed_steps.reading import FAILED_STEPS, list_failed_steps
from tests.cli.test_cli_replay import halfstep
from tests.support.troubled import InOneModule, fit

TASK = "from tests.support.troubled import InOneModule\n\n\nclass Mine(InOneModule):\n    pass\n"


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from halfstep.errors import Diverged

    folder = tmp_path_factory.mktemp("damaged")
    with pytest.raises(Diverged):
        fit(folder, InOneModule)
    (folder / "mine.py").write_text(TASK)
    return folder


@pytest.fixture
def place(failed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(failed, tmp_path / "place"))


def cut(record: Path) -> None:
    (record / name_tensors_file(0)).write_bytes((record / name_tensors_file(0)).read_bytes()[:-8])


def test_the_newest_whole_one_is_run(place: Path) -> None:
    run, (whole,) = place / "run", list_failed_steps(place / "run")
    cut(Path(shutil.copytree(whole.path, whole.path.with_name("step-00000999.0002"))))
    done = halfstep("replay", run, "--task", place / "mine.py", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["recorded"]["attempt"] == whole.attempt
    listed = halfstep("replay", run, "--list").stdout
    assert "attempt 999  damaged" in listed
    assert shlex.split(listed.splitlines()[-1])[-1] == str(whole.attempt)


@pytest.mark.wording
def test_where_none_is_whole_nothing_is_advised_that_ends_alike(place: Path) -> None:
    run, (record,) = place / "run", list_failed_steps(place / "run")
    cut(record.path)
    done = halfstep("replay", run, "--task", place / "mine.py")
    assert done.exit_code == 65
    assert "do: nothing" in done.output
    assert "halfstep replay" not in halfstep("replay", run, "--list").stdout


@pytest.mark.wording
def test_one_that_is_asked_for_names_an_older_one(place: Path) -> None:
    run, (whole,) = place / "run", list_failed_steps(place / "run")
    cut(Path(shutil.copytree(whole.path, whole.path.with_name("step-00000999.0002"))))
    done = halfstep("replay", run, "--attempt", 999, "--task", place / "mine.py")
    assert done.exit_code == 65
    assert f"--attempt {whole.attempt}" in done.output


@pytest.mark.wording
@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_the_place_of_the_folder_is_said(place: Path, kind: str) -> None:
    trouble = place / "run" / FAILED_STEPS
    trouble.rename(place / "elsewhere")
    trouble.write_text("") if kind == "file" else trouble.symlink_to(place / "elsewhere")
    done = halfstep("replay", place / "run")
    assert done.exit_code == 65
    assert f"is a {kind} instead of a folder" in " ".join(done.output.split())
