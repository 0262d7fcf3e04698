"""The index of shards: built once, sealed, mapped; what it says is what the shards hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from faults.bad_images import encoded, picture
from halfstep.data import held_out
from halfstep.data.dataset import BadSample, Subset, split_source
from halfstep.data.fingerprint import Fingerprint, compute_file_fingerprint, different, fingerprint
from halfstep.data.layout import compute_split_position, select_validation_by_position
from halfstep.data.shard_check import ShardSpotCheck, describe_shard_change
from halfstep.data.shard_index import PAGE, resolve_cached_index_path, resolve_index_path, write_index
from halfstep.data.shards import Shards, build_shard_set
from halfstep.data.tar_members import open_tar
from halfstep.errors import BadData
from halfstep.files import find_cache_folder
from tests.data.fingerprinted import round_trip, shard


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(path: Path, count: int, begin: int = 0, order: list[int] | None = None, **facts: Any) -> Path:
    """A shard of images that are none, in any order of its members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [(f"{n:06d}.{kind}", n) for n in range(begin, begin + count) for kind in ("jpg", "cls")]
    with tarfile.open(path, "w", **facts) as archive:
        for name, n in [members[i] for i in order] if order else members:
            content = b"%d" % (n % 7) if name.endswith("cls") else b"image %d" % n
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def silent(done: int, of: int) -> None: ...


def opened_shards() -> list[str]:
    """Return a list to which every .tar that this process opens from now on is added."""
    found: list[str] = []
    sys.addaudithook(lambda event, given: found.append(given[0]) if event == "open" and _is_tar(given[0]) else None)
    return found


def _is_tar(name: object) -> bool:
    return isinstance(name, str | Path) and str(name).endswith(".tar")


# -- what is in a tar -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(tmp_path: Path, form: int) -> None:
    random_ = random.Random(form)
    names = ["a.png", "Käse/é.jpg", "/abs.png", "d/" * 30 + "x.png", "p" * 60 + "/" + "n" * 90 + ".png", "noname"]
    names += [f"{'f' * random_.randrange(1, 90)}/{n}.jpg" for n in range(60)]
    if form != tarfile.USTAR_FORMAT:
        names += ["long/" * 80 + "z.png", "y" * 200 + ".cls"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for n, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size = n * 37
            archive.addfile(member, io.BytesIO(bytes(n * 37)))
            folder = tarfile.TarInfo(f"folder{n}/")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    with tarfile.open(tmp_path / "a.tar") as archive:
        wanted = [(one.name, one.offset_data, one.size) for one in archive if one.isfile()]
    for at_once in (1024, 4096, 2**22):
        with open_tar(tmp_path / "a.tar", at_once) as tar:
            assert [(os.fsdecode(one.name), one.at, one.size) for one in tar.members()] == wanted


def test_parts_that_lie_apart_are_one_sample(tmp_path: Path) -> None:
    order = list(range(80))
    random.Random(3).shuffle(order)
    Shards(small(tmp_path / "apart" / "s.tar", 40, order=order))
    apart, plain = Shards(tmp_path / "apart"), Shards(small(tmp_path / "plain" / "s.tar", 40))
    keys = [plain.key(n) for n in range(40)]
    assert sorted(apart.key(n) for n in range(40)) == keys
    for n in range(40):
        one, other = apart.index.row(n), plain.index.row(keys.index(apart.key(n)))
        assert (one.label, one.digest, one.image_size) == (other.label, other.digest, other.image_size)
        assert int(apart.without_image(n)["label"]) == one.label


# -- built once -------------------------------------------------------------------------------------------------------


def test_an_index_next_to_the_shards_is_used_and_no_shard_is_opened(tmp_path: Path) -> None:
    for n in range(3):
        small(tmp_path / "set" / f"{n}.tar", 700, n * 700)
    path = resolve_index_path(tmp_path / "set", build_shard_set(tmp_path / "set"))
    write_index(tmp_path / "set", build_shard_set(tmp_path / "set"), silent)
    assert path.name == "halfstep.index"
    assert not list((find_cache_folder() / "shards").glob("*.index"))
    seen = opened_shards()
    source = Shards(tmp_path / "set")
    fingerprint(*split_source(source, 0.1))
    assert (len(source), source.index.path, seen) == (2100, path, [])
    small(tmp_path / "set" / "1.tar", 701, 700)
    assert len(Shards(tmp_path / "set")) == 2101, "its table does not match"


def test_a_pattern_and_a_file_have_indexes_of_their_own(tmp_path: Path) -> None:
    for n in range(2):
        small(tmp_path / f"a-{n}.tar", 5)
    for root in (tmp_path / "a-0.tar", f"{tmp_path}/a-{{0..1}}.tar"):
        index = write_index(root, build_shard_set(root), silent)
        assert index.path == Path(f"{root}.index")
        assert Shards(root).index.path == index.path


def test_ranks_of_a_machine_build_one_index(tmp_path: Path) -> None:
    for n in range(4):
        small(tmp_path / "set" / f"{n}.tar", 50)
    code = (
        "import sys; seen = []\n"
        "sys.addaudithook(lambda e, g: seen.append(g[0]) if e == 'open' and str(g[0]).endswith('.tar') else None)\n"
        "from pathlib import Path\n"
        "from halfstep.data.shard_index import ShardSet, build_index\n"
        f"shards = ShardSet.of(sorted(Path({str(tmp_path / 'set')!r}).glob('*.tar')))\n"
        "print(len(build_index(shards, lambda done, of: None)), len(seen))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(rank.communicate()[0].strip() for rank in ranks)
    assert said == ["200 0", "200 0", "200 4"]


KILLED = """
import os, signal, sys
from pathlib import Path
from halfstep.data import shard_index
left, real = [int(sys.argv[2])], shard_index.scan_shard
def scan(*given):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given)
shard_index.scan_shard, shard_index.MOST_THREADS = scan, 1
shards = shard_index.ShardSet.of(sorted(Path(sys.argv[1]).glob("*.tar")))
shard_index.write_index(sys.argv[1], shards, lambda done, of: None)
"""
"""Without torch, which takes long to import."""


def test_a_killed_scan_continues_where_it_was(tmp_path: Path) -> None:
    for n in range(8):
        small(tmp_path / "set" / f"{n}.tar", 20, n)
    ends = [
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "set"), str(allowed)], check=False).returncode
        for allowed in (3, 3, 2)
    ]
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, 0], "3 + 3 + 2 scans of 8 shards"
    found = (tmp_path / "set" / "halfstep.index").read_bytes()
    os.unlink(tmp_path / "set" / "halfstep.index")
    write_index(tmp_path / "set", build_shard_set(tmp_path / "set"), silent)
    assert (tmp_path / "set" / "halfstep.index").read_bytes() == found
    assert sorted(one.name for one in (tmp_path / "set").iterdir()) == [
        *(f"{n}.tar" for n in range(8)),
        "halfstep.index",
    ]
    assert not list((find_cache_folder() / "shards" / "parts").iterdir())


def test_a_worker_gets_the_index_and_not_its_content(tmp_path: Path) -> None:
    source = Shards(small(tmp_path / "a.tar", 2000))
    content = pickle.dumps(source)
    assert len(content) < 4000
    assert pickle.loads(content).index.row(1234) == source.index.row(1234)


# -- sealed -----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.wording
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    root = small(tmp_path / "a.tar", 3 * PAGE)
    write_index(root, build_shard_set(root), silent)
    path = Path(f"{root}.index")
    whole, rows = path.read_bytes(), 24 * 3 * PAGE
    for at in (17, 17 + 4 * PAGE, 16 + rows + 20, len(whole) - 200, len(whole) - 60, len(whole) - 5, 3):
        flip(path, at)
        try:
            source = Shards(root)
            if source.index.path == path:
                with pytest.raises(BadData, match=r"a\.tar") as caught:
                    [source.index.row(n) for n in range(len(source))]
                assert str(path) in caught.value.do
            else:
                resolve_cached_index_path(
                    build_shard_set(root)
                ).unlink()  # made anew, because the file could not be opened
        finally:
            path.write_bytes(whole)
    assert Shards(root).index.path == path


@pytest.mark.wording
def test_a_page_is_verified_when_it_is_first_used(tmp_path: Path) -> None:
    root = small(tmp_path / "a.tar", 3 * PAGE)
    write_index(root, build_shard_set(root), silent)
    flip(Path(f"{root}.index"), 16 + 4 * PAGE + 40)
    source = Shards(root)
    assert source.index.row(PAGE - 1).image > 0
    with pytest.raises(BadData, match=f"samples {PAGE:,} to {2 * PAGE - 1:,} of"):
        source.index.row(PAGE)


def test_no_object_a_sample(tmp_path: Path) -> None:
    source = Shards(small(tmp_path / "a.tar", 3000))
    held = [value for value in (*vars(source).values(), *vars(source.index).values()) if isinstance(value, list | dict)]
    assert max(map(len, held)) < 10


# -- validation share -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.013, 1e-9, 1 - 1e-9])
def test_a_share_has_the_samples_that_the_names_choose(tmp_path: Path, share: float) -> None:
    for n, count in enumerate((700, 1, 5000, 403)):
        small(tmp_path / "set" / f"{n}.tar", count)
    source = Shards(tmp_path / "set")
    chosen = select_validation_by_position([compute_split_position(source.key(n)) for n in range(len(source))], share)
    for _ in range(2):  # made, and kept
        train, val = split_source(source, share)
        assert list(val.numbers) == sorted(chosen)
        assert list(train.numbers) == sorted(set(range(len(source))) - chosen)
        assert train.numbers[-1] == max(set(range(len(source))) - chosen)
    assert not isinstance(val.numbers, list)


def test_a_share_is_made_once_and_one_that_was_edited_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Shards(small(tmp_path / "a.tar", 2000))
    before = list(split_source(source, 0.25)[1].numbers)
    (kept,) = (find_cache_folder() / "shards").glob("*.val-0.25")
    real = held_out._select_held_out
    monkeypatch.setattr(held_out, "_select_held_out", None)
    assert list(split_source(source, 0.25)[1].numbers) == before
    flip(kept, kept.stat().st_size - 400)
    monkeypatch.setattr(held_out, "_select_held_out", real)
    assert list(split_source(source, 0.25)[1].numbers) == before


# -- fingerprint ------------------------------------------------------------------------------------------------------


def three(folder: Path) -> Path:
    for n in range(3):
        shard(folder / f"s-{n}.tar", range(n * 5, n * 5 + 5))
    return folder


def test_changes_name_the_shards_and_then_the_samples(tmp_path: Path) -> None:
    root = three(tmp_path / "set")
    before = round_trip(fingerprint(*split_source(Shards(root), 0.2)))
    with tarfile.open(root / "s-1.tar", "w") as archive:
        for n in range(5, 10):
            for name, content in (
                (f"{n:04d}.png", encoded(picture(99 if n == 7 else n))),
                (f"{n:04d}.cls", str(n % 3).encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    said = different(before, fingerprint(*split_source(Shards(root), 0.2)))
    assert any("1 shard changed: s-1.tar" in line for line in said)
    assert any(f"1 sample changed in s-1.tar, the first {root}/s-1.tar/0007" in line for line in said)
    (root / "s-1.tar").unlink()
    assert any(
        "1 shard removed: s-1.tar" in line for line in different(before, fingerprint(*split_source(Shards(root), 0.2)))
    )


def test_the_place_of_the_set_and_its_times_do_not_count(tmp_path: Path) -> None:
    root = three(tmp_path / "set")
    before = fingerprint(Shards(root))
    for one in root.glob("*.tar"):
        os.utime(one, (1, 1))
    root.rename(tmp_path / "moved")
    assert different(before, fingerprint(Shards(tmp_path / "moved"))) == []


SAVED = Path(__file__).parent / "fingerprint_before_index.json"
"""What the version before the index saved for `three`, whole and divided."""


def test_a_fingerprint_from_before_the_index_is_accepted(tmp_path: Path) -> None:
    root = three(tmp_path / "set")
    for name, sources in (("whole", [Shards(root)]), ("divided", list(split_source(Shards(root), 0.3)))):
        saved = Fingerprint.from_dict(json.loads(SAVED.read_text())[name])
        assert compute_file_fingerprint(*sources) == saved
        assert different(saved, fingerprint(*sources)) == []
    shard(root / "s-2.tar", range(11, 16))
    assert different(saved, fingerprint(*split_source(Shards(root), 0.3)))


# -- verified ---------------------------------------------------------------------------------------------------------


def replace_unseen(source: Shards, path: Path, content: bytes) -> None:
    """Write another content of the same size, as if the file system noted no times."""
    assert len(content) == path.stat().st_size
    path.write_bytes(content)
    source._states[:] = build_shard_set(path).states


@pytest.mark.wording
def test_a_shard_replaced_after_indexing_is_named_with_its_sample(tmp_path: Path) -> None:
    path = small(tmp_path / "a.tar", 60)
    source = Shards(path)
    assert describe_shard_change(source, 0) == ""
    replace_unseen(source, path, path.read_bytes().replace(b"image 41", b"IMAGE 41"))
    assert describe_shard_change(source, 0) == f"1 sample changed in a.tar, the first {path}/000041"
    check = ShardSpotCheck(source, seed=0)
    check.look()
    check.begin(0)
    assert check._thread is not None
    check._thread.join()
    with pytest.raises(BadData, match=r"1 sample changed in a\.tar"):
        check.look()


def test_the_shards_of_an_epoch_are_divided_among_ranks(tmp_path: Path) -> None:
    for n in range(40):
        small(tmp_path / "set" / f"{n}.tar", 1)
    source = Shards(tmp_path / "set")
    each = [ShardSpotCheck(source, 7, rank, 3).chosen(epoch=2) for rank in range(3)]
    assert len({shard for one in each for shard in one}) == sum(map(len, each)) == 16
    assert ShardSpotCheck(source, 7).chosen(1) != ShardSpotCheck(source, 7).chosen(2)


def test_a_batch_is_read_ahead_and_each_shard_is_opened_once(tmp_path: Path) -> None:
    for n in range(3):
        small(tmp_path / "set" / f"{n}.tar", 700, n * 700)
    source, numbers = Shards(tmp_path / "set", verify="all"), random.Random(1).sample(range(2100), 90)
    wanted = {n: source.content(n) for n in numbers}
    assert source.index.rows(numbers) == [source.index.row(n) for n in numbers]
    seen = opened_shards()
    assert [numbers[place] for place in source.prefetch(numbers)] == sorted(numbers)
    assert {n: source.content(n) for n in numbers} == wanted
    assert len(seen) == 3
    path, bad = tmp_path / "set" / "1.tar", next(n for n in numbers if 700 <= n < 1400)
    replace_unseen(source, path, path.read_bytes().replace(b"image %d\0" % bad, b"IMAGE %d\0" % bad))
    source._states[:] = build_shard_set(tmp_path / "set").states
    assert len(list(source.prefetch(numbers))) == 90
    with pytest.raises(BadSample, match="differ from those indexed"):
        source.content(bad)
    path.unlink()
    list(source.prefetch(numbers))
    for n in numbers:
        if n // 700 == 1:
            with pytest.raises(BadSample, match="No such file"):
                source.content(n)
        else:
            assert source.content(n) == wanted[n]


def test_subsets_of_an_index_have_other_seals(tmp_path: Path) -> None:
    source = Shards(small(tmp_path / "a.tar", 30))
    seals = [fingerprint(Subset(source, numbers)).parts[0] for numbers in ([1, 2, 3], [3, 2, 1], [1, 2])]
    assert len({(one.order, one.samples) for one in seals}) == 3
    assert len({one.digest for one in seals}) == 1
