"""A save that is cut off after every operation, and in the middle of every write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from faults.crash_story import Save, Story, outcome
from faults.outcome import Outcome
from faults.rig import scratch

ID = "F19"
WHAT = "a save interrupted at any point, by a kill or a power failure, leaves the old checkpoint or the new one"


def run(full: bool) -> Outcome:
    counts: Counter[str] = Counter()
    every = [(tell, ranks) for ranks in (1, 2) for tell in (_first_ones, _later_ones)]
    for tell, ranks in every if full else [(_first_ones, 1), (_later_ones, 2)]:
        counts += outcomes(tell, ranks)
    return outcome(counts)


def outcomes(tell: Callable[[Story], None], ranks: int = 1, keep: int = 2) -> Counter[str]:
    with scratch() as folder:
        (folder / "place").mkdir()
        story = Story(folder / "place", ranks=ranks, keep=keep)
        tell(story)
        return story.outcomes()


def _first_ones(story: Story) -> None:
    """Of a run that has no checkpoint yet, nor the folder for them."""
    story.begin(None)
    story.save(Save(1, 3))
    story.save(Save(2, 6))


def _later_ones(story: Story) -> None:
    """Of a run that has as many as it keeps."""
    for serial in (1, 2):
        story.save(Save(serial, 3 * serial))
    story.begin(Save(2, 6))
    for serial in (3, 4):
        story.save(Save(serial, 3 * serial))
