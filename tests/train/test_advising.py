"""What a command is made of that is to cure a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.train.give_up import launcher, lower_rate, written_rate


@pytest.mark.parametrize(
    ("rate", "rates", "written", "suggested"),
    [
        (1e6, (4e4, 5e4, 6.5e4), None, "6000"),
        (1e6, (4e4, 5e4, 6.5e4), 2e-3, "0.002"),
        (3e-3, (3e-3, 2e-3, 1e-6), 2e-3, "0.0003"),
        (1e6, (6.7e4,), None, "6000"),
        (1e-2, (), None, "0.001"),
        (1e-2, (0.0,), None, "0.001"),
        (1e-2, (1e-2,), 0.0, "0.001"),
    ],
)
def test_a_rate_that_is_worth_a_try(rate: float, rates: tuple[float, ...], written: float, suggested: str) -> None:
    assert lower_rate(rate, rates, written) == suggested


def test_the_rate_that_the_recipe_has(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: tiny\noptimizer: {lr: 3e-4}\n")
    (tmp_path / "b.yaml").write_text("task: tiny\n")
    assert written_rate(f"halfstep train {tmp_path}/a.yaml --lr 5") == 3e-4
    assert written_rate(f"halfstep train {tmp_path}/b.yaml") is None
    assert written_rate(f"halfstep train {tmp_path}/gone.yaml") is None
    assert written_rate("halfstep.fit") is None
    assert written_rate("halfstep train") is None
    assert written_rate("halfstep train classification_tiny --lr 1e6") == 2e-3


def test_as_many_processes_as_before() -> None:
    assert launcher(1) == ["halfstep"]
    assert launcher(2) == ["torchrun", "--nproc-per-node", "2", "-m", "halfstep"]
