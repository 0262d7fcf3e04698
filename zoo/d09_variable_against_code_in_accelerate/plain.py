"""The launcher's variable says fp16, the script's configuration bf16, and accelerate is given both."""

from __future__ import annotations

import os
import warnings
from unittest import mock

from zoo.outcome import Outcome
from zoo.real_accelerate import fresh_accelerator

VARIABLE = {"ACCELERATE_MIXED_PRECISION": "fp16"}
CONFIGURATION = "mixed_precision: bf16\nlearning_rate: 1.0e-4\n"


def run() -> Outcome:
    asked = CONFIGURATION.splitlines()[0].split(": ")[1]
    with mock.patch.dict(os.environ, VARIABLE), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        took = fresh_accelerator(asked).mixed_precision
    return Outcome(
        good=bool(said),
        seen=f"the variable says {VARIABLE['ACCELERATE_MIXED_PRECISION']}, the code {asked}; accelerate takes {took} "
        f"and says {[str(one.message) for one in said] or 'nothing'}",
        word="one wins, in silence",
    )
