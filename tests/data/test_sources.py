"""A source of one's own: three methods are enough, and wrappers keep names, files and numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.sample_digests import encode_image, write_tars
from halfstep.data.dataset import (
    OwnSource,
    Sample,
    Samples,
    Source,
    Subset,
    WrappedSource,
    complete_source,
    split_source,
)
from halfstep.data.fingerprint import fingerprint
from halfstep.data.indexed import find_shards
from halfstep.data.shards import Shards


class Lines(Source):
    """The lines of a file, as a person would add a kind of data."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, index: int) -> Sample:
        return {"image": torch.tensor(list(self.lines[index].encode())), "label": torch.tensor(index % 3)}

    def name(self, index: int) -> str:
        return f"line {index}"


class Foreign:
    """The same without the base, as tasks of earlier versions may have it, and with a method that is optional."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, Lines(path)

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, index: int) -> Sample:
        return self.lines.read(index)

    def name(self, index: int) -> str:
        return self.lines.name(index)

    def files_of(self, index: int) -> Any:
        return [(self.path.name, self.path)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{number:03d}\n" for number in range(40)))
    return file


def keep(sample: Sample) -> Sample:
    return sample


def test_three_methods_are_a_source(path: Path) -> None:
    source = Lines(path)
    assert source.keys_of([3, 1]) == ["line 3", "line 1"]
    assert (list(source.every_file()), source.has_files, source.notices_changes, source.chosen) == (
        [],
        False,
        False,
        None,
    )
    assert set(source.without_image(4)) == {"label"}
    assert list(source.prefetch([1, 2])) == []
    train, val = split_source(source, 0.25)
    assert sorted([*train.numbers, *val.numbers]) == list(range(40))
    assert [one.of for one in fingerprint(train, val).parts] == ["sample", "sample"]
    read = Samples(train, keep, 0).__getitems__([(0, 0)])[0].sample
    assert read is not None
    assert torch.equal(read["image"], source.read(train.numbers[0])["image"])


def test_a_source_without_one_of_them_is_refused_at_once() -> None:
    class Nameless(Source):
        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> Sample:
            return {}

    with pytest.raises(TypeError, match="name"):
        Nameless()  # type: ignore[abstract]


def test_an_object_of_another_class_is_completed(path: Path) -> None:
    foreign, own = Foreign(path), Lines(path)
    source = complete_source(foreign)
    assert isinstance(source, OwnSource)
    assert complete_source(own) is own
    assert list(source.files_of(3)) == [("lines.txt", path)]
    assert source.has_files
    assert source.key(3) == "line 3"
    sides, others = split_source(foreign, 0.25), split_source(own, 0.25)  # type: ignore[arg-type]
    assert [side.numbers for side in sides] == [side.numbers for side in others]
    (part,) = fingerprint(foreign).parts  # type: ignore[arg-type]
    assert (part.of, part.count) == ("file", 1)
    assert part.order == fingerprint(own).parts[0].order
    sent = pickle.loads(pickle.dumps(source))
    assert (sent.key(2), list(sent.files_of(0))) == ("line 2", [("lines.txt", path)])
    items = Samples(foreign, keep, 0).__getitems__([(0, 5)])  # type: ignore[arg-type]
    assert items[0].sample is not None


def test_wrappers_lead_to_the_samples_below(path: Path, tmp_path: Path) -> None:
    shards = Shards(write_tars(tmp_path / "set", lambda n: {"bmp": encode_image(n), "cls": b"1"}))
    some = WrappedSource(Subset(Subset(shards, range(10, 30)), [4, 2, 9]))
    assert [some.index_in_base(number) for number in range(3)] == [14, 12, 19]
    assert some.base is find_shards(some) is shards
    assert [some.key(number) for number in range(3)] == [shards.key(number) for number in (14, 12, 19)]
    assert some.notices_changes
    assert find_shards(Lines(path)) is None
    orders = {Subset(shards, numbers).chosen for numbers in ([1, 2], [2, 1], [1, 2, 3])}
    assert len(orders | {shards.chosen, some.chosen}) == 5


def test_reading_ahead_changes_no_sample(path: Path, tmp_path: Path) -> None:
    root = write_tars(tmp_path / "set", lambda n: {"bmp": encode_image(n), "cls": b"%d" % (n % 5)})
    source, numbers = Subset(Shards(root, verify="all"), [7, 40, 3, 8]), [2, 0, 3, 1]
    wanted = [source.read(number) for number in numbers]
    assert sorted(source.prefetch(numbers)) == [0, 1, 2, 3]
    for number, sample in zip(numbers, wanted, strict=True):
        found = source.read(number)
        assert json.dumps(sorted(found)) == json.dumps(sorted(sample))
        assert all(torch.equal(found[name], sample[name]) for name in sample)
