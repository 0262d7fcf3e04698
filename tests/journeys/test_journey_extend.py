"""A run that is finished: started again, asked for more, and given more."""

from __future__ import annotations

import shutil

import pytest

from halfstep.errors import CANNOT_CREATE
from tests.journeys.desk import Desk
from tests.journeys.terminal import TELL_IMPORTS, imported
from tests.journeys.trained import SEGMENT, Trained

pytestmark = pytest.mark.full

MORE = [word if word != "3" else "4" for word in SEGMENT]


@pytest.fixture
def finished(segmented: Trained, desk: Desk) -> Desk:
    """A copy of the run and its photographs, to do with as one likes."""
    shutil.copytree(segmented.folder, desk.folder / segmented.run)
    shutil.copytree(segmented.desk.folder / "photos", desk.folder / "photos")
    return desk


def test_a_finished_run_says_so_before_torch_is_loaded(finished: Desk) -> None:
    terminal = finished.run(*SEGMENT, code=CANNOT_CREATE, environment=TELL_IMPORTS)
    assert terminal.shows(r"finished")
    assert not imported(terminal) & {"torch", "torchvision", "torchmetrics", "matplotlib"}


def test_more_epochs_alone_are_answered_with_the_option_that_gives_them(finished: Desk) -> None:
    with finished.type(*MORE) as terminal:
        code = terminal.finish(60)
    assert code not in {0, 1}, terminal.text
    assert "--extend" in terminal.words
    assert len(finished.events("runs/segment", "epoch")) == 3


def test_a_finished_run_is_extended(finished: Desk) -> None:
    terminal = finished.run(*MORE, "--extend")
    assert [event["epoch"] for event in finished.events("runs/segment", "epoch")] == [1, 2, 3, 4]
    assert terminal.shows(r"learning rate|\blr\b|schedule"), terminal.text
    last = finished.events("runs/segment", "step")[-1]
    assert last["lr"] > 0 or terminal.shows(r"rewarm"), "it trained with a learning rate of nothing, and did not say so"


def test_a_wrong_folder_is_told_as_a_wrong_folder(finished: Desk) -> None:
    words = [word if word != "photos" else "fotos" for word in SEGMENT]
    with finished.type(*words) as terminal:
        code = terminal.finish(60)
    assert code not in {0, 1}
    assert "fotos" in terminal.words
    assert not terminal.shows(r"another recipe"), terminal.text
