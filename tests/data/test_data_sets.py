"""`halfstep data get` without a download: what it writes and checks, and what it says when something is missing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from halfstep.cli import main
from halfstep.data.sets import aerial_buildings, packages
from halfstep.data.sets import getting as command
from halfstep.data.sets.packages import DownloadFailed, Npm
from halfstep.data.shards import Shards
from halfstep.errors import BadData, UnknownName, Unsafe
from halfstep.files import cache_folder


def test_every_set_says_what_it_is() -> None:
    sets = command.known_sets()
    assert set(sets) >= {"cifar10", "fashion_mnist", "aerial_buildings", "groceries"}
    for module in sets.values():
        assert len(module.PACKAGE.sha256) == 64
        assert sum(module.COUNTS.values()) > 500
        assert len(module.ABOUT) < 100


def test_shards_are_the_same_bytes_each_time_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PER_SHARD", 4)
    images = np.random.default_rng(0).integers(0, 256, (10, 6, 6, 3), np.uint8)
    done: list[int] = []
    for name in ("a", "b"):
        packages.write_shards(tmp_path / name, zip(images, range(10), strict=True), done.append)
    assert [p.read_bytes() for p in sorted((tmp_path / "a").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "b").iterdir())
    ]
    source = Shards(tmp_path / "a")
    assert len(source.paths) == 3
    assert sum(done) == 20
    for n in range(10):
        assert np.array_equal(source.read(n)["image"].permute(1, 2, 0).numpy(), images[n])
        assert source.read(n)["label"] == n


POINTS = {(12, 12): 255, (20, 20): 0, (32.5, 20): 255, (31.2, 20): 0, (7, 8): 0}


def test_masks_of_buildings_have_every_neighbour_and_no_courtyard() -> None:
    ours = aerial_buildings._rings("POLYGON ((10 10, 30 10, 30 30, 10 30, 10 10), (18 18, 22 18, 22 22, 18 22, 18 18))")
    neighbour = aerial_buildings._rings("POLYGON ((32 10, 40 10, 40 3e1, 32 30, 32 10))")
    row = {"min_col": "5", "min_row": "6", "scale_w": "8", "scale_h": "7"}
    mask = np.array(aerial_buildings.crop_mask([ours, neighbour], row))
    at = {(x, y): int(mask[int((y - 6) * 7), int((x - 5) * 8)]) for x, y in POINTS}
    assert at == POINTS
    assert set(np.unique(mask)) == {0, 255}


@pytest.mark.wording
def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda tool: None)
    with pytest.raises(DownloadFailed, match="install npm first"):
        Npm("a", "1", "0" * 64).fetch(tmp_path)


def arriving(content: bytes) -> Any:
    def run(command: list[str], cwd: Path, **options: Any) -> Any:
        (cwd / "package.tgz").write_bytes(content)
        return SimpleNamespace(returncode=0, stderr="", stdout="")

    return run


@pytest.mark.wording
def test_another_file_than_the_one_asked_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.subprocess, "run", arriving(b"something else"))
    monkeypatch.setattr(packages.shutil, "which", str)
    with pytest.raises(Unsafe, match="not the file that was asked for"):
        Npm("a", "1", "0" * 64).fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    right = hashlib.sha256(b"something else").hexdigest()
    assert Npm("a", "1", right).fetch(tmp_path).name == "package.tgz"


def test_a_package_that_arrived_before_is_not_got_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.shutil, "which", lambda tool: None)
    (tmp_path / "half").write_bytes(b"some")
    with pytest.raises(DownloadFailed):
        Npm("a", "1", "0" * 64).fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "whole").write_bytes(b"something else")
    assert Npm("a", "1", hashlib.sha256(b"something else").hexdigest()).fetch(tmp_path) == tmp_path / "whole"


def a_set(counts: dict[str, int], made: dict[str, int], fails: bool = False) -> Any:
    def make(archive: Path, into: Path, bar: Any) -> None:
        (into / "part").write_text("half")
        if fails:
            raise KeyboardInterrupt
        bar(3)

    package = SimpleNamespace(tool="npm", name="x", sha256="0" * 64, fetch=lambda folder: folder / "x")
    return SimpleNamespace(ABOUT="x", PACKAGE=package, COUNTS=counts, make=make, count=lambda folder: made)


@pytest.mark.parametrize(("fails", "error"), [(True, KeyboardInterrupt), (False, BadData)])
def test_nothing_is_kept_of_a_set_that_was_not_finished(
    fails: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "known_sets", lambda: {"s": a_set({"train": 3}, {"train": 2}, fails)})
    with pytest.raises(error):
        command.get("s")
    assert [path.name for path in (cache_folder() / "data").iterdir()] == [command.DOWNLOADS]


def test_a_set_that_is_there_is_counted_and_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = a_set({"train": 3, "val": 1}, {"train": 3, "val": 1})
    monkeypatch.setattr(command, "known_sets", lambda: {"s": ours})
    assert not command.is_here("s")
    folder, counts = command.get("s")
    assert (folder, counts) == (cache_folder() / "data" / "s", {"train": 3, "val": 1})
    assert not list((cache_folder() / "data" / command.DOWNLOADS).iterdir())
    ours.make = None
    assert command.get("s") == (folder, counts)


@pytest.mark.wording
def test_a_set_that_is_not_known_is_told_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'cifar10'"):
        command.get("cifar_10")


def test_the_command_lists_them() -> None:
    done = CliRunner().invoke(main.build(), ["data", "--json"])
    assert {one["name"] for one in json.loads(done.output)["sets"]} >= {"cifar10", "aerial_buildings"}
    assert "halfstep data get NAME" in CliRunner().invoke(main.build(), ["data"]).output
