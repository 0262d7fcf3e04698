"""Digests of what a run reads, for every kind of source: order, fingerprint and samples, equal in every version.

    python benchmarks/sample_digests.py [--record]

Sets of each kind are written to a temporary folder with the same bytes on every machine. A digest stands for the
fingerprint of both splits, for the numbers of the batches of several seeds, epochs, ranks and batch sizes, or for the
first samples with their replacements. `--record` writes sample_digests.json; otherwise the digests are compared with
it, and the program ends with 1 where one differs. Packages that are not installed leave their kinds out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from halfstep.data.choose_order import choose_order
from halfstep.data.dataset import RankShare, Samples, Subset, split_source
from halfstep.data.embeddings import EmbeddingSource
from halfstep.data.fingerprint import fingerprint
from halfstep.data.folders import ImageFolder, ImageMaskPairs, ImagePairs, UnlabeledImages
from halfstep.data.layout import select_validation_by_position, select_validation_exactly
from halfstep.data.movi import MoviShards
from halfstep.data.order import SavedOrder
from halfstep.data.parquet_shards import open_shards
from halfstep.data.synthetic.moving_sprites import MovingSprites, ShapeStamps
from halfstep.data.synthetic.radio_maps import RadioMaps
from halfstep.data.synthetic.shapes import ShapeLabels, ShapeMasks, ShapePictures
from halfstep.data.token_files import TokenArray, TokenIndex, TokenWriter
from halfstep.data.token_windows import TokenWindows
from halfstep.data.video import ClipWindows, FrameFolders, VideoFiles, split_recordings

RECORD = Path(__file__).with_suffix(".json")
SEEDS, EPOCHS, SAMPLES = (0, 7), (0, 1, 5), 6
RANKS = ((1, 1, 8), (2, 1, 4), (4, 2, 1), (3, 1, 5))
"""Ranks, micro-batches, and samples of each."""
ORDERS = {
    "drawn": SavedOrder(),
    "feistel": SavedOrder("feistel"),
    "windows of 0.1.0": SavedOrder("windows", 16, 8),
    "windows": SavedOrder("windows", 5, 6, 2),
}
Sides = tuple[Any, Any]
_LARGE = 70_003


def encode_image(number: int, size: int = 12, gray: bool = False) -> bytes:
    """Return a picture as BMP, whose bytes are the same with every version of Pillow."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size) if gray else (size, size, 3), dtype=np.uint8)
    into = io.BytesIO()
    Image.fromarray((pixels > 127).astype(np.uint8) if gray else pixels).save(into, "BMP")
    return into.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar without times and owners."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_tars(root: Path, parts: Callable[[int], dict[str, bytes]], shards: int = 3, each: int = 17) -> Path:
    """Write shards of samples."""
    for shard in range(shards):
        members: dict[str, bytes] = {}
        for number in range(shard * each, (shard + 1) * each):
            members |= {f"{number:05d}.{kind}": content for kind, content in parts(number).items()}
        write_tar(root / f"s-{shard:04d}.tar", members)
    return root


def encode_array(array: Any) -> bytes:
    """Return an array as .npy."""
    into = io.BytesIO()
    np.save(into, array)
    return into.getvalue()


def write_folders(root: Path) -> Path:
    """Write folders of images: by class, with masks, with conditions, and of clips; one image is damaged."""
    for number in range(23):
        write_file(root / "classes" / "abc"[number % 3] / f"{number}.bmp", encode_image(number))
        write_file(root / "pairs" / "images" / f"{number}.bmp", encode_image(number))
        write_file(root / "pairs" / "masks" / f"{number}_mask.bmp", encode_image(number, gray=True))
        write_file(root / "pairs" / "conditions" / f"{number}.bmp", encode_image(number + 50, gray=True))
    write_file(root / "classes" / "a" / "3.bmp", b"damaged")
    for clip in range(5):
        for frame in range(4 + clip):
            write_file(root / "clips" / "images" / f"c{clip}" / f"{frame}.bmp", encode_image(10 * clip + frame))
            write_file(root / "clips" / "masks" / f"c{clip}" / f"{frame}.bmp", encode_image(frame, gray=True))
    return root


def write_tokens(root: Path) -> Path:
    """Write a folder of tokens, in shards of 100."""
    root.mkdir(parents=True)
    splits = {}
    for split, documents in (("train", 9), ("val", 3)):
        writer = TokenWriter(root, split, "uint16", 0, 100, begin=(2,))
        for number in range(documents):
            text = np.random.default_rng(number).integers(3, 300, 40 + number).tolist()
            writer.add(text, len(text))
            writer.end_document(f"{number}.txt")
        splits[split] = writer.close()
    write_file(root / "tokenizer.json", b"{}")
    TokenIndex(2, "uint16", 300, 0, sha256(b"{}").hexdigest(), splits["train"], splits["val"], (2,)).write(root)
    return root


def open_folders(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the sources of folders."""
    folders = write_folders(root / "folders")
    pairs = folders / "pairs"
    yield "folder", split_source(ImageFolder(folders / "classes"), 0.2, select_validation_exactly)
    yield "folder by position", split_source(ImageFolder(folders / "classes"), 0.2, select_validation_by_position)
    yield "images", split_source(UnlabeledImages(pairs), 0.3)
    masks = ImageMaskPairs(pairs / "images", pairs / "masks")
    yield "masks", split_source(masks, 0.2, select_validation_exactly)
    yield "a part of a part", (Subset(Subset(masks, range(2, 20)), [3, 1, 5, 7]), Subset(masks, [0]))
    yield "conditions", split_source(ImagePairs(pairs / "images", pairs / "conditions"), 0.2)
    images = UnlabeledImages(pairs / "images")
    written = {f"{number}.bmp": torch.full((3,), float(number)) for number in range(23)}
    save_file(written, str(root / "embeddings.safetensors"))
    yield "embeddings", split_source(EmbeddingSource(images, root / "embeddings.safetensors"), 0.2)
    clips = ClipWindows(FrameFolders(folders / "clips"), 2)
    yield "clips", split_recordings(clips, 0.3, select_validation_exactly)


def open_tars(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the sources of tar shards."""
    labels = write_tars(root / "labels", lambda n: {"bmp": encode_image(n), "cls": b"%d" % (n % 4)})
    masks = write_tars(root / "masked", lambda n: {"mask.png": encode_image(n, gray=True), "bmp": encode_image(n)})
    plain = write_tars(root / "plain", lambda n: {"bmp": encode_image(n, 2 + n % 9)})
    small = encode_image(0, 1)
    many = write_tars(root / "many", lambda n: {"bmp": small, "cls": b"%d" % (n % 4)}, 2, 700)
    for name, place, verify in (
        ("labels", labels, "all"),
        ("masked", masks, "sampled"),
        ("plain", plain, "off"),
        ("many", many, "sampled"),
    ):
        source = open_shards(place, verify=verify)
        yield f"tar {name}", split_source(source, 0.2, select_validation_exactly)
        yield f"tar {name}, whole", (source, Subset(source, range(0, len(source), 3)))
    pattern = open_shards(f"{labels}/s-{{0001..0002}}.tar", parts=("label",))
    yield "tar pattern", split_source(pattern, 0.25)


def open_others(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the sources of tokens, recordings and drawn samples."""
    tokens = write_tokens(root / "tokens")
    train, val = (TokenWindows(TokenArray(tokens, split), 32) for split in ("train", "val"))
    yield "tokens", (train, val)
    video = {f"{key}.video.npy": encode_array(np.full((4, 6, 6, 3), key, np.uint8)) for key in range(5)}
    things = {f"{key}.segmentations.npy": encode_array(np.full((4, 6, 6, 1), key, np.uint8)) for key in range(5)}
    write_tar(root / "movi" / "movi_e-train-000000.tar", video | things)
    yield "movi", split_recordings(ClipWindows(MoviShards(root / "movi"), 2), 0.4, select_validation_exactly)
    yield "drawn masks", split_source(ShapeMasks(40, 16), 0.2, select_validation_exactly)
    yield "drawn labels", split_source(ShapeLabels(40, 16), 0.2)
    yield "drawn pictures", split_source(ShapePictures(40, 16), 0.2)
    yield "drawn maps", split_source(RadioMaps(20, 16), 0.2)
    yield "drawn clips", split_source(MovingSprites(ShapeStamps(), 20, 16, 3, 2), 0.2)
    yield "drawn, many", split_source(ShapeLabels(_LARGE, 16), 0.05)


def open_parquet(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the sources of Parquet files."""
    import pyarrow as pa
    from pyarrow import parquet

    for part in range(2):
        images = [{"bytes": encode_image(number), "path": None} for number in range(part * 30, part * 30 + 30)]
        (root / "parquet").mkdir(exist_ok=True)
        table = pa.table({"image": images, "label": [number % 5 for number in range(30)]})
        parquet.write_table(table, root / "parquet" / f"train-{part:05d}-of-00002.parquet", row_group_size=8)
    yield "parquet", split_source(open_shards(root / "parquet"), 0.2, select_validation_exactly)


def open_videos(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the sources of video files."""
    import av

    for number in range(3):
        path = root / "videos" / f"{number}.avi"
        path.parent.mkdir(exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width = stream.height = 16
            stream.pix_fmt = "bgr0"
            for frame in range(6):
                pixels = np.random.default_rng(10 * number + frame).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
            container.mux(stream.encode(None))
    yield "videos", split_recordings(ClipWindows(VideoFiles(root / "videos"), 3), 0.4, select_validation_exactly)


WRITTEN_BY_OTHERS = {"parquet": ("pyarrow", open_parquet), "videos": ("av", open_videos)}
"""Kinds whose files other packages write: their bytes differ between versions, and have no digest of a fingerprint."""


def list_cases(root: Path) -> Iterator[tuple[str, Sides]]:
    """Yield the training and validation source of each kind that can be read here."""
    yield from open_folders(root)
    yield from open_tars(root)
    yield from open_others(root)
    for package, cases in WRITTEN_BY_OTHERS.values():
        if find_spec(package) is not None:
            yield from cases(root)


def compute_digest(*parts: object) -> str:
    """Return 16 hex digits of the text of some objects."""
    return sha256("\x1e".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def describe_tensors(sample: Any) -> str:
    """Return the names, types, shapes and bytes of a sample."""
    return " ".join(f"{name} {one.dtype} {one.numpy().tobytes().hex()}" for name, one in sorted(sample.items()))


def digest_orders(source: Any) -> Iterator[tuple[str, str]]:
    """Yield the digest of the first and last steps of each order of a source."""
    for name, saved in ORDERS.items():
        found = []
        for seed in SEEDS:
            for ranks, micro, each in RANKS:
                order = saved.of(len(source), seed, ranks * micro * each)
                for rank in range(ranks):
                    share = RankShare(each, micro, rank, ranks, order.has_lanes)
                    for epoch in EPOCHS:
                        steps = share.steps_per_epoch(len(source))
                        some = {0, *range(max(0, steps - 3), steps)}
                        for step in sorted(some):
                            numbers = share.batches(order.numbers(epoch), step)
                            found.append([next(numbers) for _ in range(micro)])
                        found.append(next(order.openings(epoch, share, 0), []))
        yield f"order {name}", compute_digest(found)


def digest_samples(source: Any, root: Path) -> str:
    """Return the digest of the first samples of two epochs, each with its name and its replacements."""

    def transform(sample: Any) -> Any:
        return {**sample, "drawn": torch.rand(2)}

    samples, found = Samples(source, transform, 3), []
    for epoch in (0, 2):
        for item in samples.__getitems__([(epoch, number) for number in range(min(SAMPLES, len(source)))]):
            assert item.sample is not None, item.error
            replaced = [(one.number, one.name, one.by) for one in item.replaced]
            found.append((item.number, source.name(item.number), replaced, describe_tensors(item.sample)))
    return compute_digest(str(found).replace(f"{root}{os.sep}", ""))


def compute_digests(root: Path) -> dict[str, str]:
    """Return every digest by the name of its case."""
    found: dict[str, str] = {}
    for name, sides in list_cases(root):
        for side, source in zip(("train", "val"), sides, strict=True):
            found[f"{name}: {side}: samples"] = digest_samples(source, root)
        for order, digest in digest_orders(sides[0]):
            found[f"{name}: {order}"] = digest
        if name.startswith("tar"):
            chosen = [choose_order(sides[0], window, 8) for window in ("all", 4)]
            found[f"{name}: choice of an order"] = compute_digest(chosen)
        parts = fingerprint(*sides)
        if name not in WRITTEN_BY_OTHERS:
            found[f"{name}: fingerprint"] = compute_digest(json.dumps(parts.as_dict()))
        else:
            found[f"{name}: names"] = compute_digest([(part.samples, part.order) for part in parts.parts])
    return found


def main() -> int:
    """Record the digests, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        found = compute_digests(Path(folder))
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} digests recorded in {RECORD.name}")
        return 0
    saved = json.loads(RECORD.read_text())
    others = sorted(name for name, digest in found.items() if saved.get(name) != digest)
    print(f"{len(found)} digests, {len(found) - len(others)} equal, {len(set(saved) - set(found))} not computed here")
    print("".join(f"differs: {name}\n" for name in others), end="")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
