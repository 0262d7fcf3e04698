"""Orders, fingerprints and samples of every kind of source are those of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sample_digests
from benchmarks.sample_digests import RECORD, compute_digests
from halfstep.data import dataset


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_runs_read_what_they_read_in_earlier_versions(tmp_path: Path) -> None:
    saved, found = json.loads(RECORD.read_text()), compute_digests(tmp_path / "sets")
    assert len(found) >= 170
    assert {name: digest for name, digest in found.items() if saved.get(name) != digest} == {}


def test_another_order_or_another_sample_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, real = json.loads(RECORD.read_text()), dataset.derive_seed
    monkeypatch.setattr(sample_digests, "list_cases", lambda root: [("masks", pairs(root))])
    monkeypatch.setattr(dataset, "derive_seed", lambda seed, *parts: real(seed + 1, *parts))
    found = compute_digests(tmp_path / "sets")
    others = {name for name, digest in found.items() if saved[name] != digest}
    assert others == {"masks: order drawn", "masks: train: samples", "masks: val: samples"}


def pairs(root: Path) -> sample_digests.Sides:
    return next(sides for name, sides in sample_digests.open_folders(root) if name == "masks")
