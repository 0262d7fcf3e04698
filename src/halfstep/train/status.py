"""How a process of a run ended, in a file of its own: torchrun makes every exit code a 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep import world
from halfstep.errors import SOFTWARE, TRY_AGAIN, HalfstepError
from halfstep.files import write_json

RESTARTABLE = (TRY_AGAIN,)
"""Exit codes after which the same command goes on with the run."""
INTERRUPTED = 130


def status_file(rank: int) -> str:
    return f"status.rank-{rank:05d}.json"


@contextmanager
def status_kept(folder: Path) -> Iterator[None]:
    """Write down the exit code and the reason of this process."""
    code, reason = 0, "finished"
    try:
        yield
    except BaseException as error:
        code, reason = _code(error), str(error).split("\n")[0] or type(error).__name__
        raise
    finally:
        # A disk that is full must not hide what really happened; a folder that is gone has nothing to say.
        with contextlib.suppress(OSError):
            if folder.is_dir():
                content = {"code": code, "reason": reason, "restartable": code in RESTARTABLE}
                write_json(folder / status_file(world.rank()), content)


def _code(error: BaseException) -> int:
    if isinstance(error, HalfstepError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else SOFTWARE
