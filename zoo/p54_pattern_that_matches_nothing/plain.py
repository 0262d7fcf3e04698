"""A filter by name is to keep the head out of fp8; the head has another name in this version of the model."""

from __future__ import annotations

from torch import nn

from zoo.outcome import Outcome

KEPT_OUT = ("output",)


def model() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64), "head": nn.Linear(64, 256)})


def run() -> Outcome:
    # As conversions do it: every linear layer whose path contains none of the words.
    layers = [path for path, module in model().named_modules() if isinstance(module, nn.Linear)]
    converted = [path for path in layers if not any(word in path for word in KEPT_OUT)]
    return Outcome(
        good="head" not in converted,
        seen=f"kept out: {', '.join(KEPT_OUT)}; converted without a word: {', '.join(converted)}",
        word="head in fp8",
    )
