"""Two processes of one job over gloo, for pains that need more than one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tests.support.ranks import Ranks


def run_on_two_ranks(function: Callable[[int], Any]) -> list[Any]:
    """Return the results of `function(rank)` on both ranks, which are started as torchrun starts them."""
    ranks = Ranks(2)
    try:
        return ranks(_run, function, logging.getLogger("halfstep").level)
    finally:
        ranks.stop()


def _run(rank: int, function: Callable[[int], Any], log_level: int) -> Any:
    # A new process has none of the settings of its parent's loggers.
    logging.getLogger("halfstep").setLevel(log_level)
    return function(rank)
