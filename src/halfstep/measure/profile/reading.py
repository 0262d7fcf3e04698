"""Read batches of a recipe or a case and do nothing else, to be run under cProfile.

python -m cProfile -s cumulative -m halfstep.measure.profile.reading RECIPE|CASE [settings]
"""

from __future__ import annotations

import sys
import time

from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.subject import Subject

BATCHES = 5


def print_read_time(words: list[str]) -> None:
    """Read a few batches in this process and print the mean time; raise `WrongUse` if there is nothing to read."""
    if not words:
        raise WrongUse("nothing to read", allowed="RECIPE or CASE, then settings", do="name one")
    case = Subject(words[0], tuple(words[1:])).open()
    if case.data is None:
        raise WrongUse(
            f"{words[0]} has one batch of tensors and reads nothing",
            allowed="a recipe, or a case that returns a DataLoader",
            do="return (model, loss_fn, loader)",
        )
    data = case.data()
    start = time.perf_counter()
    for _ in range(BATCHES):
        data.read_batch()
    print(f"{(time.perf_counter() - start) / BATCHES * 1000:.3g} ms to read a batch in one process")


if __name__ == "__main__":
    try:
        print_read_time(sys.argv[1:])
    except HalfstepError as error:
        sys.exit(str(error))
