"""Two ranks in which a foreign library makes the process group itself, as under torchrun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(backend=None)
    yield ranks
    ranks.stop()
