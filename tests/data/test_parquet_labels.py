"""A label column of a Parquet file: integers are class numbers, every other type is refused by its name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.bad_images import encoded, picture
from halfstep.data.parquet_shards import open_shards
from halfstep.errors import BadData
from halfstep.tasks.shared.sources import build_labeled_sources

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
COUNT = 12


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    images = [{"bytes": encoded(picture(n), "PNG"), "path": f"{n}.png"} for n in range(COUNT)]
    pq.write_table(pa.table({"image": images, **columns}), path, row_group_size=5)
    return path


def recipe_data(path: Path) -> Any:
    """The section `data` of a recipe, as far as sources read it."""
    options = {"name": "shards", "path": str(path), "val": 0.25, "split": "exact", "channels": 3, "classes": None}
    return SimpleNamespace(**options, verify="sampled", masks=None)


WORDS, NUMBERS = ["cat", "dog", "cow"] * 4, [n % 3 for n in range(COUNT)]
INTEGERS = {
    "int64": lambda: pa.array(NUMBERS),
    "uint8": lambda: pa.array(NUMBERS, pa.uint8()),
    "category of int64": lambda: pa.array(NUMBERS).dictionary_encode(),
    "category of int8": lambda: pa.array([7, 8, 9] * 4, pa.int8()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_and_categories_of_them_are_class_numbers(kind: str, tmp_path: Path) -> None:
    labels = INTEGERS[kind]()
    path = write(tmp_path / "set" / "a.parquet", label=labels)
    source = open_shards(path)
    assert [int(source.read(n)["label"]) for n in range(COUNT)] == labels.to_pylist()
    sources, names = build_labeled_sources(recipe_data(path))
    assert len(sources["train"]) + len(sources["val"]) == COUNT
    assert len(names) == max(labels.to_pylist()) + 1


OTHERS: dict[str, tuple[Any, str, str]] = {
    "string": (lambda: pa.array(WORDS), "is a string", "cat.codes"),
    "large_string": (lambda: pa.array(WORDS, pa.large_string()), "is a string (large_string)", "cat.codes"),
    "category of strings": (lambda: pa.array(WORDS).dictionary_encode(), "is a category of strings", "cat.codes"),
    "category of large strings": (
        lambda: pa.array(WORDS, pa.large_string()).dictionary_encode(), "is a category of strings", "cat.codes",
    ),
    "category of floats": (
        lambda: pa.array([1.0, 2.0] * 6).dictionary_encode(), "is a float (double)", "int64",
    ),
    "float": (lambda: pa.array(map(float, NUMBERS), pa.float64()), "is a float (double)", "int64"),
    "bool": (lambda: pa.array([True, False] * 6), "is a bool", "int64"),
    "decimal": (
        lambda: pa.array(NUMBERS).cast(pa.decimal128(21, 0)), "is a decimal (decimal128(21, 0))", "int64",
    ),
    "null": (lambda: pa.nulls(COUNT), "is null", "class number"),
    "list": (lambda: pa.array([[n, 0] for n in NUMBERS]), "is a list (list<element: int64>)", "one integer"),
    "date": (lambda: pa.array(NUMBERS, pa.timestamp("us")), "is of type timestamp[us]", "class number"),
    "no number": (lambda: pa.array([-1, None] * 6, pa.int64()), "has no class number in any row", "class number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_label_of_another_type_is_no_label(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "set" / "a.parquet", label=OTHERS[kind][0]())
    assert set(open_shards(path).read(0)) == {"image"}
    with pytest.raises(BadData):
        build_labeled_sources(recipe_data(path))


@pytest.mark.wording
@pytest.mark.parametrize("kind", OTHERS)
def test_a_label_of_another_type_is_refused_by_what_it_is(kind: str, tmp_path: Path) -> None:
    build, words, remedy = OTHERS[kind]
    path = write(tmp_path / "set" / "a.parquet", label=build())
    with pytest.raises(BadData) as caught:
        build_labeled_sources(recipe_data(path))
    assert f"has no label: its column label {words}" in f"{caught.value.given} "
    assert caught.value.allowed == "a column label, labels or fine_label of integers: class numbers from 0"
    assert remedy in caught.value.do


@pytest.mark.wording
def test_a_file_without_a_label_column_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught:
        build_labeled_sources(recipe_data(write(tmp_path / "set" / "a.parquet", text=WORDS)))
    assert caught.value.given.endswith("has no label")


def test_a_usable_column_after_an_unusable_one_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "set" / "a.parquet", label=WORDS, fine_label=NUMBERS)
    assert [int(open_shards(path).read(n)["label"]) for n in range(3)] == NUMBERS[:3]


@pytest.mark.wording
def test_files_that_differ_name_the_column_that_is_no_label(tmp_path: Path) -> None:
    write(tmp_path / "set" / "a.parquet", label=NUMBERS)
    write(tmp_path / "set" / "b.parquet", label=[None, *map(float, NUMBERS[1:])])  # as pandas writes a missing integer
    with pytest.raises(BadData) as caught:
        open_shards(tmp_path / "set")
    assert "differ in having a label or a mask" in caught.value.given
    assert "b.parquet: its column label is a float (double)" in caught.value.given


@pytest.mark.wording
def test_a_mask_that_is_no_image_is_refused_by_what_it_is(tmp_path: Path) -> None:
    from halfstep.tasks.shared.sources import build_masked_sources

    path = write(tmp_path / "set" / "a.parquet", label=NUMBERS, mask=[f"{n}.png" for n in range(COUNT)])
    data = recipe_data(path)
    data.classes, data.ignore_index, data.palette = 2, None, None
    with pytest.raises(BadData) as caught:
        build_masked_sources(data)
    assert "has no mask: its column mask is a string" in caught.value.given


def test_categories_of_bytes_are_images(tmp_path: Path) -> None:
    content = [encoded(picture(n), "PNG") for n in range(4)]
    pq.write_table(pa.table({"image": pa.array(content).dictionary_encode()}), tmp_path / "a.parquet")
    assert len(open_shards(tmp_path / "a.parquet")) == 4
    assert set(open_shards(tmp_path / "a.parquet").read(3)) == {"image"}
