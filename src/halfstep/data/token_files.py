"""Token shards: documents as one stream of numbers in a few files, with an index, read by offset.

A folder holds `tokens.json` (the index), `tokenizer.json`, and for each split shards of little-endian uint16 or uint32,
the end of each document, and the documents' names. Every document ends with the end token. In a model, a document also
has a beginning: the tokens that the tokenizer puts there, or the end token of the document before it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, count
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from halfstep.data.file_bytes import FileBytes
from halfstep.data.file_state import FileState
from halfstep.errors import BadData, BadSample
from halfstep.files import read_json, write_json

INDEX, TOKENIZER = "tokens.json", "tokenizer.json"
VERSION = 2
VERSION_WITHOUT_BEGINNINGS = 1
"""The version of indexes without `begin`: the first token of each document has neither a context nor a target."""
SPLITS = ("train", "val")
SHARD_TOKENS = 2**27
"""Tokens of a shard: 256 MB where a token takes two bytes."""
BLOCK = 2**22
"""Tokens, and bytes, that are read at a time from the beginning to the end of a split."""

Tokens = np.ndarray[Any, Any]
Count = Annotated[int, Field(strict=True, ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.bin$")]
"""A file in the folder itself: an index must not lead out of it."""


class TokenShard(NamedTuple):
    """A shard: its file, the number of its tokens, and the SHA-256 of its content."""

    file: Name
    tokens: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of a split. `bytes` counts its text in UTF-8, without the end tokens."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    documents: Count
    tokens: Count
    bytes: Count
    shards: tuple[TokenShard, ...]


@dataclass(frozen=True)
class TokenIndex:
    """The index of a folder of tokens."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Annotated[int, Field(strict=True, ge=VERSION_WITHOUT_BEGINNINGS, le=VERSION)]
    dtype: Literal["uint16", "uint32"]
    vocabulary: Annotated[int, Field(strict=True, ge=2)]
    end: Count
    """The token that ends a document."""
    tokenizer: str
    """The SHA-256 of `tokenizer.json`."""
    train: TokenSplit
    val: TokenSplit
    begin: tuple[Count, ...] | None = None
    """The tokens that a document begins with; None in an index without beginnings."""

    @property
    def written_begin(self) -> tuple[int, ...]:
        """The tokens of the beginning that each document has in the shards: an end token before it is not repeated."""
        begin = self.begin or ()
        return begin[1:] if begin[:1] == (self.end,) else begin

    def split(self, name: str) -> TokenSplit:
        """Return the split of this name."""
        return {"train": self.train, "val": self.val}[name]

    def count_targets(self, name: str) -> int:
        """Return how many tokens of a split are predicted: all but those that a document begins with."""
        split = self.split(name)
        return split.tokens - split.documents * len(self.written_begin)

    def write(self, folder: Path) -> None:
        """Write the index; the folder is complete with it."""
        write_json(folder / INDEX, asdict(self))


def has_tokens(folder: Path) -> bool:
    """Return whether a folder holds tokens."""
    return (folder / INDEX).is_file()


def format_tokens_command(files: str, out: Path, tokenizer: str = "train:4096") -> str:
    """Return the command that makes tokens of files, in `out` or, if that exists, in a new folder next to it."""
    names = (f"{out}-{number}" for number in count(2))
    new = next(name for name in chain([str(out)], names) if not os.path.lexists(name))
    return shlex.join(["halfstep", "data", "tokens", files, "--tokenizer", tokenizer, "--out", new])


def read_token_index(folder: Path) -> TokenIndex:
    """Return the index of a folder; raise BadData if there is none, or if it contradicts the files."""
    allowed = "a folder that halfstep data tokens wrote"
    do = format_tokens_command("FILES", folder)
    if not has_tokens(folder):
        raise BadData(f"{folder} contains no tokens: {INDEX} is missing", allowed=allowed, do=do)
    try:
        index = TypeAdapter(TokenIndex).validate_python(read_json(folder / INDEX))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise BadData(f"{folder / INDEX} is damaged: {why}", allowed=allowed, do=do) from error
    wrong = index.end >= index.vocabulary or index.vocabulary > np.iinfo(index.dtype).max + 1
    if index.version == VERSION_WITHOUT_BEGINNINGS:
        wrong = wrong or index.begin is not None
    else:
        wrong = wrong or not index.begin or max(index.begin) >= index.vocabulary
    for split in (index.train, index.val):
        wrong = wrong or split.tokens != sum(shard.tokens for shard in split.shards)
    if wrong:
        raise BadData(f"{folder / INDEX} contradicts itself", allowed=allowed, do=do)
    return index


class TokenArray:
    """The tokens of a split, over all its shards. Nothing is read before it is requested, and nothing is kept."""

    def __init__(self, folder: Path, split: str, index: TokenIndex | None = None) -> None:
        self.folder, self.split = folder, split
        self.index = index or read_token_index(folder)
        self.facts = self.index.split(split)
        self.dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._starts = [0, *accumulate(shard.tokens for shard in self.facts.shards)]
        self._states = [self._state(shard) for shard in self.facts.shards]
        self._files: dict[int, FileBytes] = {}

    def __len__(self) -> int:
        return self.facts.tokens

    @property
    def paths(self) -> list[Path]:
        """The files of the shards."""
        return [self.folder / shard.file for shard in self.facts.shards]

    def read(self, start: int, stop: int) -> Tokens:
        """Return a copy of the tokens from `start` to `stop`; raise BadSample if a shard has changed."""
        parts = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[number], self._starts[number + 1]
            parts.append(self._read_shard(number, start - first, min(stop, last) - first))
            start, number = last, number + 1
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def documents(self) -> Tokens:
        """Return the end of each document in the split, its end token included."""
        path, expected = self.folder / f"{self.split}.documents.bin", self.facts.documents * 8
        if not path.is_file() or path.stat().st_size != expected:
            raise _build_changed_shard_error(path, f"missing, or not of {expected:,} bytes")
        return np.fromfile(path, dtype="<i8")

    def names(self) -> list[str]:
        """Return the names of the documents."""
        lines = (self.folder / f"{self.split}.names.jsonl").read_text(encoding="utf-8").splitlines()
        return [str(json.loads(line)) for line in lines]

    def blocks(self, overlap: int = 0) -> Iterator[tuple[int, Tokens]]:
        """Yield all tokens in blocks with their places; each repeats the last `overlap` tokens of the one before."""
        for start in range(0, len(self), BLOCK):
            first = max(0, start - overlap)
            yield first, self.read(first, min(start + BLOCK, len(self)))

    def _read_shard(self, number: int, start: int, stop: int) -> Tokens:
        shard, width = self.facts.shards[number], self.dtype.itemsize
        self._refuse_changed(number, shard)
        if number not in self._files:
            self._files[number] = FileBytes(self.folder / shard.file, "the shard")
        return np.frombuffer(self._files[number].read(start * width, (stop - start) * width), self.dtype)

    def _refuse_changed(self, number: int, shard: TokenShard) -> None:
        path = self.folder / shard.file
        try:
            now = FileState.of(os.stat(path))
            if now == self._states[number]:
                return
            if now.size != self._states[number].size or compute_sha256(path) != shard.sha256:
                raise BadSample(str(path), "its shard has changed since the run began")
        except OSError as error:
            raise BadSample(str(path), error.strerror or type(error).__name__) from error
        self._states[number] = now
        self._files.pop(number, None)

    def _state(self, shard: TokenShard) -> FileState:
        path = self.folder / shard.file
        try:
            found = FileState.of(os.stat(path))
        except OSError as error:
            raise _build_changed_shard_error(path, error.strerror or type(error).__name__) from error
        expected = shard.tokens * self.dtype.itemsize
        if found.size != expected:
            raise _build_changed_shard_error(path, f"{found.size:,} bytes, and {expected:,} in the index")
        return found


def _build_changed_shard_error(path: Path, why: str) -> BadData:
    return BadData(
        f"{path}: {why}", allowed="the shards that the index names, complete", do="copy the folder again, all of it"
    )


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; raise OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# -- writing ----------------------------------------------------------------------------------------------------------


class TokenWriter:
    """The writer of a split: documents one after another, in shards of at most `shard_tokens` tokens.

    `begin` is written before each document, `end` after it.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        end: int,
        shard_tokens: int = SHARD_TOKENS,
        *,
        begin: Sequence[int] = (),
    ) -> None:
        self._folder, self._split, self._end, self._shard_tokens = folder, split, end, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shards: list[TokenShard] = []
        self._file: IO[bytes] | None = None
        self._written, self._digest = 0, hashlib.sha256()
        self._names = (folder / f"{split}.names.jsonl").open("w", encoding="utf-8")
        self._ends = (folder / f"{split}.documents.bin").open("wb")
        self.documents = self.tokens = self.bytes = 0
        self._begin, self._begun = np.asarray(begin, self._dtype), False
        self._marks = {end, *begin}
        self.inner_marks = Counter[int]()
        """End tokens, and tokens of the beginning, inside the text of documents."""

    def add(self, tokens: list[int], text_bytes: int) -> None:
        """Add tokens of the present document."""
        self._begin_document()
        self._write(np.asarray(tokens, self._dtype))
        self.bytes += text_bytes
        for mark in self._marks:
            self.inner_marks[mark] += tokens.count(mark)

    def end_document(self, name: str) -> None:
        """End the present document with the end token, and give it a name."""
        self._begin_document()
        self._begun = False
        self._write(np.asarray([self._end], self._dtype))
        self.documents += 1
        self._ends.write(np.asarray([self.tokens], "<i8").tobytes())
        self._names.write(f"{json.dumps(name)}\n")

    def close(self) -> TokenSplit:
        """Close the files, and return the facts of the split."""
        self._end_shard()
        self._names.close()
        self._ends.close()
        return TokenSplit(self.documents, self.tokens, self.bytes, tuple(self._shards))

    def _begin_document(self) -> None:
        if not self._begun:
            self._write(self._begin)
            self._begun = True

    def _write(self, tokens: Tokens) -> None:
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name).open("wb")
                self._written, self._digest = 0, hashlib.sha256()
            part, tokens = np.split(tokens, [self._shard_tokens - self._written])
            content = part.tobytes()
            self._file.write(content)
            self._digest.update(content)
            self._written += len(part)
            self.tokens += len(part)
            if self._written == self._shard_tokens:
                self._end_shard()

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05d}.bin"

    def _end_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._shards.append(TokenShard(self._name, self._written, self._digest.hexdigest()))
            self._file = None
