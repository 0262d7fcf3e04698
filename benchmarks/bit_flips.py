"""Random bits flipped in an index, in caches and in shards: each is found or harmless, and none is trained on.

    python -m benchmarks.bit_flips [--flips 300] [--seed 0] [--record]

A set of tar shards is written, indexed and read. Then, for each kind of file, one random bit of one random file is
flipped at a time, and every sample is read again by a source that has just been opened: from the shards, through the
index, and through the share for validation; latents through their cache. A flip is *found* if a sample is bad, or the
file is refused, named or made anew; *harmless* if every sample has the right values; *trained on* otherwise. Shards are
read with `verify` set to all, sampled and off. With `sampled`, a sample is compared in one of 64 epochs, chosen by its
digest and the seed: the flips in images that are noticed in one epoch are counted over many epochs, and compared with
1/64. Flips that break the decoder or a label are found in any case, and are counted apart.

Chunks of a store need a server: tests/store/test_damaged_cache.py has them. Ends with 1 if a bit is trained on with
`verify: all`, in an index or in a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.sample_digests import encode_image, write_tars
from halfstep.data.dataset import BadSample, split_source
from halfstep.data.shards import Shards, Verify
from halfstep.errors import HalfstepError
from halfstep.tasks.latent_cache.cache import LatentChunks

RECORD = Path(__file__).with_suffix(".json")
SHARDS, EACH = 2, 600
CHANCE = 1 / 64
EPOCHS, MOST_IMAGES = 640, 20
FOUND, HARMLESS, TRAINED = "found", "harmless", "trained on"


def describe(sample: Any) -> tuple[bytes, int]:
    """Return the values of a sample."""
    return sample["image"].numpy().tobytes(), int(sample["label"])


def read_set(root: Path, verify: Verify, numbers: range | list[int]) -> list[tuple[bytes, int] | None]:
    """Return these samples, read by a source that is opened now; None for a bad one."""
    source, found = Shards(root, verify=verify), list[tuple[bytes, int] | None]()
    for number in numbers:
        try:
            found.append(describe(source.read(number)))
        except (BadSample, HalfstepError):
            found.append(None)
    return found


def flip(path: Path, chance: random.Random) -> int:
    """Flip a random bit, with the size and the times of the file restored; return its byte."""
    status, content = path.stat(), bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return at


def judge(work: Callable[[], list[Any]], wanted: list[Any]) -> str:
    """Return what became of a flip."""
    try:
        found = work()
    except HalfstepError:
        return FOUND
    if any(one is None for one in found):
        return FOUND if all(one in (None, right) for one, right in zip(found, wanted, strict=True)) else TRAINED
    return HARMLESS if found == wanted else TRAINED


def flip_files(
    files: list[Path], work: Callable[[], list[Any]], flips: int, chance: random.Random, after: Callable[[], None]
) -> Counter[str]:
    """Flip bits of these files, one at a time, and count what became of them."""
    wanted, counts = work(), Counter[str]()
    kept = {path: path.read_bytes() for path in files}
    for _ in range(flips):
        path = chance.choice(files)
        flip(path, chance)
        counts[judge(work, wanted)] += 1
        for one, content in kept.items():
            with one.open("r+b" if one.exists() else "wb") as file:
                file.write(content)
                file.truncate()
        after()
    return counts


def flip_shards(root: Path, verify: Verify, flips: int, chance: random.Random) -> Counter[str]:
    """Flip bits of shards, next to the sample that they belong to, so that few are read for each."""
    source, counts = Shards(root, verify=verify), Counter[str]()
    rows = [source.index.row(number) for number in range(len(source))]
    wanted = read_set(root, "off", range(len(source)))
    for _ in range(flips):
        shard = chance.randrange(SHARDS)
        path = source.path(shard)
        before = path.read_bytes()
        at = flip(path, chance)
        near = [n for n, row in enumerate(rows) if row.shard == shard and abs(row.image - at) < 8192]
        opened = Shards.__new__(Shards)
        # A copy of a source whose shards have the state of now: the flip is one of the disk, without a new time.
        opened.__dict__.update(
            source.__dict__
            | {"_states": [type(source._states[0]).of(os.stat(source.path(n))) for n in range(SHARDS)], "_ahead": {}}
        )

        def read(number: int) -> Any:
            try:
                return describe(opened.read(number))  # noqa: B023
            except (BadSample, HalfstepError):
                return None

        counts[judge(lambda: [read(n) for n in near], [wanted[n] for n in near])] += 1  # noqa: B023
        path.write_bytes(before)
    return counts


def measure_sampled(root: Path, chance: random.Random) -> dict[str, float | int]:
    """Return how often a flip in an image that can still be decoded is noticed in an epoch with `verify: sampled`."""
    source, noticed, tried = Shards(root, verify="sampled"), 0, 0
    for number in chance.sample(range(len(source)), MOST_IMAGES):
        row = source.index.row(number)
        path = source.path(row.shard)
        with path.open("r+b") as file:
            file.seek(row.image + row.image_size - 1)
            last = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([last[0] ^ 1]))
        source._states[row.shard] = type(source._states[0]).of(path.stat())
        for epoch in range(EPOCHS):
            torch.manual_seed(chance.getrandbits(62) + epoch)
            tried += 1
            try:
                source.read(number)
            except BadSample:
                noticed += 1
        with path.open("r+b") as file:
            file.seek(row.image + row.image_size - 1)
            file.write(last)
        source._states[row.shard] = type(source._states[0]).of(path.stat())
    return {"reads": tried, "noticed": noticed, "share": round(noticed / tried, 5), "stated": round(CHANCE, 5)}


def measure(root: Path, flips: int, seed: int) -> dict[str, Any]:
    """Return the counts of every kind of file."""
    chance, cache = random.Random(seed), root / "cache" / "halfstep"
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    data = write_tars(root / "set", lambda n: {"bmp": encode_image(n, 40), "cls": b"%d" % (n % 7)}, SHARDS, EACH)
    every = range(SHARDS * EACH)
    read_set(data, "all", range(1))
    (index,) = (cache / "shards").glob("*.index")
    counts: dict[str, Any] = {}

    def read_index() -> list[Any]:
        return read_set(data, "off", every)

    counts["index"] = dict(flip_files([index], read_index, flips, chance, lambda: None))

    def read_share() -> list[Any]:
        return [list(side.numbers) for side in split_source(Shards(data), 0.25)]

    read_share()
    (share,) = (cache / "shards").glob("*.val-0.25")
    counts["share for validation"] = dict(flip_files([share], read_share, flips, chance, lambda: None))
    latents = LatentChunks(root / "latents", "0" * 64, 300)
    for chunk in range(len(latents)):
        rows = [torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(n)) for n in latents.numbers(chunk)]
        latents.write(chunk, [None if number == 5 else row for number, row in enumerate(rows)])

    def read_latents() -> list[Any]:
        found: list[Any] = []
        for chunk in range(len(latents)):
            if latents.find_unread(chunk) is None:
                found += [None] * len(latents.numbers(chunk))
                continue
            opened = latents.open(chunk)
            rows = range(len(latents.numbers(chunk)))
            found += [(opened.is_good(row), opened.moments(row).numpy().tobytes()) for row in rows]
        return found

    files = [latents.path(chunk) for chunk in range(len(latents))]
    counts["latents"] = dict(flip_files(files, read_latents, flips, chance, lambda: None))
    for verify in ("all", "sampled", "off"):
        counts[f"shards, verify: {verify}"] = dict(flip_shards(data, verify, flips, chance))
    counts["sampled, in one epoch"] = measure_sampled(data, chance)
    shutil.rmtree(root / "cache")
    return counts


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = measure(Path(folder), given.flips, given.seed)
    for name, found in counts.items():
        print(f"{name}: {', '.join(f'{what} {count}' for what, count in sorted(found.items()))}")
    if given.record:
        RECORD.write_text(json.dumps({"flips": given.flips, "seed": given.seed, **counts}, indent=1) + "\n")
    strict = [name for name in counts if name not in ("shards, verify: sampled", "shards, verify: off")]
    return int(any(counts[name].get(TRAINED, 0) for name in strict))


if __name__ == "__main__":
    sys.exit(main())
