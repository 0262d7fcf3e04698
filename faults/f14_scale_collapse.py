"""A layer whose numbers fit no loss scale: every step overflows, and the scale would fall to nothing in silence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.journal.jsonl import read_events
from tests.support.tiny_task import Tiny

ID = "F14"
WHAT = "a layer that overflows fp16 at every scale ends the run with 80 after at most 17 skips, and is named"
SEEDS = {False: 4, True: 10}
LAYERS = {"last": 1e4, "first": 1e6, "second": 1e6, "third": 1e6}
"""How many times too large; in the last one, the gradients alone overflow, and they do so at every scale."""
MOST, GAVE_UP = 17, 80
SETTINGS: dict[str, Any] = {"precision": "fp16", "train.steps": 60, "model.batchnorm": False, "train.ema": None}


class Deep(nn.Module):
    def __init__(self, width: int, spoilt: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)
        with torch.no_grad():
            self.get_submodule(spoilt).weight.mul_(LAYERS[spoilt])  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.third(self.second(self.first(x).tanh()).tanh()).tanh())
        return out


class Spoilt(Tiny):
    """The seed says which of its layers has weights that are far too large."""

    def model(self) -> nn.Module:
        return Deep(self.recipe.model.width, layer_of(self.recipe.train.seed))


@dataclass(frozen=True)
class Ended:
    code: int
    skips: int
    named: str | None


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    most = 0
    with rig.scratch() as folder:
        for seed in range(SEEDS[full]):
            found = _ended(folder / str(seed), seed)
            most = max(most, found.skips)
            trials[f"seed {seed}, {layer_of(seed)}"] = first_wrong(
                (f"exit code {found.code}", lambda found=found: found.code == GAVE_UP),  # type: ignore[misc]
                (f"{found.skips} skips", lambda found=found: 0 < found.skips <= MOST),  # type: ignore[misc]
                (f"named {found.named}", lambda found=found, seed=seed: found.named == layer_of(seed)),  # type: ignore[misc]
            )
    return outcome(trials, f"{most} skips at most")


def layer_of(seed: int) -> str:
    return list(LAYERS)[seed % len(LAYERS)]


def _ended(folder: Path, seed: int) -> Ended:
    code = rig.run(folder, {**SETTINGS, "train.seed": seed}, task=Spoilt)
    told = read_events(folder / "journal.jsonl")
    skips = [event for event in told if event["event"] == "step" and not event["applied"]]
    verdicts = [event["facts"].get("culprit") for event in told if event["event"] == "guard"]
    culprits = [culprit["module"] for culprit in verdicts if culprit]
    return Ended(code, len(skips), culprits[-1] if culprits else None)
