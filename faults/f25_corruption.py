"""A file of the newest checkpoint is not what was written."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults import rig
from faults.judged import first_wrong, held, outcome
from faults.outcome import Outcome
from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, list_generations
from halfstep.checkpoint.reading import find_newest_intact, read_rank_state, verify_checkpoint
from halfstep.checkpoint.sealed import MANIFEST, add_seal
from halfstep.journal.jsonl import read_events
from halfstep.train.resume import find_checkpoint
from tests.support.digest import digest_of

ID = "F25"
WHAT = "a checkpoint with one wrong byte is never used: the run reports it and uses the previous one"
EACH = {False: 10, True: 50}
"""Of every kind of damage."""
FOUND, RESUMED = {False: 1, True: 5}, {False: 1, True: 6}
"""Of every kind, those that the search of a resume is done for; and of all of them, those that a run goes on after."""
SETTINGS = {"train.steps": 30}
Damage = Callable[[Path, Path, random.Random], None]
"""Of a file, given the same file of the checkpoint before, too."""


def _truncated(file: Path, older: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])


def _flipped(file: Path, older: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def _zeroed(file: Path, older: Path, chance: random.Random) -> None:
    content = file.read_bytes()
    # A block that holds something: zeros in place of zeros are no damage.
    begin = chance.choice([place for place, byte in enumerate(content) if byte])
    block = content[begin : begin + 512]
    file.write_bytes(content[:begin] + bytes(len(block)) + content[begin + len(block) :])


def _missing(file: Path, older: Path, chance: random.Random) -> None:
    file.unlink()


def _swapped(file: Path, older: Path, chance: random.Random) -> None:
    shutil.copy(older, file)


def _edited(file: Path, older: Path, chance: random.Random) -> None:
    """The manifest, with another size, digest, step or table: by hand, and by somebody who knows of its seal."""
    manifest = file.with_name(MANIFEST)
    content = json.loads(manifest.read_text())
    seal = content.pop("seal")
    name = chance.choice(sorted(content["files"]))
    match chance.randrange(5):
        case 0:
            content["files"][name][1] = chance.randbytes(32).hex()
        case 1:
            content["files"][name][0] += chance.choice([-1, 1, 512])
        case 2:
            content["attempt"] += 1
        case 3:
            content["files"][chance.choice(["../secret.json", "rank-00001.json"])] = content["files"].pop(name)
        case _:
            content["world_size"] = chance.choice([0, 2, 2**52])
    by_hand = json.dumps({**content, "seal": seal}, indent=1, sort_keys=True).encode() + b"\n"
    manifest.write_bytes(chance.choice([by_hand, add_seal(content)]))


KINDS: dict[str, Damage] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "zeroed": _zeroed,
    "missing": _missing,
    "swapped": _swapped,
    "edited": _edited,
}


def run(full: bool) -> Outcome:
    chance = random.Random(25)
    read: dict[str, str | None] = {}
    searched: dict[str, str | None] = {}
    resumed: dict[str, str | None] = {}
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", SETTINGS) == 0, rig.said(folder / "whole")
        whole = rig.ending(folder / "whole")
        (folder / "whole" / "result.json").unlink()  # as if it had been stopped at its last step
        saved = _read(list_generations(folder / "whole" / CHECKPOINTS)[1])
        for kind, damage in KINDS.items():
            for number in range(EACH[full]):
                copy = folder / "copy"
                shutil.copytree(folder / "whole", copy)
                _apply(damage, copy, chance)
                search = number < FOUND[full]
                (searched if search else read)[f"{kind} {number}"] = _seen(copy, saved, search)
                shutil.rmtree(copy)
        for kind in list(KINDS)[: RESUMED[full]]:
            copy = shutil.copytree(folder / "whole", folder / f"resumed-{kind}")
            _apply(KINDS[kind], copy, chance)
            resumed[f"{kind}, resumed"] = _goes_on(copy, whole)
    seen = f"{held(read | searched)} passed over by the reader ({held(searched)} also by a resume's search)"
    return outcome(read | searched | resumed, f"{seen}, {held(resumed)} more by whole runs")


def _apply(damage: Damage, run: Path, chance: random.Random) -> None:
    newest, older = list_generations(run / CHECKPOINTS)
    file = chance.choice(sorted(newest.path.iterdir()))
    damage(file, older.path / file.name, chance)


def _read(generation: CheckpointDir) -> str:
    return digest_of(*read_rank_state(generation, 0))


def _seen(run: Path, saved: str, searched: bool) -> str | None:
    newest, older = list_generations(run / CHECKPOINTS)
    return first_wrong(
        ("it is seen", lambda: verify_checkpoint(newest).problem is not None),
        ("the one before is taken", lambda: _taken(run) == older),
        ("and is what was saved", lambda: _read(older) == saved),
        ("a resume takes it, and says so", lambda: not searched or _found(run, newest, older)),
    )


def _taken(run: Path) -> CheckpointDir | None:
    verdict, damaged = find_newest_intact(run / CHECKPOINTS)
    return verdict.generation if verdict is not None and len(damaged) == 1 else None


def _found(run: Path, newest: CheckpointDir, older: CheckpointDir) -> bool:
    found = find_checkpoint(run)
    return (
        found is not None
        and found.generation == older
        and len(found.passed_over) == 1
        and found.passed_over[0].startswith(newest.name)
        and not newest.path.exists()
    )


def _goes_on(run: Path, whole: rig.Ending) -> str | None:
    return first_wrong(
        ("the run goes on", lambda: rig.run(run, SETTINGS) == 0),
        ("it says what it passed over", lambda: _passed_over(run) == 1),
        ("it is the same run to the bit", lambda: rig.ending(run) == whole),
    )


def _passed_over(run: Path) -> int:
    """The checkpoints of which the last start says so."""
    starts = [event for event in read_events(run / "journal.jsonl") if event["event"] == "start"]
    return len(starts[-1]["resumed"]["rejected_checkpoints"])
