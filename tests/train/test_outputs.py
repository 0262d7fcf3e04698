"""What a run leaves in its folder is what its result says, or there is no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import HalfstepError
from halfstep.journal.events import Event, Journal
from halfstep.train.outputs import BEST, LAST, RunOutputs
from halfstep.train.run_folder import RESULT


class Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: Event) -> None:
        self.texts += [event["text"]] if event["event"] == "note" else []

    def close(self) -> None: ...


def model(value: float = 1.0) -> nn.Module:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    return made


def ended(best_epoch: int) -> dict[str, Any]:
    return {"reason": "finished", "best": {"metric": "loss", "value": 0.5, "epoch": best_epoch}}


@pytest.mark.wording
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_run_that_was_never_finite_does_not_finish(tmp_path: Path, value: float) -> None:
    notes = Notes()
    keeper = RunOutputs(tmp_path, Journal([notes]), pictures=0)
    keeper.last(model(value), None)
    assert "last.safetensors is not written" in notes.texts[0]
    with pytest.raises(HalfstepError, match=r"last\.safetensors is not written: .* not finite") as caught:
        keeper.result(ended(0))
    assert caught.value.exit_code == 80
    assert list(tmp_path.iterdir()) == []


def test_earlier_weights_stay_where_the_last_are_not_finite(tmp_path: Path) -> None:
    notes = Notes()
    keeper = RunOutputs(tmp_path, Journal([notes]), pictures=0)
    keeper.last(model(torch.nan), None)
    keeper.last(model(), None)
    before = (tmp_path / LAST).read_bytes()
    keeper.last(model(torch.nan), None)
    keeper.result(ended(0))
    assert (tmp_path / LAST).read_bytes() == before
    assert "is unchanged" in notes.texts[-1]
    assert (tmp_path / RESULT).exists()


@pytest.mark.parametrize(("kept", "best", "told"), [(2, 2, []), (None, 0, []), (1, 2, ["1"]), (None, 2, ["(none)"])])
def test_best_weights_of_another_epoch_are_told_by_whoever_ends_the_run(
    tmp_path: Path, kept: int | None, best: int, told: list[str]
) -> None:
    if kept is not None:
        RunOutputs(tmp_path, Journal(), pictures=0).best(model(), None, kept, {"loss": 0.5})
    notes = Notes()
    later = RunOutputs(tmp_path, Journal([notes]), pictures=0)
    later.last(model(), None)
    later.result(ended(best), best)
    assert notes.texts == [f"the best epoch was 2, and its weights were not kept: {BEST} is of epoch {n}" for n in told]
    assert json.loads((tmp_path / RESULT).read_text())["best"]["epoch"] == best
