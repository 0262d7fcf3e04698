"""Every generator goes on where it was; states that would not fit are refused before one is touched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.checkpoint.packing import pack_state, unpack_state
from halfstep.errors import StateMismatch
from halfstep.train.environment import (
    check_rng_states,
    collect_rng_states,
    read_git_revision,
    restore_rng_states,
    seed_all,
)
from halfstep.train.process_group import preserve_rng
from tests.support.digest import digest_of

HERE = torch.device("cpu")


def drawn() -> list[float]:
    """Of each kind; an odd number of normal ones leaves one in store in Python and NumPy."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def saved_and_loaded(state: Any) -> Any:
    return unpack_state(*pack_state(state, "rng"), "here")


def test_what_is_drawn_after_a_state_is_drawn_again() -> None:
    with preserve_rng():
        seed_all(2**63 - 1)
        drawn()
        state = saved_and_loaded(collect_rng_states(HERE))
        first = [drawn() for _ in range(3)]
        seed_all(1)
        check_rng_states(state, HERE)
        restore_rng_states(state, HERE)
        assert [drawn() for _ in range(3)] == first


def test_seeds_differ_for_every_generator() -> None:
    with preserve_rng():
        seed_all(1)
        one = drawn()
        seed_all(2)
        assert all(a != b for a, b in zip(one, drawn(), strict=True))


def _without(name: str) -> Any:
    return {key: value for key, value in collect_rng_states(HERE).items() if key != name}


WRONG = {
    "none": {},
    "python is missing": _without("python"),
    "one more": {**collect_rng_states(HERE), "jax": 1},
    "a device's more": {**collect_rng_states(HERE), "torch": [torch.get_rng_state()] * 2},
    "another size": {**collect_rng_states(HERE), "torch": [torch.zeros(16, dtype=torch.uint8)]},
    "a word less": {**collect_rng_states(HERE), "python": (3, torch.zeros(624, dtype=torch.int64), None)},
    "another generator": {**collect_rng_states(HERE), "numpy": ("PCG64", torch.zeros(624), 0, 0, 0.0)},
    "no sequence": {**collect_rng_states(HERE), "numpy": None},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_state_of_another_form_is_refused_and_nothing_moves(name: str) -> None:
    before = digest_of(collect_rng_states(HERE))
    with pytest.raises(StateMismatch):
        check_rng_states(WRONG[name], HERE)
    assert digest_of(collect_rng_states(HERE)) == before


# -- git --------------------------------------------------------------------------------------------------------------


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def repository(folder: Path, head: str, **files: str) -> Path:
    (folder / ".git").mkdir(parents=True)
    for name, text in {"HEAD": head, **files}.items():
        place = folder / ".git" / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")
    return folder


def test_the_commit_is_read_from_gits_own_files(tmp_path: Path) -> None:
    branch = repository(tmp_path / "branch", "ref: refs/heads/main", refs__heads__main=COMMIT)
    packed = repository(tmp_path / "packed", "ref: refs/heads/a/b", **{"packed-refs": f"# x\n{COMMIT} refs/heads/a/b"})
    detached = repository(tmp_path / "detached", COMMIT)
    (tmp_path / "tree").mkdir()
    repository(tmp_path / "tree_of", "ref: refs/heads/other", commondir="../../branch/.git")
    (tmp_path / "branch" / ".git" / "refs" / "heads" / "other").write_text(COMMIT)
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {tmp_path / 'tree_of' / '.git'}\n")
    (branch / "src" / "deep").mkdir(parents=True)
    assert read_git_revision(branch / "src" / "deep") == {"commit": COMMIT, "branch": "main"}
    assert read_git_revision(packed) == {"commit": COMMIT, "branch": "a/b"}
    assert read_git_revision(detached) == {"commit": COMMIT, "branch": ""}
    assert read_git_revision(tmp_path / "tree") == {"commit": COMMIT, "branch": "other"}


def test_what_is_no_commit_is_none(tmp_path: Path) -> None:
    for number, head in enumerate(["", "ref: refs/heads/none", "<script>", "ref: ../../../etc/passwd", "\x00"]):
        assert read_git_revision(repository(tmp_path / str(number), head)) is None
    assert read_git_revision(tmp_path) is None
