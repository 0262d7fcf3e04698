"""`halfstep data get` against a local server: archives of the published layouts, and those that are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import socket
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from benchmarks.sets import aerial_buildings
from benchmarks.sets.__main__ import SETS
from halfstep.cli import main
from halfstep.data.folders import ImageFolder, ImageMaskPairs
from halfstep.data.sets import NAMES, cifar10, downloads, fashion_mnist, getting, oxford_pets
from halfstep.data.sets.downloads import DownloadFailed, RemoteFile
from halfstep.data.shards import Shards
from halfstep.errors import BadData, StorageFailed, UnknownName, Unsafe
from halfstep.files import find_cache_folder

RANDOM = np.random.default_rng(0)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


class Mirror:
    """A folder that a local server hands out."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address

    def put(self, name: str, content: bytes) -> RemoteFile:
        (self.folder / name).write_bytes(content)
        return RemoteFile(f"{self.address}/{name}", len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "mirror"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Mirror(folder, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def tar(members: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:gz") as archive:
        for member in extra:
            archive.addfile(member)
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return into.getvalue()


def link(name: str, to: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, to
    return member


def picture(array: Any, kind: str) -> bytes:
    into = io.BytesIO()
    Image.fromarray(array).save(into, kind)
    return into.getvalue()


def cifar_files() -> tuple[dict[str, bytes], Any, list[int]]:
    images = RANDOM.integers(0, 256, (12, 32, 32, 3), np.uint8)
    labels = [9, 0, 3, 1, 2, 4, 5, 6, 7, 8, 9, 9]
    records = [bytes([label]) + image.transpose(2, 0, 1).tobytes() for image, label in zip(images, labels, strict=True)]
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    files = {f"cifar-10-batches-bin/{name}": b"".join(records[2 * n : 2 * n + 2]) for n, name in enumerate(names)}
    return {"cifar-10-batches-bin/readme.html": b"<html>", **files}, images, labels


@pytest.fixture
def cifar(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Publish an archive as the known one."""
    monkeypatch.setattr(cifar10, "COUNTS", {"train": 10, "val": 2})

    def publish(archive: bytes) -> None:
        monkeypatch.setattr(cifar10, "ARCHIVE", mirror.put("cifar-10-binary.tar.gz", archive))

    return publish


def test_cifar10_is_read_from_its_binary_archive(cifar: Callable[[bytes], None]) -> None:
    files, images, labels = cifar_files()
    cifar(tar(files))
    folder, counts = getting.fetch_dataset("cifar10")
    assert (folder, counts) == (find_cache_folder() / "data" / "cifar10", {"train": 10, "val": 2})
    read = [source.read(n) for source in (Shards(folder / "train"), Shards(folder / "val")) for n in range(len(source))]
    assert [int(sample["label"]) for sample in read] == labels
    assert np.array_equal(np.stack([sample["image"].permute(1, 2, 0).numpy() for sample in read]), images)
    assert (folder / "classes.txt").read_text().split()[9] == "truck"
    assert not list((folder.parent / getting.DOWNLOADS).iterdir())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda files: tar({**files, "cifar-10-batches-bin/test_batch.bin": b"\x0a" + bytes(3072)}), DownloadFailed),
        (lambda files: tar({**files, "cifar-10-batches-bin/test_batch.bin": b"\x01" + bytes(3000)}), DownloadFailed),
        (lambda files: tar({**files, "cifar-10-batches-bin/test_batch.bin": bytes(3073 * 10_001)}), Unsafe),
        (lambda files: tar(dict(list(files.items())[:-1])), DownloadFailed),
        (lambda files: tar(files, link("cifar-10-batches-bin/test_batch.bin", "/etc/passwd")), Unsafe),
        (lambda files: tar(files)[:-50], DownloadFailed),
        (lambda files: b"\x80\x04]", DownloadFailed),
    ],
    ids=["class 10", "half a record", "too large", "a file less", "a link", "cut short", "a pickle"],
)
def test_an_archive_with_other_content_leaves_nothing(
    cifar: Callable[[bytes], None], change: Callable[[dict[str, bytes]], bytes], error: type[Exception]
) -> None:
    cifar(change(cifar_files()[0]))
    with pytest.raises(error):
        getting.fetch_dataset("cifar10")
    assert [path.name for path in (find_cache_folder() / "data").iterdir()] == [getting.DOWNLOADS]


def test_members_that_lead_elsewhere_are_not_written(tmp_path: Path, cifar: Callable[[bytes], None]) -> None:
    files = cifar_files()[0]
    outside = tmp_path / "outside"
    cifar(tar({**files, "../../../../outside": b"x", str(outside): b"x"}, link("cifar-10-batches-bin", "/")))
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    folder, _ = getting.fetch_dataset("cifar10")
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert sorted(path.name for path in folder.iterdir()) == ["classes.txt", "train", "val"]


def test_fashion_mnist_is_read_by_torchvision(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "COUNTS", {"train": 3, "val": 2})
    images = RANDOM.integers(0, 256, (5, 28, 28), np.uint8)
    files = []
    for name, part in (("train", slice(0, 3)), ("t10k", slice(3, 5))):
        some = images[part]
        idx = struct.pack(">IIII", 0x803, len(some), 28, 28) + some.tobytes()
        files.append(mirror.put(f"{name}-images-idx3-ubyte.gz", gzip.compress(idx)))
        labels = struct.pack(">II", 0x801, len(some)) + bytes(range(10)[part])
        files.append(mirror.put(f"{name}-labels-idx1-ubyte.gz", gzip.compress(labels)))
    monkeypatch.setattr(fashion_mnist, "FILES", tuple(files))
    folder, counts = getting.fetch_dataset("fashion_mnist")
    assert counts == {"train": 3, "val": 2}
    val = Shards(folder / "val", channels=1)
    assert [int(val.read(n)["label"]) for n in range(2)] == [3, 4]
    assert np.array_equal(val.read(1)["image"][0].numpy(), images[4])


PETS = {"trainval": ["Abyssinian_1", "great_dane_2", "great_dane_3"], "test": ["Abyssinian_4", "great_dane_5"]}


def publish_pets(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, lists: dict[str, list[str]] = PETS) -> None:
    names = [name for listed in PETS.values() for name in listed]
    photographs = {f"images/{name}.jpg": picture(np.full((6, 8, 3), 9, np.uint8), "JPEG") for name in names}
    trimap = np.array([[1, 2, 3, 1, 2, 3, 2, 2]] * 6, np.uint8)
    marks = {f"annotations/trimaps/{name}.png": picture(trimap, "PNG") for name in names}
    texts = {
        f"annotations/{split}.txt": "".join(f"{n} {1 + ('dane' in n)} 1 1\n" for n in listed).encode()
        for split, listed in lists.items()
    }
    junk = {
        "annotations/trimaps/._Abyssinian_1.png": b"Mac OS",
        "images/Abyssinian_1.mat": b"",
        "images/no_99.jpg": b"",
    }
    monkeypatch.setattr(oxford_pets, "IMAGES", mirror.put("images.tar.gz", tar({**photographs, **junk})))
    monkeypatch.setattr(oxford_pets, "ANNOTATIONS", mirror.put("annotations.tar.gz", tar({**marks, **texts, **junk})))
    counts = {
        f"{layout}/{s}": n for layout in ("segmentation", "classification") for s, n in (("train", 3), ("val", 2))
    }
    monkeypatch.setattr(oxford_pets, "COUNTS", counts)


def test_oxford_pets_has_masks_and_a_folder_per_breed(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_pets(mirror, monkeypatch)
    folder, _ = getting.fetch_dataset("oxford_pets")
    train = folder / "segmentation" / "train"
    pairs = ImageMaskPairs(train / "images", train / "masks", classes=3)
    assert pairs.read(0)["mask"][0].tolist() == [1, 0, 2, 1, 0, 2, 0, 0]
    breeds = ImageFolder(folder / "classification" / "val")
    assert breeds.classes == ["Abyssinian", "Great Dane"]
    assert [int(breeds.read(n)["label"]) for n in range(2)] == [0, 1]
    # Both layouts share the photographs.
    photograph = folder / "classification" / "train" / "Great Dane" / "great_dane_2.jpg"
    assert photograph.samefile(train / "images" / "great_dane_2.jpg")


@pytest.mark.parametrize("name", ["../../../../x_1", "Abyssinian_77", "..", "a b c"])
@pytest.mark.wording
def test_a_list_that_names_other_files_is_refused(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    publish_pets(mirror, monkeypatch, {**PETS, "test": ["Abyssinian_4", name]})
    with pytest.raises(DownloadFailed, match="annotations"):
        getting.fetch_dataset("oxford_pets")
    assert not getting.is_set_cached("oxford_pets")


def fetch(file: RemoteFile, folder: Path) -> Path:
    return file.fetch(folder, lambda done, total: None)


@pytest.mark.wording
def test_another_file_than_the_known_one_is_refused(mirror: Mirror, tmp_path: Path) -> None:
    known = mirror.put("a", b"something")
    for other in (b"somewhere", b"something longer"):
        mirror.put("a", other)
        with pytest.raises(Unsafe, match="is not the expected file"):
            fetch(known, tmp_path)
        assert not list(tmp_path.glob("a*"))
    mirror.put("a", b"something")
    assert fetch(known, tmp_path).read_bytes() == b"something"


@pytest.mark.wording
def test_a_download_that_breaks_off_is_done_again(mirror: Mirror, tmp_path: Path) -> None:
    known = mirror.put("a", b"something")
    mirror.put("a", b"some")
    with pytest.raises(DownloadFailed, match="after 4 of 9 bytes"):
        fetch(known, tmp_path)
    assert not (tmp_path / "a").exists()
    mirror.put("a", b"something")
    assert fetch(known, tmp_path).read_bytes() == b"something"
    (mirror.folder / "a").unlink()
    assert fetch(known, tmp_path) == tmp_path / "a", "what is complete is not downloaded again"


@pytest.mark.wording
def test_a_server_that_cannot_be_used_is_named(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = {
            f"{mirror.address}/nothing": "HTTP Error 404",
            "http://127.0.0.1:9/a": "refused",
            f"http://127.0.0.1:{silent.getsockname()[1]}/a": "timed out",
        }
        for url, reason in addresses.items():
            with pytest.raises(DownloadFailed, match=reason) as failed:
                fetch(RemoteFile(url, 9, "0" * 64), tmp_path)
            assert url in failed.value.given


def a_set(counts: dict[str, int], found: dict[str, int], failure: BaseException | None = None) -> Any:
    def make(archives: Path, into: Path, on_sample: Callable[[], None]) -> None:
        (into / "part").write_text("half")
        if failure:
            raise failure
        on_sample()

    return SimpleNamespace(
        ABOUT="x", COUNTS=counts, fetch=lambda folder, on_progress: None, make=make, count=lambda folder: found
    )


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (None, BadData),
        (OSError(28, "No space left on device"), StorageFailed),
    ],
)
def test_nothing_is_kept_of_a_set_that_was_not_finished(
    failure: BaseException | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(error):
        getting.fetch_dataset("s", {"s": a_set({"train": 3}, {"train": 2}, failure)})
    assert [path.name for path in (find_cache_folder() / "data").iterdir()] == [getting.DOWNLOADS]


def test_a_set_that_is_there_is_counted_and_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = a_set({"train": 3, "val": 1}, {"train": 3, "val": 1})
    assert not getting.is_set_cached("s")
    folder, counts = getting.fetch_dataset("s", {"s": ours})
    assert (folder, counts) == (find_cache_folder() / "data" / "s", {"train": 3, "val": 1})
    ours.make = ours.fetch = None
    assert getting.fetch_dataset("s", {"s": ours}) == (folder, counts)


def test_shards_are_the_same_bytes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PER_SHARD", 4)
    images = RANDOM.integers(0, 256, (10, 6, 6, 3), np.uint8)
    for name in ("a", "b"):
        downloads.write_shards(tmp_path / name, zip(images, range(10), strict=True), lambda: None)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len(first) == 3


POINTS = {(12, 12): 255, (20, 20): 0, (32.5, 20): 255, (31.2, 20): 0, (7, 8): 0}


def test_masks_of_buildings_have_every_neighbour_and_no_courtyard() -> None:
    ours = aerial_buildings._rings("POLYGON ((10 10, 30 10, 30 30, 10 30, 10 10), (18 18, 22 18, 22 22, 18 22, 18 18))")
    neighbour = aerial_buildings._rings("POLYGON ((32 10, 40 10, 40 3e1, 32 30, 32 10))")
    row = {"min_col": "5", "min_row": "6", "scale_w": "8", "scale_h": "7"}
    mask = np.array(aerial_buildings.crop_mask([ours, neighbour], row))
    at = {(x, y): int(mask[int((y - 6) * 7), int((x - 5) * 8)]) for x, y in POINTS}
    assert at == POINTS
    assert set(np.unique(mask)) == {0, 255}


@pytest.mark.parametrize("module", [*getting.import_known_sets().values(), *SETS.values()])
def test_every_set_has_what_a_set_needs(module: ModuleType) -> None:
    assert sum(module.COUNTS.values()) > 0
    assert len(module.ABOUT) < 100
    assert callable(module.fetch)
    assert callable(module.make)


@pytest.mark.wording
def test_a_set_that_is_not_known_is_told_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cifar10'"):
        getting.fetch_dataset("cifar_10")


def test_the_command_lists_them() -> None:
    done = CliRunner().invoke(main.build(), ["data", "--json"])
    assert [one["name"] for one in json.loads(done.output)["sets"]] == list(NAMES)
    assert "halfstep data get NAME" in CliRunner().invoke(main.build(), ["data"]).output
