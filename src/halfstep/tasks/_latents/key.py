"""What latents depend on, in words, and the name that follows from it: other images or numbers have another name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

from halfstep.tasks._latents.encoding import Encoding, evenly, ready_image
from halfstep.tensor_header import content
from halfstep.train.data.fingerprint import fingerprint
from halfstep.train.data.source import Source, files_of

VERSION = "2"
"""Of what is written; another one finds nothing of this one's."""
LOOKED_AT = 32
"""Images that are compared as the autoencoder sees them: drawn ones have no file, and readers change."""


def words_of(encoding: Encoding, source: Source, parts: Mapping[str, str]) -> dict[str, str]:
    """Everything that the latents of a source depend on: what the caller says, and what the data is."""
    (found,) = fingerprint(source).parts
    words = {
        **parts,
        "version": VERSION,
        "samples": str(found.samples),
        "names": found.order,
        "files": found.digest,
        "images": _looks(encoding, source),
    }
    if not found.whole:
        # Of a large set not every byte is read; a file that was changed has another time at least.
        words["times"] = _times(source)
    return words


def key_of(words: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(words), sort_keys=True).encode()).hexdigest()


def _looks(encoding: Encoding, source: Source) -> str:
    digest = hashlib.sha256()
    for number in evenly(len(source), LOOKED_AT):
        image = ready_image(source, number, encoding.image_of)
        if image is None:
            digest.update(b"unreadable")
        else:
            digest.update(f"{tuple(image.shape)}".encode())
            digest.update(content(image))
    return digest.hexdigest()


def _times(source: Source) -> str:
    digest = hashlib.sha256()
    for name, path in sorted(
        {(name, os.fspath(path)) for i in range(len(source)) for name, path in files_of(source, i)}
    ):
        try:
            digest.update(f"{len(name)}:{name} {os.stat(path).st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
        except OSError:  # a sample that cannot be read is replaced when its turn comes
            digest.update(f"{len(name)}:{name} unreadable\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
