"""Work that every process has a part of, and that ends for all of them where it fails for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from halfstep import world
from halfstep.errors import HalfstepError


def from_everyone(work: Callable[[], Any]) -> list[Any]:
    """What each process's work came to, as plain data; where one was refused, all end with its words."""
    try:
        text = json.dumps({"found": work()})
    except HalfstepError as error:
        world.from_all(json.dumps({"refused": [error.given, error.allowed, error.do], "code": error.exit_code}))
        raise
    told = [json.loads(one) for one in world.from_all(text)]
    for rank, message in enumerate(told):
        if "refused" in message:
            given, allowed, do = message["refused"]
            refused = HalfstepError(f"rank {rank}: {given}", allowed=allowed, do=do)
            refused.exit_code = message["code"]
            raise refused
    return [message["found"] for message in told]


def here() -> tuple[int, int]:
    """This process among those of its machine: its number, and how many there are."""
    if "LOCAL_RANK" not in os.environ:
        return world.rank(), world.size()
    return int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
