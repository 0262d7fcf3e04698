"""Processes for loops on several ranks: started once for all loops that want as many."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.loops.harness import Broken
from tests.support.ranks import Ranks

_STARTED: dict[int, Ranks] = {}


def on_ranks(many: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on each rank, and what each returned; raises what any raised."""
    if many not in _STARTED:
        stop_all()  # two worlds at once would only fight over the cores
        _STARTED[many] = Ranks(many)
    try:
        return _STARTED[many](_quiet, function, *arguments)
    except AssertionError as error:  # a traceback of each rank that failed: its last line tells
        told = [block.strip().splitlines()[-1] for block in f"\n{error}".split("\nrank ")[1:]]
        raise Broken(" | ".join(told) or str(error)) from error


def _quiet(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(rank, *arguments)


def stop_all() -> None:
    for ranks in _STARTED.values():
        ranks.stop()
    _STARTED.clear()
