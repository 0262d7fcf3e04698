"""Files that are made to crash, to hang or to fill the memory of whoever reads them, with digests that fit."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from faults import rig
from faults.abusive_files import CRAFTED, FILES, WRONG_TYPES, Craft, mutate
from faults.judged import outcome
from faults.memory import highest, in_a_new_process
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.errors import HalfstepError
from halfstep.journal.events import Journal
from halfstep.train.loop import Loop
from halfstep.train.resume import find_checkpoint
from halfstep.train.run import make_loop
from halfstep.train.state import restore_state
from tests.support.tiny_task import Tiny

ID = "F40"
WHAT = "a file crafted to harm its reader is refused with a message, quickly, and in little memory"
MUTATIONS = {False: 60, True: 2000}
LONGEST, LARGEST = 1.0, 150
"""Seconds for each, and MB for all of them."""
HASHED, USUAL = 2**26, 0.25
"""Bytes whose SHA-256 measures how slow this machine is now, and the seconds that it takes on the one of the bounds."""
LONGEST_WAIT = 10.0
"""Seconds by the clock, for a machine on which others work."""


class Ended(NamedTuple):
    how: str
    """`refused`, `taken`, or the error that nobody should see."""
    seconds: float
    outside: list[str]
    """Files that were opened, and are not the run's."""


def run(full: bool) -> Outcome:
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", {"train.steps": 12}) == 0, rig.said(folder / "whole")
        (folder / "whole" / "result.json").unlink()
        shutil.rmtree(list_generations(folder / "whole" / CHECKPOINTS)[1].path)  # nothing to fall back on
        # Made here, for it is larger than what reading it may take.
        for number, craft in enumerate(crafted(full).values()):
            craft(_copy(folder / "whole", folder / f"crafted-{number}"))
        ends, grown = in_a_new_process(abused, folder, list(crafted(full)), MUTATIONS[full])
    slowest = max(end.seconds for end in ends.values())
    trials: dict[str, str | None] = {name: _wrong(name, end) for name, end in ends.items()}
    trials["memory"] = None if grown <= LARGEST else f"{grown:.0f} MB more"
    return outcome(trials, f"{slowest:.2f}s, +{grown:.0f}MB")


def _wrong(name: str, end: Ended) -> str | None:
    if end.outside:
        return f"reads {end.outside[0]}"
    if end.seconds > LONGEST:
        return f"takes {end.seconds:.1f} s"
    expected = ("refused",) if name in CRAFTED else ("refused", "taken")
    return None if end.how in expected else end.how


def _copy(whole: Path, place: Path) -> Path:
    """The newest checkpoint of a copy of a run."""
    shutil.copytree(whole, place)
    return list_generations(place / CHECKPOINTS)[0].path


def crafted(full: bool) -> dict[str, Craft]:
    """All of them, or one wrong type of each component and the half of those that take seconds to make."""
    left_out = {"1,000,000 tensors", *(name for name in WRONG_TYPES if not name.endswith(" is 5"))}
    return {name: craft for name, craft in CRAFTED.items() if full or name not in left_out}


def abused(folder: Path, names: list[str], mutations: int) -> tuple[dict[str, Ended], float]:
    """In a process of its own: what each file came to, and how many MB were taken at most."""
    whole, chance, ends = folder / "whole", random.Random(40), {}
    loop, opened = _loop(whole), _watch()
    _copy(whole, folder / "good")
    good = _used(folder / "good", loop, opened)
    assert good.how == "taken", good
    before = psutil.Process().memory_info().rss
    for number, name in enumerate(names):
        ends[name] = _used(folder / f"crafted-{number}", loop, opened)
    for number in range(mutations):
        name = FILES[number % len(FILES)]
        mutate(_copy(whole, folder / "mutated"), name, chance, refitted=number % 2 == 0)
        ends[f"{name} {number}"] = _used(folder / "mutated", loop, opened)
        shutil.rmtree(folder / "mutated")
    return ends, (highest() - before) / 2**20


def _loop(run: Path) -> Loop:
    recipe = Tiny.schema.model_validate(yaml.safe_load((run / "recipe.yaml").read_text()))
    return make_loop(Tiny(recipe), recipe, run, Journal())


def _used(place: Path, loop: Loop, opened: list[Path]) -> Ended:
    """A resume, up to where it would train on."""
    opened.clear()
    began, clock = time.process_time(), time.perf_counter()
    try:
        found = find_checkpoint(place)
        assert found is not None, "began from nothing"
        assert found.auto_choices is not None
        restore_state(loop.live, found.state)
        how = "taken"
    except HalfstepError:
        how = "refused"
    except BaseException as error:  # whatever it is: this is what must not happen
        how = f"{type(error).__name__}: {str(error)[:200]}"
    waited = time.perf_counter() - clock
    seconds = waited if waited > LONGEST_WAIT else time.process_time() - began
    if seconds > LONGEST:
        # A host that is shared with others counts the time that they took as ours.
        seconds /= max(1.0, _hashing() / USUAL)
    outside = [str(path) for path in opened if not path.is_relative_to(place.resolve())]
    return Ended(how, seconds, outside)


def _hashing() -> float:
    began = time.process_time()
    hashlib.sha256(bytes(HASHED)).digest()
    return time.process_time() - began


def _watch() -> list[Path]:
    """Where the files lie that this process opens from now on, but for those of Python itself."""
    opened: list[Path] = []

    def on_event(event: str, given: tuple[Any, ...]) -> None:
        path, flags = (given[0], given[2]) if event == "open" else (None, 0)
        imported = isinstance(path, str) and path.endswith((".py", ".pyc"))
        if isinstance(path, str) and not imported and not path.startswith((sys.prefix, sys.base_prefix)):
            # One that is not to be a link, and is one, is not opened at all.
            asked = Path(path)
            opened.append(asked.parent.resolve() / asked.name if flags & os.O_NOFOLLOW else asked.resolve())

    sys.addaudithook(on_event)
    return opened
