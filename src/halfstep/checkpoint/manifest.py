"""The manifest of a checkpoint: every file with its size and SHA-256, and a seal over the manifest itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.checkpoint.paths import CheckpointDir
from halfstep.checkpoint.sealed import Sealed, read_bounded
from halfstep.files import LARGEST_JSON, strict_json

MANIFEST = "MANIFEST.json"
FORMAT = 1
"""The format version; it is raised only when an older reader could not read what is written."""
_NAME = re.compile(r"rank-[0-9]{5}\.(safetensors|json)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OPEN = "0" * 64
"""The placeholder of the seal while the seal is computed."""
_KEYS = {"attempt", "environment", "files", "format", "seal", "world"}


def tensors_of(rank: int) -> str:
    """Return the name of the file that holds a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def state_of(rank: int) -> str:
    """Return the name of the file that holds a rank's state other than tensors."""
    return f"rank-{rank:05d}.json"


class NewerFormat(ValueError):
    """A checkpoint that a later version of halfstep wrote; it is not damaged, but this version cannot read it."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint; it is written after all other files."""

    attempt: int
    """The number of attempted updates when the checkpoint was taken."""
    world: int
    """The number of ranks that wrote it."""
    files: tuple[Sealed, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The machine and the versions it was written with; on another machine a resume is reported as approximate."""

    def text(self) -> bytes:
        """Return the content of MANIFEST.json, with its seal."""
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
    """Return `content` as JSON with a `seal`: the SHA-256 of the whole text, computed with zeros in its place."""
    # The digests in the manifest protect the other files; nothing else would protect the manifest. The seal covers the
    # bytes, not the parsed values, so changed whitespace is detected as well.
    text = json.dumps({**content, "seal": _OPEN}, indent=1, allow_nan=False) + "\n"
    return text.replace(f'"seal": "{_OPEN}"', f'"seal": "{hashlib.sha256(text.encode()).hexdigest()}"').encode()


def is_sealed(text: bytes, seal: Any) -> bool:
    """Return whether text from `with_seal` is unchanged; `seal` is the value that it contains."""
    if not isinstance(seal, str) or not _SHA256.fullmatch(seal):
        return False
    return hashlib.sha256(text.replace(seal.encode(), _OPEN.encode())).hexdigest() == seal


def read_manifest(generation: CheckpointDir) -> Manifest:
    """Return the manifest of a generation; raise ValueError or OSError with the reason if it cannot be used.

    Raises NewerFormat for a manifest of a later version, and Unsafe if the file could run code.
    """
    text = read_bounded(generation.path / MANIFEST, LARGEST_JSON)
    content = strict_json(text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("no manifest of a checkpoint")
    # The seal is checked before the version: one flipped bit in `format` must read as damage, not as a later version.
    if not is_sealed(text, content.get("seal")):
        raise ValueError("changed since it was written")
    if content["format"] > FORMAT:
        raise NewerFormat(f"written in form {content['format']} by a later halfstep; this one reads up to {FORMAT}")
    manifest = _checked(content)
    # The folder's name is not sealed. A renamed folder would otherwise resume at the wrong step.
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
    # Compare the counts first: `world` comes from a file and may be huge, and the set below has two names per rank.
    complete = len(files) == 2 * manifest.world and {sealed.name for sealed in files} == {
        name for rank in range(manifest.world) for name in (tensors_of(rank), state_of(rank))
    }
    if not complete:
        raise ValueError(f"{len(files)} files listed for {manifest.world} processes")
    return manifest


def _sealed(name: str, size: int, sha256: str) -> Sealed:
    # Names come from a file and become paths: anything but our own pattern, such as `../`, is refused.
    if not _NAME.fullmatch(name) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return Sealed(name, _count(size, 0), sha256)


def _count(value: Any, least: int) -> int:
    # `type() is int` also refuses true and false. Up to 2**53 every JSON reader keeps an integer exact.
    if type(value) is not int or not least <= value < 2**53:
        raise ValueError(f"{value!r} where a count should be")
    return value
