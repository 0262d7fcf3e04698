"""transformers, asked for bf16 and for tf32 on a machine without a GPU, as recipes for an A100 ask for them."""

from __future__ import annotations

import tempfile
import warnings
from unittest import mock

from zoo.outcome import Outcome

RECIPES = ("bf16", "tf32")


def run() -> Outcome:
    said = {name: _started(name) for name in RECIPES}
    return Outcome(
        # What may be used instead is another format, by name.
        good=all(not words or any(other in words for other in ("fp16", "fp32")) for words in said.values()),
        seen="; ".join(f"{name}: {words or 'started'}" for name, words in said.items()),
        word="refused, no word on what to use",
    )


def _started(precision: str) -> str:
    """Return what transformers says instead of starting; empty where it starts."""
    # A GPU that is here is hidden, so that every machine shows the same.
    with tempfile.TemporaryDirectory() as folder, mock.patch("torch.cuda.is_available", return_value=False):
        from accelerate.state import AcceleratorState
        from transformers import TrainingArguments

        AcceleratorState._reset_state(True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                TrainingArguments(folder, **{precision: True})
        except ValueError as error:
            return f"ValueError: {error}"
    return ""
