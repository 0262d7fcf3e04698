"""A row of the fault matrix that is about data can fail; tests/test_faults.py runs them all."""

from __future__ import annotations

import pytest

from faults import f07_corrupt_images
from halfstep.data import dataset


def test_the_row_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that is drawn by chance is another one on the second run."""
    import random

    monkeypatch.setattr(dataset, "derive_seed", lambda *parts: random.SystemRandom().getrandbits(60))
    outcome = f07_corrupt_images.run(full=False)
    assert outcome.passed < outcome.n
