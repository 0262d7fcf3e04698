"""A user id without a name and without HOME, and `~` of a user who does not exist: nothing ends in a traceback."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.data.layout import resolve_data_path
from halfstep.errors import BadData, StorageFailed
from halfstep.files import find_cache_folder
from halfstep.precision.hardware import describe_device
from halfstep.precision.probe import Measurements, read_cached_measurements, write_cached_measurements
from tests.support.commands import typed

ELSEWHERE = "~no-such-user/images"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_nothing_is_cached_and_nothing_fails(no_home: None) -> None:
    device = describe_device("cpu")
    found = Measurements({}, {}, seconds=0.0)
    assert write_cached_measurements(device, found) is found
    assert read_cached_measurements(device) is None
    assert not find_cache_folder().exists()


@pytest.mark.wording
def test_without_a_home_a_data_set_has_no_place(no_home: None) -> None:
    from halfstep.data.sets.getting import _replace_storage_errors

    with (
        pytest.raises(StorageFailed, match="XDG_CACHE_HOME"),
        _replace_storage_errors(find_cache_folder() / "data" / "cifar10"),
    ):
        (find_cache_folder() / "data").mkdir(parents=True)


@pytest.mark.wording
def test_the_home_of_an_unknown_user_is_a_path_that_is_not_there() -> None:
    assert resolve_data_path(ELSEWHERE) == Path(ELSEWHERE)
    with pytest.raises(BadData, match="no-such-user"):
        halfstep.load(ELSEWHERE)


@pytest.mark.wording
def test_train_names_the_path_below_an_unknown_home(tmp_path: Path) -> None:
    words = ("train", "classification_tiny", "data.name=folder", f"data.path={ELSEWHERE}", f"run.dir={tmp_path}/run")
    code, _, err = typed(0, *words)
    assert (code, "Traceback" in err) == (65, False)
    assert ELSEWHERE in err
