"""What journeys share: sixty photographs, five classes, and one run that was trained on each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.journeys.desk import Desk
from tests.journeys.photos import classes, photographs
from tests.journeys.trained import CLASSIFY, SEGMENT, Trained, trained_once


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "journeys"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def desk(tmp_path: Path, shared: Path) -> Desk:
    """An empty folder to work in."""
    return Desk(tmp_path / "desk", shared / "cache")


@pytest.fixture(scope="session")
def segmented(shared: Path) -> Trained:
    return trained_once(shared, "segment", lambda folder: photographs(folder / "photos"), SEGMENT)


@pytest.fixture(scope="session")
def classified(shared: Path) -> Trained:
    return trained_once(shared, "classify", lambda folder: classes(folder / "classes"), CLASSIFY)
