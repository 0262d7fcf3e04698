"""Checkpoints that were changed by somebody who knows how: every digest fits, and what is inside does not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.checkpoint import sealed
from halfstep.checkpoint.paths import CHECKPOINTS, CheckpointDir, list_generations
from halfstep.checkpoint.sealed import SealedFile


def refit(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 0) -> None:
    """Change the JSON of a run's newest checkpoint in place, and its manifest with it."""
    generation = _newest(folder)
    name = sealed.name_state_file(rank)
    content = json.loads((generation.path / name).read_text())
    change(content)
    text = json.dumps(content, separators=(",", ":")).encode()
    (generation.path / name).write_bytes(text)
    old = sealed.read_manifest(generation)
    own = SealedFile(name, len(text), hashlib.sha256(text).hexdigest())
    files = tuple(own if one.name == name else one for one in old.files)
    _write(generation, dataclasses.replace(old, files=files).text())


def elsewhere(folder: Path, **facts: Any) -> None:
    """As if the newest checkpoint had been made in another environment."""
    generation = _newest(folder)
    old = sealed.read_manifest(generation)
    _write(generation, dataclasses.replace(old, environment={**old.environment, **facts}).text())


def of_form(folder: Path, form: int) -> None:
    """As an earlier halfstep wrote the newest checkpoint, or as one that is not written yet may write it."""
    generation = _newest(folder)
    content = json.loads(sealed.read_manifest(generation).text())
    del content["seal"]
    _write(generation, sealed.add_seal({**content, "format": form}))


def _newest(folder: Path) -> CheckpointDir:
    return list_generations(folder / CHECKPOINTS)[0]


def _write(generation: CheckpointDir, text: bytes) -> None:
    (generation.path / sealed.MANIFEST).write_bytes(text)
