"""Orders of shards: how well a set sorted by class is mixed, what is read for it, and how fast.

    python benchmarks/shard_order.py [quality] [reads] [cost] [speed] [--record] [--folder PLACE] [--pairs 60]

quality: z of chi-square of the classes of 200 batches of 1,024 of a set of 20 M samples sorted by 1,000 classes, next
to randperm, WebDataset (its own shuffle, a buffer of 5,000), Grain (its own, where it is installed) and no shuffle.
reads: bytes requested (preads, and announced chunks once per window) for each byte of the samples that are used.
cost: processor time of a sample of 600 bytes with its digest, without decoding.
speed: samples per second next to bare WebDataset on the same shards, decoded, interleaved; for an idle machine.
--record adds the figures to shard_order.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from shard_index import write_set

RESULT = Path(__file__).with_suffix(".json")
SIZE, BATCH, CLASSES, SHARD, BATCHES = 20_000_000, 1024, 1000, 10_000, 200
Figures = dict[str, object]


# -- quality ----------------------------------------------------------------------------------------------------------


def z_of(batch: np.ndarray) -> float:
    """Return chi-square of the classes of a batch as a z value; 0 is perfect."""
    expected, freedom = len(batch) / CLASSES, CLASSES - 1
    chi = ((np.bincount(batch // (SIZE // CLASSES), minlength=CLASSES) - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def quality(place: Path, pairs: int) -> Figures:
    """Return the mean z of each order."""
    from halfstep.data.order import SavedOrder

    picks = np.random.default_rng(0).choice(SIZE // BATCH - 2, BATCHES, replace=False).tolist()
    found: dict[str, list[float]] = {"no shuffle": [z_of(np.arange(k * BATCH, (k + 1) * BATCH)) for k in picks]}
    orders = {"randperm": SavedOrder(), "default (Feistel)": SavedOrder("feistel")}
    for times in (1, 4, 16):
        orders[f"window of {times} x batch chunks of 64"] = SavedOrder("windows", 64, times * BATCH)
    for name, saved in orders.items():
        numbers = saved.of(SIZE, 0, BATCH).numbers(1)
        found[name] = [z_of(numbers[torch.arange(k * BATCH, (k + 1) * BATCH)].numpy()) for k in picks]
    buffered = np.fromiter(_webdataset(BATCHES * BATCH + 10_000), np.int64)[10_000:]
    found["WebDataset, buffer 5,000"] = [z_of(batch) for batch in np.array_split(buffered, BATCHES)]
    try:
        import grain

        shuffled = grain.MapDataset.range(SIZE).shuffle(seed=1)
        found["Grain"] = [z_of(np.array([shuffled[i] for i in range(k * BATCH, (k + 1) * BATCH)])) for k in picks]
    except ImportError as error:
        print(f"Grain is not here: {error}")
    return {
        name: {"mean": round(float(np.mean(z)), 2), "most": round(float(np.max(z)), 2)} for name, z in found.items()
    }


def _webdataset(count: int) -> Iterator[int]:
    """Yield samples as WebDataset orders them: shards shuffled, and its own buffer."""
    import random

    from webdataset.filters import _shuffle

    shards = list(range(SIZE // SHARD))
    random.Random(1).shuffle(shards)
    stream = (number for shard in shards for number in range(shard * SHARD, (shard + 1) * SHARD))
    for at, number in enumerate(_shuffle(stream, bufsize=5000, initial=5000, rng=random.Random(2))):
        if at == count:
            return
        yield number


# -- reads ------------------------------------------------------------------------------------------------------------


def write_images(folder: Path, shards: int, each: int) -> Path:
    """Write shards of JPEGs of about 80 kB."""
    from PIL import Image

    folder.mkdir(parents=True)
    random_ = np.random.default_rng(0)
    images = []
    for _ in range(16):
        file, smooth = io.BytesIO(), random_.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        picture = Image.fromarray(smooth).resize((448, 448), Image.Resampling.BICUBIC)
        noise = random_.integers(-20, 20, (448, 448, 3))
        Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=80)
        images.append(file.getvalue())
    for shard in range(shards):
        with tarfile.open(folder / f"s-{shard:04d}.tar", "w") as archive:
            for number in range(each):
                for kind, content in (("jpg", images[(shard + number) % 16]), ("cls", b"%d" % (shard % 10))):
                    member = tarfile.TarInfo(f"{shard:04d}{number:05d}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return folder


class Contents:
    """The bytes of samples, not decoded."""

    def __init__(self, source: object) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> dict[str, torch.Tensor]:
        return {"size": torch.tensor(len(self.source.content(index).image))}


class Log:
    """Reads of all processes of a node, in a file."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_TRUNC)
        self.announced: set[tuple[str, int, int]] = set()

    def watch(self) -> Callable[[], None]:
        """Note every read and announcement from now on; return what ends it."""
        from halfstep.data import shard_bytes, shards

        read, announce = shard_bytes.read_handle_parts, shards.announce_parts

        def noted_read(handle: int, parts: list[tuple[int, int]]) -> list[bytes]:
            path = os.readlink(f"/proc/self/fd/{handle}")
            first, end = min(start for start, _ in parts), max(start + size for start, size in parts)
            os.write(self._handle, struct.pack("<64sqq", path[-64:].encode(), first, end - first))
            return read(handle, parts)

        def noted(path: Path, parts: list[tuple[int, int]]) -> None:
            self.announced |= {(str(path), start, size) for start, size in parts}
            announce(path, parts)

        shard_bytes.read_handle_parts = shards.read_handle_parts = noted_read
        shards.announce_parts = noted

        def end() -> None:
            shard_bytes.read_handle_parts = shards.read_handle_parts = read
            shards.announce_parts = announce

        return end

    def requested(self) -> tuple[int, int]:
        """Return the bytes that were announced, and those that were read without."""
        known: dict[str, list[tuple[int, int]]] = {}
        for path, start, size in self.announced:
            known.setdefault(path[-64:], []).append((start, start + size))
        alone, content = 0, os.pread(self._handle, os.fstat(self._handle).st_size, 0)
        for name, start, size in struct.iter_unpack("<64sqq", content):
            parts = known.get(name.rstrip(b"\0").decode(), [])
            if not any(first <= start and start + size <= end for first, end in parts):
                alone += size
        return sum(size for _, _, size in self.announced), alone


def reads(place: Path, pairs: int) -> Figures:
    """Return bytes requested for each byte used, for orders, workers and nodes."""
    from torch.utils.data import default_collate

    from halfstep.data.dataset import Samples
    from halfstep.data.loader import TrainLoader
    from halfstep.data.order import SavedOrder
    from halfstep.data.shard_bytes import Announcer
    from halfstep.data.shards import Shards

    source = Shards(write_images(place / "images", 40, 100), verify="all")
    found: Figures = {}
    for name, saved in {"default": SavedOrder("feistel"), "window": SavedOrder("windows", 16, 128)}.items():
        for nodes in (1, 8):
            for workers in (0, 2):
                ratios = []
                for rank in range(0, nodes, 4):
                    samples = Samples(Contents(source), dict, 0)
                    loader = TrainLoader(samples, saved.of(len(source), 0, 64), batch_size=64 // nodes, workers=workers,
                                         collate=default_collate, device="cpu", rank=rank, size=nodes)  # fmt: skip
                    loader.announce = Announcer(lambda chunks: source.announce(chunks, int))
                    log = Log(place / "log")
                    end = log.watch()
                    used = sum(int(batch.tensors["size"].sum()) for [batch] in loader.windows(1))
                    time.sleep(1.0)  # the thread that announces
                    end()
                    ratios.append(sum(log.requested()) / used)
                found[f"{name}, {nodes} nodes, {workers} workers"] = round(max(ratios), 4)
    return found


# -- cost and speed ---------------------------------------------------------------------------------------------------


def cost(place: Path, pairs: int) -> Figures:
    """Return microseconds of processor time for a sample of 600 bytes."""
    from halfstep.data.order import SavedOrder
    from halfstep.data.shards import Shards

    write_set(place / "small", 100_000, 40)
    found: Figures = {}
    for verify in ("off", "sampled", "all"):
        source = Shards(place / "small", verify=verify)
        for name, saved in {"default": SavedOrder("feistel"), "window": SavedOrder("windows", 4096, 8)}.items():
            numbers = saved.of(len(source), 0, 256).numbers(0)[torch.arange(0, 50_000)].tolist()
            best = 1e9
            for _ in range(5):
                begin = time.process_time()
                for first in range(0, len(numbers), 256):  # as a loader does
                    batch = numbers[first : first + 256]
                    for _place in source.prefetch(batch):
                        pass
                    for number in batch:
                        source.content(number)
                best = min(best, time.process_time() - begin)
            found[f"{name}, verify {verify}"] = round(best / len(numbers) * 1e6, 2)
    return found


def speed(place: Path, pairs: int) -> Figures:
    """Return the ratio of samples per second to bare WebDataset, decoded, and WebDataset against itself."""
    import webdataset as wds
    from torch.utils.data import default_collate

    from halfstep.data.dataset import Samples
    from halfstep.data.image_io import read_image
    from halfstep.data.loader import TrainLoader
    from halfstep.data.order import SavedOrder
    from halfstep.data.shards import Shards

    folder = write_images(place / "images", 8, 50)
    source = Shards(folder)
    count = len(source)
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]

    def bare() -> float:
        begin, seen = time.perf_counter(), 0
        data = wds.WebDataset(urls, shardshuffle=len(urls), seed=1, empty_check=False).shuffle(200)
        for sample in data.map(lambda one: {"image": read_image(one["jpg"], 3), "label": int(one["cls"])}).batched(16):
            seen += len(sample) and 16
        return seen / (time.perf_counter() - begin)

    def ours(saved: SavedOrder) -> Callable[[], float]:
        def measured() -> float:
            loader = TrainLoader(Samples(source, dict, 0), saved.of(count, 0, 16), batch_size=16, device="cpu",
                                 collate=default_collate)  # fmt: skip
            begin = time.perf_counter()
            seen = sum(len(batch.ids) for [batch] in loader.windows(0))
            return seen / (time.perf_counter() - begin)

        return measured

    kinds = {"aa": bare, "default": ours(SavedOrder("feistel")), "window": ours(SavedOrder("windows", 16, 16))}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(pairs):
        for name, one in kinds.items():
            if number % 2:
                other, own = bare(), one()
            else:
                own, other = one(), bare()
            ratios[name].append(own / other)
    return {name: round(float(np.median(found)), 3) for name, found in ratios.items()}


PARTS: dict[str, Callable[[Path, int], Figures]] = {"quality": quality, "reads": reads, "cost": cost, "speed": speed}


def main() -> None:
    """Measure, print and record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    options.add_argument("--folder", type=Path)
    options.add_argument("--pairs", type=int, default=60)
    options.add_argument("--record", action="store_true")
    given = options.parse_args()
    found: dict[str, Figures] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in given.parts:
        place = Path(tempfile.mkdtemp(prefix="shard-order-", dir=given.folder))
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        try:
            found[part] = PARTS[part](place, given.pairs)
        finally:
            shutil.rmtree(place)
        print(json.dumps({part: found[part]}, indent=1), flush=True)
    if given.record:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
