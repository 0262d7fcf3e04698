"""After a rollback a step is saved once more, and that save is cut off anywhere."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from faults import rig
from faults.crash_story import RESUMED, Save, Story, outcome
from faults.f19_crash_points import outcomes
from faults.f20_named_kills import SHORT, killed_and_resumed
from faults.killing import POINTS, KillAt
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.sealed import name_tensors_file

ID = "F27"
WHAT = "saving a step again keeps the first save intact until the second is committed, and never mixes them"


KILLS = {False: 1, True: 20}


def run(full: bool) -> Outcome:
    counts: Counter[str] = Counter()
    for ranks in (1, 2) if full else (1,):
        for tell in (_same_step, _lower_step):
            counts += outcomes(tell, ranks)
    for problem in _kills(KILLS[full]):
        counts[problem or RESUMED] += 1
    return outcome(counts)


def _same_step(story: Story) -> None:
    _two(story)
    for serial in (3, 4):
        story.save(Save(serial, 6))


def _lower_step(story: Story) -> None:
    """The steps of the save before the last, and then on from there."""
    _two(story)
    for serial, attempt in ((3, 3), (4, 6), (5, 9)):
        story.save(Save(serial, attempt))


def _two(story: Story) -> None:
    for serial in (1, 2):
        story.save(Save(serial, 3 * serial))
    story.begin(Save(2, 6))


# -- in real runs -----------------------------------------------------------------------------------------------------


def _kills(times: int) -> list[str]:
    """What went wrong with each, or nothing."""
    chance = random.Random(27)
    with rig.scratch() as folder:
        assert rig.run(folder / "reference", SHORT) == 0, rig.said(folder / "reference")
        reference = rig.ending(folder / "reference")
        return [_saved_again(folder / str(number), chance, reference) for number in range(times)]


def _saved_again(folder: Path, chance: random.Random, reference: rig.Ending) -> str:
    """The newest checkpoint is damaged, so that the run goes back and saves its step again; and is killed in that."""
    rig.run(folder, SHORT, disk=KillAt(POINTS["before the manifest"], chance.randint(3, 8)))
    newest = list_generations(folder / CHECKPOINTS)[0]
    damaged = newest.path / name_tensors_file(0)
    content = bytearray(damaged.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    damaged.write_bytes(content)
    problem = killed_and_resumed(folder, POINTS[chance.choice(list(POINTS))], 1, reference).problem
    return problem and f"{newest.attempt} again: {problem}"
