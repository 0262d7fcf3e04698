"""Old checkpoints are removed, and the removal is cut off anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from faults.crash_story import Save, Story, outcome
from faults.f19_crash_points import outcomes
from faults.outcome import Outcome
from halfstep.checkpoint import commit as protocol
from halfstep.checkpoint.paths import BAD, DRAFT, CheckpointDir, list_generations, remove_unfinished_saves
from halfstep.checkpoint.sealed import MANIFEST, name_tensors_file

ID = "F26"
WHAT = "while old, damaged and unfinished checkpoints are removed, the newest intact one is always present"
STALE = 5


def run(full: bool) -> Outcome:
    counts: Counter[str] = Counter()
    for keep in (2, 3) if full else (2,):
        for tell in (_many_old, _set_aside, _damaged, _nothing_else):
            counts += outcomes(tell, keep=keep)
    return outcome(counts)


def _saved(story: Story, count: int) -> Save:
    """So many checkpoints, none of which is removed; the newest of them."""
    keep, story.keep = story.keep, count
    for serial in range(1, count + 1):
        story.save(Save(serial, 3 * serial))
    story.keep = keep
    return Save(count, 3 * count)


def _many_old(story: Story) -> None:
    """More than are kept, and drafts with all that a save may have got to, older and newer than they are."""
    newest = _saved(story, 5)
    _leave_drafts(story.folder)
    story.begin(newest)
    remove_unfinished_saves(story.folder, story.disk)
    story.save(Save(6, 18))
    story.save(Save(7, 21))


def _set_aside(story: Story) -> None:
    """Newer ones are damaged, as a run finds them that is started again."""
    newest = _saved(story, 3)
    spoilt = _spoil_three(story)
    _leave_drafts(story.folder)
    story.begin(newest)
    for one in spoilt:
        story.disk.rename(one.path, one.path.with_name(one.name + BAD))
    remove_unfinished_saves(story.folder, story.disk)
    story.save(Save(7, 21))
    story.save(Save(8, 24))


def _damaged(story: Story) -> None:
    """Newer ones were damaged while the run goes on, and count for as many as are kept."""
    newest = _saved(story, 3)
    _spoil_three(story)
    story.begin(newest)
    story.save(Save(7, 21))


def _nothing_else(story: Story) -> None:
    """The same, and old ones are removed before anything else is saved."""
    newest = _saved(story, 4)
    _spoil_three(story)
    story.begin(newest)
    protocol.remove_old_generations(story.folder, story.keep, story.disk)


def _spoil_three(story: Story) -> list[CheckpointDir]:
    """Three more saves: one loses its manifest, one a file, and of one a file is cut off."""
    keep, story.keep = story.keep, 100
    for serial in (4, 5, 6):
        story.save(Save(serial, 3 * serial + 1))
    story.keep = keep
    third, second, first = spoilt = list_generations(story.folder)[:3]
    (first.path / MANIFEST).unlink()
    (second.path / name_tensors_file(0)).unlink()
    cut = third.path / name_tensors_file(0)
    cut.write_bytes(cut.read_bytes()[:-1])
    return spoilt


def _leave_drafts(folder: Path) -> None:
    for number, newer in enumerate(range(STALE)):
        draft = folder / f"step-{60 * newer:08d}.{1 + 99 * newer:04x}{DRAFT}"
        draft.mkdir()
        for name in [name_tensors_file(0), MANIFEST, "other"][:number]:
            (draft / name).write_bytes(b"half of a")
