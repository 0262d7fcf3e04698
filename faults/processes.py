"""The processes that a run has started: whether any of them is left."""

from __future__ import annotations

from contextlib import suppress

import psutil


def family_of(pid: int) -> list[psutil.Process]:
    """All processes that were started by this one, and by those; none where it is gone."""
    with suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def end_all(family: list[psutil.Process]) -> None:
    """Nothing of a trial that went wrong may disturb the next one."""
    for one in filter(lives, family):
        with suppress(psutil.Error):
            one.kill()
