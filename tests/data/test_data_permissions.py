"""Folders of data that the user may not enter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.break_test import drop_capabilities
from halfstep.data.layout import resolve_data_path
from halfstep.errors import BadData

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="root gives its rights up by capset")


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "images"
    (folder / "train").mkdir(parents=True)
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def as_a_user(path: Path) -> Path:
    """Call `resolve_data_path` in a thread without the rights of root; other threads keep theirs."""
    with ThreadPoolExecutor(1, initializer=drop_capabilities) as thread:
        return thread.submit(resolve_data_path, str(path)).result()


@pytest.mark.wording
def test_a_folder_that_the_user_may_not_enter_is_named(closed: Path) -> None:
    for path in (closed, closed / "train"):
        with pytest.raises(BadData, match="Permission denied") as raised:
            as_a_user(path)
        assert str(path) in raised.value.given


def test_files_patterns_and_missing_paths_are_judged_by_who_reads_them(tmp_path: Path) -> None:
    (tmp_path / "one.tar").touch()
    for path in (tmp_path, tmp_path / "one.tar", tmp_path / "*.tar", tmp_path / "nowhere", Path("x" * 300)):
        assert as_a_user(path) == path
