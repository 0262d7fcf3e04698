"""No test may leave torch's process-wide settings other than it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halfstep.precision.flags import read_flags
from tests.support.ranks import Ranks

# Several workers with several threads each would fight over the cores.
torch.set_num_threads(1)


def settings() -> dict[str, object]:
    return {
        **read_flags(),
        "default dtype": torch.get_default_dtype(),
        "grad enabled": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(autouse=True)
def nothing_leaks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    torch.manual_seed(0)
    before = settings()
    yield
    assert settings() == before


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Ranks]:
    """Runs a function on two processes, which all tests of a worker share."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
