"""Describe and restore what the bits of a run depend on besides its own state: random generators, versions, device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from halfstep.data.order import RANDPERM, SavedOrder
from halfstep.errors import StateMismatch, check_same_keys
from halfstep.random_state import collect_torch_rng_states, set_torch_rng_states
from halfstep.recipe.strict_yaml import iterate_dotted_keys

INDIFFERENT = ("halfstep",)
"""Facts that are recorded but do not affect the bits."""


def list_environment_changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return, in words, why a resume is not exact; an empty list where it is."""
    before, after = dict(iterate_dotted_keys(then)), dict(iterate_dotted_keys(now))
    keys = [key for key in dict.fromkeys([*before, *after]) if key not in INDIFFERENT]
    return [
        f"{key} was {before.get(key)}, and is {after.get(key)}" for key in keys if before.get(key) != after.get(key)
    ]


_LONGEST_REF = 4096


def read_git_revision(folder: Path) -> dict[str, str] | None:
    """Return the commit and branch that `folder` has checked out; None outside of a repository.

    Read from git's own files: a run need not have git installed, and starts no process for it. Whether files were
    changed since the commit is not known from them.
    """
    for place in (folder, *folder.parents):
        try:
            git = place / ".git"
            if git.exists():
                # In another work tree, a file names git's folder.
                return _read_git_head(git if git.is_dir() else place / _read_first_line(git).removeprefix("gitdir: "))
        except (OSError, ValueError):
            return None
    return None


def _read_git_head(git: Path) -> dict[str, str] | None:
    head = _read_first_line(git / "HEAD")
    if not head.startswith("ref: "):
        return _parse_revision(head, "")
    ref = head.removeprefix("ref: ")
    shared = git / _read_first_line(git / "commondir") if (git / "commondir").exists() else git
    for place in (git / ref, shared / ref):
        if place.is_file():
            return _parse_revision(_read_first_line(place), ref)
    packed = shared / "packed-refs"
    lines = packed.read_text("utf-8", "replace").splitlines() if packed.is_file() else []
    return next((_parse_revision(line.split(" ")[0], ref) for line in lines if line.endswith(f" {ref}")), None)


def _parse_revision(commit: str, ref: str) -> dict[str, str] | None:
    is_digest = len(commit) in (40, 64) and all(letter in "0123456789abcdef" for letter in commit)
    return {"commit": commit, "branch": ref.removeprefix("refs/heads/")} if is_digest else None


def _read_first_line(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline(_LONGEST_REF).strip()


@dataclass(frozen=True)
class AutoChoices:
    """Decisions that depend on timing."""

    precision: str
    """The precision that was requested, or that `auto` resolved to."""
    reasons: tuple[str, ...]
    """Why it was chosen, in words."""
    num_workers: int
    plan: Mapping[str, object] | None = None
    """Other measured choices, by name."""
    order: SavedOrder = RANDPERM
    """The order of the samples; checkpoints of earlier versions have none, or one without lanes."""

    def as_dict(self) -> dict[str, object]:
        """Return plain data for a checkpoint."""
        return {**asdict(self), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> AutoChoices:
        """Build it from `as_dict`; raise StateMismatch where keys differ."""
        given = {"order": asdict(RANDPERM), **state}
        if isinstance(given["order"], dict):
            given["order"] = {"lanes": 0, **given["order"]}  # earlier versions had one rule for them
        check_same_keys("the automatic choices", [*cls.__dataclass_fields__], given)
        check_same_keys("the order of the samples", [*SavedOrder.__dataclass_fields__], given["order"])
        return cls(**{**given, "reasons": tuple(given["reasons"]), "order": SavedOrder(**given["order"])})


class GeneratorStates(TypedDict):
    """The states of all generators; words are tensors."""

    python: tuple[int, Tensor, float | None]
    numpy: tuple[Any, ...]
    torch: list[Tensor]


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    # NumPy takes seeds of 32 bits only.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def collect_rng_states(device: torch.device) -> GeneratorStates:
    """Return the states of all generators as plain data and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    # Hundreds of numbers each: as tensors they add almost nothing to a save.
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": collect_torch_rng_states(device),
    }


def check_rng_states(state: Any, device: torch.device) -> None:
    """Raise StateMismatch where `restore_rng_states` could not load `state`."""
    own = collect_rng_states(device)
    check_same_keys("random numbers", own, state)
    for name, generator in own.items():
        if _describe_generator_form(generator) != _describe_generator_form(state[name]):
            raise StateMismatch(
                f"random numbers of {name} were saved in another form: {_describe_generator_form(state[name])}",
                allowed=f"{_describe_generator_form(generator)}, as on this device",
                do="run it on the original kind of device, with the original versions",
            )


def restore_rng_states(state: Any, device: torch.device) -> None:
    """Set all generators to a state that `check_rng_states` accepted."""
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_torch_rng_states(state["torch"], device)


def _describe_generator_form(generator: Any) -> list[Any]:
    """Return the kind of a generator and its number of words, regardless of its position."""
    if not isinstance(generator, (list, tuple)):
        return [type(generator).__name__]
    return [
        len(generator),
        *(list(p.shape) if isinstance(p, Tensor) else p for p in generator if isinstance(p, (Tensor, str))),
    ]
