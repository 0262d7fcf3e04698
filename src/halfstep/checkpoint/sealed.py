"""Write files with their size and SHA-256, list them in a manifest, and check them before anything in them is used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickletools
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.checkpoint.chunks import ChunkedTensor, convert_chunks_to_json, parse_chunks
from halfstep.checkpoint.paths import CheckpointDir, Disk
from halfstep.errors import Unsafe, advise_new_run, check_same_form
from halfstep.files import LARGEST_JSON, parse_strict_json
from halfstep.peers import parse_launch_token

# -- pickle detection -------------------------------------------------------------------------------------------------
# Recognize files that can run code when their usual reader opens them, by their first bytes. A damaged file must not be
# mistaken for one of these: a damaged checkpoint is skipped, but code in a checkpoint ends the run.


LOOKED_AT = 2**16
"""The number of bytes that are inspected."""
LONGEST_HEADER = 100_000_000
"""The maximum length of a safetensors header, a limit of the safetensors library itself."""
_ENOUGH = 4
"""The number of valid opcodes in a row, after the protocol mark (pickle protocol 2, 2003), that prove a pickle."""
_PLENTY = 64
"""The same without the mark; it is higher because letters and digits are valid opcodes of protocol 0."""
_PROTOCOL_MARK = re.compile(rb"\x80[\x00-\x05]", re.DOTALL)
_GLOBAL_NAME = re.compile(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*")
"""The argument of the opcodes `GLOBAL` and `INST`: a module and a name in it."""


def describe_unsafe_file(start: bytes) -> str | None:
    """Return a description of a file that could run code when read with its usual reader, else None."""
    # A safetensors file. Checked first: the bytes of its header's length can look like those of a pickle or an archive.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= LONGEST_HEADER:
        return None
    if start[:4] == b"PK\x03\x04":
        return "an archive with a pickle in it, as torch.save writes"
    if start[257:262] == b"ustar":
        return "an archive with pickles in it, as torch.save once wrote"
    is_pickle = _is_marked_pickle if _PROTOCOL_MARK.match(start) else _is_old_pickle
    return "a pickle" if is_pickle(start) else None


def _is_marked_pickle(start: bytes) -> bool:
    for count, (name, _) in enumerate(_iterate_pickle_opcodes(start), start=1):
        # The shortest valid pickle has three opcodes: the mark, one value and STOP.
        if count >= _ENOUGH or (name == "STOP" and count == _ENOUGH - 1):
            return True
    return False


def _is_old_pickle(start: bytes) -> bool:
    """Return whether the bytes are a pickle of protocol 0 or 1."""
    # These have no mark, and random bytes are often a few valid opcodes. But random bytes name no module, and soon
    # contain an invalid opcode.
    for count, (name, argument) in enumerate(_iterate_pickle_opcodes(start), start=1):
        names_code = name in ("GLOBAL", "INST") and _GLOBAL_NAME.fullmatch(str(argument)) is not None
        if names_code or count >= _PLENTY:
            return True
    return False


def _iterate_pickle_opcodes(start: bytes) -> Iterator[tuple[str, object]]:
    """Yield opcodes and arguments up to the first invalid one; nothing is executed."""
    try:
        for instruction, argument, _ in pickletools.genops(start):
            yield instruction.name, argument
    except Exception:
        # A decoder can raise anything for bytes that are no pickle.
        return


# -- sealed files -----------------------------------------------------------------------------------------------------


MOST_TENSORS, MOST_SIDES = 100_000, 64
"""The maximum number of tensors in one file, and of dimensions of one tensor; 64 is torch's own limit."""
BLOCK = 2**22
"""The number of bytes that are hashed and written at a time."""
# Errors that are not the file's: too many open files, no memory, a network disk that is away, permissions. A checkpoint
# must not be declared damaged for one of these.
_PASSING = {
    getattr(errno, name, None)
    for name in (
        "EMFILE",
        "ENFILE",
        "ENOMEM",
        "ENOBUFS",
        "EIO",
        "EACCES",
        "EPERM",
        "ESTALE",
        "EAGAIN",
        "EINTR",
        "ETIMEDOUT",
    )
} - {None}


class SealedFile(NamedTuple):
    """The name, size and digest that a file must have."""

    name: str
    size: int
    sha256: str


def write_sealed(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> SealedFile:
    """Write a new file from these pieces and return its size and digest; it is on the disk when this returns."""
    digest, size = hashlib.sha256(), 0
    file = disk.create(path)
    try:
        for block in _split_into_blocks(pieces):
            # The digest covers the bytes in memory, not those read back: damage on the way to the disk is detected too.
            digest.update(block)
            disk.write(file, block)
            size += len(block)
        # SIGKILL keeps the page cache, a power loss does not: the file must be on the disk before the manifest names
        # it.
        disk.flush(file)
    finally:
        disk.close(file)
    return SealedFile(path.name, size, digest.hexdigest())


def _split_into_blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        for begin in range(0, len(view), BLOCK):
            yield view[begin : begin + BLOCK]


def find_file_defect(folder: Path, sealed: SealedFile) -> str | None:
    """Return the defect of a file, or None.

    Raises OSError if the file cannot be read at present; it may still be intact. Raises Unsafe if it could run code
    when read with a pickle reader.
    """
    try:
        with open_regular(folder / sealed.name) as file:
            size, sha256 = _hash_file(file, folder / sealed.name, sealed.size)
    except OSError as error:
        if is_temporary_error(error):
            raise
        return f"{sealed.name}: {error.strerror or error}"
    if size != sealed.size:
        return f"{sealed.name} has {size:,} bytes, {sealed.size:,} were written"
    return (
        None
        if sha256 == sealed.sha256
        else f"{sealed.name} has the right size, but a different SHA-256 than was written"
    )


def is_temporary_error(error: Exception) -> bool:
    """Return whether an error is temporary or external, so that the file itself may be intact."""
    return isinstance(error, OSError) and error.errno in _PASSING


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises OSError if it is larger than `most` bytes, and Unsafe if it could run code.
    """
    with open_regular(path) as file:
        size = os.fstat(file).st_size
        if size > most:
            raise OSError(f"{size:,} bytes, more than {most:,}")
        content = b""
        # Bounded by the size checked above, even if the file grows while it is read.
        while block := os.read(file, size - len(content)):
            content += block
    refuse_code(path, content[:LOOKED_AT])
    return content


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor; raise OSError for a link, a folder or a pipe."""
    # O_NONBLOCK: opening a pipe would otherwise wait forever for a writer. O_NOFOLLOW, and fstat on the descriptor
    # instead of stat on the path: the file cannot be exchanged between the check and the read.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a regular file")
        yield file
    finally:
        os.close(file)


def check_safetensors_header(path: Path) -> None:
    """Raise ValueError for a header that safetensors accepts but no writer produces."""
    # safetensors allows a header of 100 MB and any number of tensors: these limits bound time and memory.
    with open_regular(path) as file:
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if length > LARGEST_JSON:
            raise ValueError(f"a header of {length:,} bytes")
        table = parse_strict_json(os.pread(file, length, 8))
    if not isinstance(table, dict) or len(table) > MOST_TENSORS:
        raise ValueError("not a table of tensors, or too long")
    for name, entry in table.items():
        shape = [] if name == "__metadata__" else entry["shape"]
        if len(shape) > MOST_SIDES or any(not 0 <= side < 2**53 for side in shape):
            raise ValueError(f"a tensor with the shape {str(shape)[:80]}")


def _hash_file(file: int, path: Path, expected: int) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file.

    The digest is empty if the size is wrong, since hashing is then wasted.
    """
    size = os.fstat(file).st_size
    refuse_code(path, os.pread(file, LOOKED_AT, 0))
    if size != expected:
        return size, ""
    digest = hashlib.sha256()
    block = bytearray(BLOCK)
    while read := os.readv(file, [block]):
        digest.update(memoryview(block)[:read])
    return size, digest.hexdigest()


def refuse_code(path: Path, start: bytes) -> None:
    """Raise Unsafe if a file with these first bytes could run code when read with a pickle reader."""
    kind = describe_unsafe_file(start)
    if kind is not None:
        raise Unsafe(
            f"{path} is {kind}, which can run code when it is read",
            allowed="checkpoints that halfstep wrote: safetensors and JSON",
            do="do not use this folder unless you know who put the file there; delete the file, or use another run",
        )


# -- manifest ---------------------------------------------------------------------------------------------------------
# The manifest lists every file of a checkpoint with its size and SHA-256, and has a seal over itself.


MANIFEST = "MANIFEST.json"
FORMAT = 2
"""The format version; increased with every change of the names or the meaning of the data, also inside files.

Version 1 had other names for the components of a run. Only the current version is read.
"""
_NAME = re.compile(r"rank-[0-9]{5}\.(safetensors|json)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OPEN = "0" * 64
"""The placeholder of the seal while the seal is computed."""
_KEYS = {"attempt", "chunks", "environment", "files", "format", "seal", "world_size"}


def name_tensors_file(rank: int) -> str:
    """Return the name of the file that holds a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def name_state_file(rank: int) -> str:
    """Return the name of the file that holds a rank's state other than tensors."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint; it is written after all other files."""

    attempt: int
    """The number of attempted updates when the checkpoint was taken."""
    world_size: int
    """The number of ranks that wrote it."""
    files: tuple[SealedFile, ...]
    environment: Mapping[str, object] = field(default_factory=dict)
    """The machine and the versions it was written with; on another machine a resume is reported as approximate."""
    chunks: Mapping[str, ChunkedTensor] = field(default_factory=dict)
    """The tensors that are cut over several files, by name."""
    launch: str | None = None
    """The token of the launch that wrote it; None for a checkpoint of an earlier version, or outside of a run."""

    def text(self) -> bytes:
        """Return the content of MANIFEST.json, with its seal."""
        content: dict[str, object] = {
            "attempt": self.attempt,
            "chunks": convert_chunks_to_json(self.chunks),
            "environment": dict(self.environment),
            "files": {sealed.name: [sealed.size, sealed.sha256] for sealed in self.files},
            "format": FORMAT,
            "world_size": self.world_size,
        }
        if self.launch is not None:
            content["launch"] = self.launch
        return add_seal(content)

    @property
    def bytes(self) -> int:
        return sum(sealed.size for sealed in self.files)


def add_seal(content: Mapping[str, object]) -> bytes:
    """Return `content` as JSON with a `seal`: the SHA-256 of the whole text, computed with zeros in its place."""
    # The digests in the manifest protect the other files; nothing else would protect the manifest. The seal covers the
    # bytes, not the parsed values, so changed whitespace is detected as well.
    text = json.dumps({**content, "seal": _OPEN}, indent=1, allow_nan=False) + "\n"
    return text.replace(f'"seal": "{_OPEN}"', f'"seal": "{hashlib.sha256(text.encode()).hexdigest()}"').encode()


def is_sealed(text: bytes, seal: Any) -> bool:
    """Return whether text from `add_seal` is unchanged; `seal` is the value that it contains."""
    if not isinstance(seal, str) or not _SHA256.fullmatch(seal):
        return False
    return hashlib.sha256(text.replace(seal.encode(), _OPEN.encode())).hexdigest() == seal


def read_manifest(generation: CheckpointDir) -> Manifest:
    """Return the manifest of a generation; raise ValueError or OSError with the reason if it cannot be used.

    Raises OtherForm for a manifest of an earlier or a later version, and Unsafe if the file could run code.
    """
    text = read_bounded(generation.path / MANIFEST, LARGEST_JSON)
    content = parse_strict_json(text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("not a manifest of a checkpoint")
    # The seal is checked before the version: one flipped bit in `format` must read as damage, not as another version.
    if not is_sealed(text, content.get("seal")):
        raise ValueError("changed since it was written")
    if content["format"] >= 1:
        check_same_form(
            generation.path,
            FORMAT,
            content["format"],
            for_earlier=f"use the version that wrote it, or {advise_new_run()}",
        )
    manifest = _parse_manifest(content)
    # The folder's name is not sealed. A renamed folder would otherwise resume at the wrong step.
    if manifest.attempt != generation.attempt:
        raise ValueError(f"the manifest of step {manifest.attempt}, in the folder of step {generation.attempt}")
    return manifest


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    if (
        set(content) - {"launch"} != _KEYS
        or content["format"] != FORMAT
        or not isinstance(content["environment"], dict)
    ):
        raise ValueError(f"not a manifest of form {FORMAT}")
    try:
        files = tuple(_parse_sealed_file(name, *entry) for name, entry in content["files"].items())
        attempt, world_size = _check_count(content["attempt"], 0), _check_count(content["world_size"], 1)
        chunks = parse_chunks(content["chunks"], world_size)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a manifest of a checkpoint: {error}") from None
    launch = parse_launch_token(content.get("launch"))
    if launch is None and "launch" in content:
        raise ValueError("a launch without the form of a token")
    manifest = Manifest(attempt, world_size, files, content["environment"], chunks, launch)
    # Compare the counts first: `world_size` comes from a file and may be huge; the set below has two names per rank.
    complete = len(files) == 2 * world_size and {sealed.name for sealed in files} == {
        name for rank in range(world_size) for name in (name_tensors_file(rank), name_state_file(rank))
    }
    if not complete:
        raise ValueError(f"{len(files)} files listed for {world_size} processes")
    return manifest


def _parse_sealed_file(name: str, size: int, sha256: str) -> SealedFile:
    # Names come from a file and become paths: anything but our own pattern, such as `../`, is refused.
    if not _NAME.fullmatch(name) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name!r} is not a checkpoint file")
    return SealedFile(name, _check_count(size, 0), sha256)


def _check_count(value: Any, least: int) -> int:
    # `type() is int` also refuses true and false. Up to 2**53 every JSON reader keeps an integer exact.
    if type(value) is not int or not least <= value < 2**53:
        raise ValueError(f"{value!r} instead of a count")
    return value
