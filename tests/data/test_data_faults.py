"""The rows of the fault matrix that are about data, in their small form."""

from __future__ import annotations

import pytest

from faults import f07_corrupt_images, f08_bombs
from faults.outcome import Outcome
from halfstep.data import dataset


def test_damaged_images_are_held() -> None:
    outcome = f07_corrupt_images.run(full=False)
    assert outcome == Outcome(25, 25, "none")


def test_the_row_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that is drawn by chance is another one on the second run."""
    import random

    monkeypatch.setattr(dataset, "derive", lambda *parts: random.SystemRandom().getrandbits(60))
    outcome = f07_corrupt_images.run(full=False)
    assert outcome.passed < outcome.n


def test_bombs_are_held() -> None:
    outcome = f08_bombs.run(full=False)
    assert outcome.passed == outcome.n == 9, outcome.worst
