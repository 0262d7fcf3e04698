"""One file of two thousand is another one when the run goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from faults.bad_images import encoded, picture
from faults.outcome import Outcome
from halfstep.train.data.changes import different
from halfstep.train.data.fingerprint import Fingerprint, fingerprint
from halfstep.train.data.folders import ImageFolder
from halfstep.train.data.split import split

ID = "F10"
WHAT = "data that changed is noticed, whatever changed; data that was moved, copied or touched is the same"
FILES, CLASSES = 2000, ("cat", "dog", "owl")
UNCHANGED = 20
Change = Callable[[Path], None]


def run(full: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        _write(root)
        kept = saved(root)
        wrong = [name for name, change in CHANGES.items() if not _refused_after(change, kept, root)]
        wrong += [name for name, place in _unchanged(root) if refused(kept, place)]
    n = len(CHANGES) + UNCHANGED
    return Outcome(n - len(wrong), n, f"wrong: {', '.join(sorted(set(wrong)))}" if wrong else "none")


def saved(root: Path) -> str:
    """What a run on this data keeps of it."""
    return json.dumps(fingerprint(*split(ImageFolder(root), 0.2)).as_dict())


def refused(kept: str, root: Path) -> bool:
    """Whether a run that kept this does not go on with the data at `root`."""
    now = fingerprint(*split(ImageFolder(root), 0.2))
    return bool(different(Fingerprint.from_dict(json.loads(kept)), now))


def _write(root: Path) -> None:
    for number in range(FILES):
        path = root / CLASSES[number % len(CLASSES)] / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))


def _add(file: Path) -> None:
    file.with_name("new.png").write_bytes(encoded(picture(FILES)))


def _edit(file: Path) -> None:
    """One bit; the size and the time stay."""
    content, status = bytearray(file.read_bytes()), file.stat()
    content[-30] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _rename(file: Path) -> None:
    file.rename(file.with_name("renamed.png"))


CHANGES: dict[str, Change] = {
    "added": _add,
    "removed": Path.unlink,
    "edited, same size": _edit,
    "edited, other size": _lengthen,
    "renamed": _rename,
}


def _refused_after(change: Change, kept: str, root: Path) -> bool:
    """And undone: the next change finds the data as it was."""
    file = root / "dog" / "00700.png"
    content, status, others = file.read_bytes(), file.stat(), set(file.parent.iterdir())
    change(file)
    found = refused(kept, root)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for new in set(file.parent.iterdir()) - others:
        new.unlink()
    return found


def _unchanged(root: Path) -> Iterator[tuple[str, Path]]:
    """The same data, `UNCHANGED` times: as it is, touched, moved, and copied in another order."""
    place = root
    for number in range(UNCHANGED // 4):
        yield "opened again", place
        for file in place.rglob("*.png"):
            os.utime(file, (number, number))
        yield "touched", place
        place = place.rename(root.with_name(f"moved {number}"))
        yield "moved", place
        copy = root.with_name(f"copied {number}")
        _copy_shuffled(place, copy, number)
        yield "copied", copy
        shutil.rmtree(copy)


def _copy_shuffled(source: Path, target: Path, seed: int) -> None:
    """Many disks list files in the order in which they were made."""
    files = sorted(source.rglob("*.png"))
    random.Random(seed).shuffle(files)
    for file in files:
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes())
