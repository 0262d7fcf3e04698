"""Work that every process has a part of, and that ends for all of them where it fails for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from halfstep import world
from halfstep.errors import HalfstepError
from halfstep.train.start import refusal, unless_refused


def from_everyone(work: Callable[[], Any]) -> list[Any]:
    """What each process's work came to, as plain data; where one was refused, all end with its words."""
    try:
        text = json.dumps({"found": work()})
    except HalfstepError as error:
        world.from_all(refusal(error))
        raise
    told = [unless_refused(one, rank) for rank, one in enumerate(world.from_all(text))]
    return [message["found"] for message in told]


def here() -> tuple[int, int]:
    """This process among those of its machine: its number, and how many there are."""
    if "LOCAL_RANK" not in os.environ:
        return world.rank(), world.size()
    return int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
