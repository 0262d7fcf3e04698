"""Checkpoints of another version: every command that reads them names the version, and leaves them as they are."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from faults.refit import of_form
from halfstep.checkpoint.sealed import FORMAT
from halfstep.cli.main import build
from halfstep.errors import INCOMPATIBLE

RECIPE = ["segmentation_tiny", "data.samples=16", "train.steps=4", "train.batch_size=4", "train.num_workers=0"]
SETTINGS = ["checkpoint.every_steps=2", "run.pictures=0", "--fp32"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was saved twice, without its result."""
    run = tmp_path_factory.mktemp("unfinished") / "run"
    done = halfstep("train", *RECIPE, *SETTINGS, f"run.dir={run}")
    assert done.exit_code == 0, done.output
    (run / "result.json").unlink()
    return run


def checkpoints(run: Path) -> dict[str, str]:
    files = [path for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.wording
@pytest.mark.parametrize("command", ["train", "verify", "export", "evaluate", "predict"])
@pytest.mark.parametrize(("form", "whose"), [(FORMAT - 1, "an earlier"), (FORMAT + 1, "a later")])
def test_another_form_is_refused_by_name_and_is_no_damage(
    command: str, form: int, whose: str, unfinished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(unfinished, tmp_path / "run"))
    of_form(run, form)
    before = checkpoints(run)
    given = [*RECIPE, *SETTINGS, f"run.dir={run}"] if command == "train" else [run]
    done = halfstep(command, *given, *([tmp_path] if command == "predict" else []))
    assert done.exit_code == INCOMPATIBLE, done.output
    said = " ".join(done.stderr.split())
    assert f"was written in form {form} by {whose} halfstep allowed: form {FORMAT}, which this version writes" in said
    assert ("pip install --upgrade halfstep" if form > FORMAT else "use the version that wrote it") in said
    assert checkpoints(run) == before
