"""A fingerprint with a checkpoint: small, and read back strictly."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from halfstep.data import fingerprint as module
from halfstep.data.fingerprint import Fingerprint, different, fingerprint
from halfstep.errors import StateMismatch
from tests.data.fingerprinted import Many, only, round_trip


def _edited(saved: Any, *path: Any, value: Any) -> Any:
    changed = copy.deepcopy(saved)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


@pytest.mark.wording
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("version",), True),
        (("extra",), 1),
        (("parts",), None),
        (("parts", 0), []),
        (("parts", 0, "extra"), 1),
        (("parts", 0, "samples"), -1),
        (("parts", 0, "samples"), 2.0),
        (("parts", 0, "samples"), True),
        (("parts", 0, "count"), 2),
        (("parts", 0, "size"), float("nan")),
        (("parts", 0, "size"), 7),
        (("parts", 0, "whole"), 1),
        (("parts", 0, "of"), "files"),
        (("parts", 0, "of"), []),
        (("parts", 0, "order"), "x" * 16),
        (("parts", 0, "digest"), "0" * 16),
        (("parts", 0, "digest"), None),
        (("parts", 0, "rows"), None),
        (("parts", 0, "rows"), "rows"),
        (("parts", 0, "rows", 0), 5),
        (("parts", 0, "rows", 0), "- 3"),
        (("parts", 0, "rows", 0), "- ٣ 0000000"),
        (("parts", 0, "rows", 0), "- 0 0000003"),
        (("parts", 0, "rows", 0), f"- {'9' * 5000} 0000000"),
        (("parts", 0, "rows", 0), "ABCDEF0123456789 0 0000000"),
        (("parts", 0, "groups"), ["0" * 16] * 256),
    ],
)
def test_what_was_not_saved_so_is_refused(path: tuple[Any, ...], value: Any) -> None:
    saved = fingerprint(Many(3)).as_dict()
    assert Fingerprint.from_dict(saved) == fingerprint(Many(3))
    with pytest.raises(StateMismatch, match="fingerprint") as caught:
        Fingerprint.from_dict(_edited(saved, *path, value=value))
    assert caught.value.allowed
    assert caught.value.do
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("groups", [None, [], ["0" * 16] * 256, ["0" * 16] * 255, [0] * 256, "0" * 256])
def test_wrong_groups_are_refused(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    saved = fingerprint(Many(3)).as_dict()
    with pytest.raises(StateMismatch):
        Fingerprint.from_dict(_edited(saved, "parts", 0, "groups", value=groups))


@pytest.mark.parametrize("saved", [None, [], "text", {}, 3])
def test_what_is_no_fingerprint_is_refused(saved: Any) -> None:
    with pytest.raises(StateMismatch):
        Fingerprint.from_dict(saved)


def test_many_files_are_kept_as_groups() -> None:
    few, many, more = (fingerprint(Many(count)) for count in (20_000, 20_001, 20_002))
    assert only(few).groups is None
    assert only(many).rows is None
    assert len(only(few).rows or ()) == 20_000
    assert len(json.dumps(many.as_dict())) < 10_000
    assert len(json.dumps(few.as_dict(), indent=1)) < 4 * 2**20
    for one in (few, many):
        assert round_trip(one) == one
    assert different(few, fingerprint(Many(20_000))) == different(many, fingerprint(Many(20_001))) == []
    said = [
        "20,002 samples, saved 20,001",
        "names, sizes or contents differ in 1 of 256 groups, of about 78 samples each",
    ]
    assert different(many, more) == said
    assert different(few, many)[1:] == said[1:]


def test_long_names_are_kept_as_groups_too() -> None:
    found = fingerprint(Many(1_000, lambda index: f"{index:04d}" + "é" * 1_000))
    assert only(found).rows is None
    assert len(json.dumps(found.as_dict())) < 10_000


def test_names_beyond_a_million_are_not_looked_at_but_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 10)
    asked: list[int] = []
    found = fingerprint(Many(25, lambda index: [asked.append(index), str(index)][1]))  # type: ignore[func-returns-value]
    assert asked == list(range(10))
    assert only(found).samples == 25
    assert different(found, fingerprint(Many(26, str))) == ["26 samples, saved 25"]
