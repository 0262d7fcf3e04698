"""What a checkpoint consists of: every file with its digest, under a seal for which each byte counts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.files import LARGEST_JSON, strict_json
from halfstep.train.checkpoint.generation import Generation
from halfstep.train.checkpoint.sealed import Sealed, read_bounded

MANIFEST = "MANIFEST.json"
FORMAT = 1
"""Raised when a reader of the old form could not read the new one."""
_NAME = re.compile(r"rank-[0-9]{5}\.(safetensors|json)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OPEN = "0" * 64
"""In the place of a seal while it is computed."""
_KEYS = {"attempt", "environment", "files", "format", "seal", "world"}


def tensors_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def state_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


class NewerFormat(ValueError):
    """A checkpoint of a later halfstep: whole, and not for this one."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents, written last of all files."""

    attempt: int
    """Updates attempted when it was taken."""
    world: int
    """Processes that wrote it."""
    files: tuple[Sealed, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Where it was made: a resume elsewhere goes on, and says that it is not exact."""

    def text(self) -> bytes:
        content = {
            "attempt": self.attempt,
            "environment": dict(self.environment),
            "files": {sealed.name: [sealed.size, sealed.sha256] for sealed in self.files},
            "format": FORMAT,
            "world": self.world,
        }
        return with_seal(content)

    @property
    def bytes(self) -> int:
        return sum(sealed.size for sealed in self.files)


def with_seal(content: Mapping[str, Any]) -> bytes:
    """JSON in the order of `content`, with the digest of all its bytes: a changed one is seen wherever it is."""
    text = json.dumps({**content, "seal": _OPEN}, indent=1, allow_nan=False) + "\n"
    return text.replace(f'"seal": "{_OPEN}"', f'"seal": "{hashlib.sha256(text.encode()).hexdigest()}"').encode()


def is_sealed(text: bytes, seal: Any) -> bool:
    """Whether text that `with_seal` made is as it was."""
    if not isinstance(seal, str) or not _SHA256.fullmatch(seal):
        return False
    return hashlib.sha256(text.replace(seal.encode(), _OPEN.encode())).hexdigest() == seal


def read_manifest(generation: Generation) -> Manifest:
    """The manifest of a generation, or ValueError or OSError saying what is wrong with it."""
    text = read_bounded(generation.path / MANIFEST, LARGEST_JSON)
    content = strict_json(text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("no manifest of a checkpoint")
    if not is_sealed(text, content.get("seal")):
        raise ValueError("changed since it was written")
    if content["format"] > FORMAT:
        raise NewerFormat(f"written in form {content['format']} by a later halfstep; this one reads up to {FORMAT}")
    manifest = _checked(content)
    if manifest.attempt != generation.attempt:
        raise ValueError(f"the manifest of step {manifest.attempt}, in the folder of step {generation.attempt}")
    return manifest


def _checked(content: dict[str, Any]) -> Manifest:
    if set(content) != _KEYS or content["format"] < 1 or not isinstance(content["environment"], dict):
        raise ValueError(f"no manifest of form {FORMAT}")
    try:
        files = tuple(_sealed(name, *entry) for name, entry in content["files"].items())
        manifest = Manifest(_count(content["attempt"], 0), _count(content["world"], 1), files, content["environment"])
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no manifest of a checkpoint: {error}") from None
    # Counted first: a number of processes from a file may be any, and is not worth as many names.
    complete = len(files) == 2 * manifest.world and {sealed.name for sealed in files} == {
        name for rank in range(manifest.world) for name in (tensors_of(rank), state_of(rank))
    }
    if not complete:
        raise ValueError(f"{len(files)} files listed for {manifest.world} processes")
    return manifest


def _sealed(name: str, size: int, sha256: str) -> Sealed:
    # Names come from a file, and become paths.
    if not _NAME.fullmatch(name) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return Sealed(name, _count(size, 0), sha256)


def _count(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value < 2**53:
        raise ValueError(f"{value!r} where a count should be")
    return value
