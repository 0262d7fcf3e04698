"""The launcher's variable says fp16, the script's configuration bf16, and accelerate is given both."""

from __future__ import annotations

import logging
import os
import warnings
from unittest import mock

from zoo.outcome import Outcome
from zoo.real_accelerate import fresh_accelerator

VARIABLE = {"ACCELERATE_MIXED_PRECISION": "fp16"}
CONFIGURATION = "mixed_precision: bf16\nlearning_rate: 1.0e-4\n"


def run() -> Outcome:
    asked = CONFIGURATION.splitlines()[0].split(": ")[1]
    said: list[str] = []
    logger, listener = logging.getLogger("accelerate"), logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(listener)
    with mock.patch.dict(os.environ, VARIABLE), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        took = fresh_accelerator(asked).mixed_precision
    logger.removeHandler(listener)
    said += [str(one.message) for one in warned]
    return Outcome(
        good=bool(said),
        seen=f"the variable says {VARIABLE['ACCELERATE_MIXED_PRECISION']}, the code {asked}; accelerate takes {took} "
        f"and says {said or 'nothing'}",
        word="one wins, in silence",
    )
