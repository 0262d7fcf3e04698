"""Turn text files into token shards, with a tokenizer that is given or trained on them (`halfstep data tokens`).

A document is a file, a line of a .jsonl file, or a part of a file between separators. Documents are held out whole, by
their names; a tokenizer is trained on the others alone. Imports no torch.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from halfstep.data.image_files import find_files as files_below
from halfstep.data.layout import compute_split_positions, select_validation_exactly
from halfstep.data.token_files import (
    TOKENIZER,
    VERSION,
    VERSION_WITHOUT_BEGINNINGS,
    TokenIndex,
    TokenSplit,
    TokenWriter,
    compute_sha256,
    has_tokens,
    read_token_index,
)
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData, FolderTaken, StorageFailed, WrongUse, check_packages_installed
from halfstep.files import create_folder_atomically, find_cache_folder, replace_storage_errors
from halfstep.json_data import JsonResult
from halfstep.numbers import format_bytes, format_counted_noun
from halfstep.page import Column, Page, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line
from halfstep.status_line import OnProgress

SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".py", ".pyi", ".c",
    ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh", ".sql", ".r", ".jsonl",
)  # fmt: skip
"""Files in a folder that are read as text; a file that is named itself may end as it likes."""
LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".parquet")
PIECE = 2**20
"""Characters that are tokenized at a time: a document may be larger than the memory."""
BATCH = 64
"""Pieces that are tokenized together, in parallel."""
OLDER = ("tokenizer.model", "vocab.json")
"""Files of tokenizers that transformers converts to a tokenizer.json."""
END = "<|endoftext|>"
"""The end token of a tokenizer that is trained here."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""End tokens of well-known tokenizers, where `tokenizer_config.json` names none."""
SMALLEST = 320
"""Tokens of the smallest vocabulary that is trained: all bytes, the end token, and some merges."""
TRAIN = re.compile(r"train:([0-9]{1,7})")
VAL = 0.05
SHORTEST = 1000
"""Characters of a document on its own, of which a share can be held out."""


class Document(NamedTuple):
    """A document: a name that stays where the folder is moved, and its text in pieces."""

    name: str
    pieces: Callable[[], Iterator[str]]


class SkippedDocument(NamedTuple):
    """A document that is not among the tokens, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class TokensReport(PageResult, JsonResult):
    """The tokens that were written."""

    folder: Path
    vocabulary: int
    end: str
    begin: tuple[str, ...]
    """The tokens that a document begins with."""
    dtype: str
    train: TokenSplit
    val: TokenSplit
    left_out: tuple[SkippedDocument, ...]
    notes: tuple[str, ...]

    def page(self) -> Page:
        """Return the splits, and the documents that were left out."""
        splits = {"train": self.train, "held out": self.val}
        rows = tuple(
            (name, f"{s.documents:,}", f"{s.tokens:,}", format_bytes(s.bytes), f"{s.bytes / max(s.tokens, 1):.2f}")
            for name, s in splits.items()
        )
        columns = (Column(), *(Column(head, "right") for head in ("documents", "tokens", "text", "bytes a token")))
        head = f"{escape_to_one_line(self.folder)}: {self.vocabulary:,} tokens in the vocabulary, {self.dtype}"
        lost = [f"left out: {escape_to_one_line(one.name)}: {one.reason}" for one in self.left_out[:3]]
        more = [f"and {len(self.left_out) - 3:,} more (--json)"] if len(self.left_out) > 3 else []
        notes = (self._describe_ends(), *self.notes)
        lines = (Paragraph(escape_to_one_line(line), indent=True) for line in (*notes, *lost, *more))
        return Page("tokens", (Paragraph(Span(head, strong=True), wrap=False), Table(columns, rows), *lines))

    def _describe_ends(self) -> str:
        begin = " ".join(self.begin)
        if begin == self.end:
            return f"a document begins with {begin}, the end token of the document before it"
        return f"a document begins with {begin} and ends with {self.end}"


# -- documents --------------------------------------------------------------------------------------------------------


def list_documents(places: Sequence[str | Path], separator: str | None = None) -> list[Document]:
    """Return the documents of files and folders, in order of their names; raise BadData if there are none."""
    found: dict[str, Document] = {}
    for place in places:
        for name, path in _list_text_files(Path(os.path.expanduser(place)), alone=len(places) == 1):
            for one in _iterate_documents(name, path, separator):
                if one.name in found:
                    raise BadData(
                        f"two documents have the name {one.name}",
                        allowed="names that differ: they decide which documents are held out",
                        do="give the folder above both",
                    )
                found[one.name] = one
    if not found:
        raise BadData(
            f"no text in {', '.join(map(str, places))}",
            allowed=f"text files, or a folder of files that end with {', '.join(SUFFIXES)}",
            do="name the files themselves, or rename them",
        )
    return list(found.values())


def _list_text_files(place: Path, alone: bool) -> list[tuple[str, Path]]:
    if place.is_dir():
        # With the folder's name where there are several: files of two folders may have the same one.
        under = "" if alone else f"{place.resolve().name}/"
        return [(under + Path(name).as_posix(), place / name) for name in files_below(place, SUFFIXES)]
    if not place.is_file():
        raise BadData(f"there is no file at {place}", allowed="files and folders of text", do="check the path")
    if place.suffix.lower() in PACKED:
        raise BadData(f"{place} is packed", allowed="plain text, or .jsonl with a field text", do="unpack it first")
    return [(place.name, place)]


def _iterate_documents(name: str, path: Path, separator: str | None) -> Iterator[Document]:
    if path.suffix.lower() in LINES:
        yield from _iterate_jsonl_documents(name, path)
    elif separator is None:
        yield Document(name, lambda: _iterate_file_pieces(path))
    else:
        try:
            text = "".join(_iterate_file_pieces(path))
        except (OSError, ValueError):
            yield Document(name, lambda: _iterate_file_pieces(path))  # left out with the reason
            return
        for number, part in enumerate(part for part in text.split(separator) if part.strip()):
            yield _build_memory_document(f"{name}#{number}", part)


def _build_memory_document(name: str, text: str) -> Document:
    return Document(name, lambda: _iterate_text_pieces(text))


def _iterate_jsonl_documents(name: str, path: Path) -> Iterator[Document]:
    """Yield the lines of a .jsonl file; each is read again when it is used."""
    with path.open("rb") as file:
        place = 0
        for number, line in enumerate(file):
            start, place = place, place + len(line)
            if line.strip():
                yield Document(f"{name}#{number}", _build_line_reader(path, start, len(line)))


def _build_line_reader(path: Path, start: int, length: int) -> Callable[[], Iterator[str]]:
    def read() -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(start)
            line = file.read(length)
        found = json.loads(line)
        text = found.get("text") if isinstance(found, dict) else found
        if not isinstance(text, str):
            raise ValueError("no field text" + (f", but {', '.join(found)}" if isinstance(found, dict) else ""))
        return _iterate_text_pieces(text)

    return read


def _iterate_file_pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces; raise ValueError if it is no UTF-8, or no text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held = ""
    with path.open("rb") as file:
        while block := file.read(PIECE):
            if b"\0" in block:
                raise ValueError("not text: it contains NUL bytes")
            *whole, held = _iterate_text_pieces(held + decoder.decode(block))
            yield from whole
    held += decoder.decode(b"", final=True)
    if held:
        yield held


_JSON = re.compile(r'\s*(\[\s*)?\{\s*"')
"""The beginning of JSON with objects."""
_LINE_START = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S\r)(?=\n\S)")
"""A place where a text can be cut without another tokenization of its parts."""


def _iterate_text_pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of about `PIECE` characters, cut at the beginning of a line."""
    start = 0
    while len(text) - start > 2 * PIECE:
        found = _LINE_START.search(text, start + PIECE, start + 2 * PIECE)
        at = found.start() if found else start + PIECE
        yield text[start:at]
        start = at
    yield text[start:]


# -- tokenizers -------------------------------------------------------------------------------------------------------


class EndedTokenizer(NamedTuple):
    """A tokenizer of the package tokenizers, and the token that ends a document."""

    tokenizer: Any
    end: int


def _import_tokenizers() -> Any:
    check_packages_installed("tokenizers")
    import tokenizers

    return tokenizers


def read_ended_tokenizer(place: str | Path, end: str | None = None) -> EndedTokenizer:
    """Return the tokenizer in a `tokenizer.json`, or in a folder that has one, and its end token."""
    tokenizer, path = read_tokenizer(place), Path(os.path.expanduser(place))
    return EndedTokenizer(tokenizer, _resolve_end_token(tokenizer, path / TOKENIZER if path.is_dir() else path, end))


def read_tokenizer(place: str | Path) -> Any:
    """Return the tokenizer in a `tokenizer.json`, or in a folder that has one."""
    path = Path(os.path.expanduser(place))
    path = path / TOKENIZER if path.is_dir() else path
    package = _import_tokenizers()
    if not path.is_file():
        older = any((path.parent / name).is_file() for name in OLDER)
        write = f"A.from_pretrained('{path.parent}').save_pretrained('{path.parent}')"
        raise BadData(
            f"there is no tokenizer at {path}",
            allowed="a tokenizer.json, a folder that has one, or train:4096",
            do=f'write it: python -c "from transformers import AutoTokenizer as A; {write}"'
            if older
            else "write --tokenizer train:4096, or give the file of the base that you will train",
        )
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise BadData(
            f"{path} is no tokenizer: {str(error)[:120]}",
            allowed="a tokenizer.json, as transformers and tokenizers save it",
            do="copy it again, or save it with tokenizer.save_pretrained(FOLDER)",
        ) from error
    return prepare_tokenizer(tokenizer)


def prepare_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer that reads all of a text, as text."""
    # Text that spells a special token stays text: no document ends because it mentions the end token.
    tokenizer.encode_special_tokens = True
    # Some files keep the settings of a training: every document would be cut to its length, or filled to it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_document_beginning(tokenizer: Any, end: int) -> tuple[int, ...]:
    """Return the tokens that a document begins with.

    They are those that the tokenizer's post-processor puts before a text, or else the end token of the document before.
    """
    encoded = tokenizer.encode(find_known_text(tokenizer), add_special_tokens=True)
    marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return tuple(token for token, _ in takewhile(lambda one: one[1], marked)) or (end,)


def _resolve_end_token(tokenizer: Any, path: Path, given: str | None) -> int:
    names = [given] if given is not None else [*_read_end_tokens(path), *ENDS]
    for name in names:
        number: int | None = tokenizer.token_to_id(name)
        if number is not None:
            return number
    raise BadData(
        f"{path} has no token {given!r}" if given is not None else f"{path} names no token that ends a document",
        allowed="a token of its vocabulary",
        do=f"write --end TOKEN, such as {ENDS[0]} or {ENDS[2]}",
    )


def _read_end_tokens(path: Path) -> list[str]:
    try:
        found = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return []
    named = found.get("content") if isinstance(found, dict) else found
    return [named] if isinstance(named, str) else []


_LONG_WORD = re.compile(r"\S{256}")


def find_known_text(tokenizer: Any) -> str:
    """Return a text that has tokens: a vocabulary of proteins does not know every letter."""
    decoded = (str(tokenizer.decode([token])) for token in sorted(tokenizer.get_vocab().values()))
    for text in chain(("a",), decoded):
        with suppress(Exception):  # the package raises plain Exception for a word that it does not know
            if text and tokenizer.encode(text, add_special_tokens=False).ids:
                return text
    return ""


def train_tokenizer(
    documents: Iterable[Document], vocabulary: int, end: str = END, version: int = VERSION
) -> EndedTokenizer:
    """Return a byte-level BPE tokenizer, trained on these documents; the end token is number 0, and begins a text."""
    package = _import_tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for one in documents for piece in _iterate_readable_pieces(one))
    # The trainer's time grows with the square of a word: a line of base64 or of DNA would take hours.
    tokenizer.train_from_iterator((_LONG_WORD.sub(r"\g<0> ", piece) for piece in pieces), trainer)
    tokenizer.encode_special_tokens = True
    if version > VERSION_WITHOUT_BEGINNINGS and not set(end) & set(":$"):  # signs of the language of templates
        # What reads the tokenizer elsewhere begins a text as the training does.
        tokenizer.post_processor = package.processors.TemplateProcessing(
            single=[end, "$A"], pair=[end, "$A", "$B:1"], special_tokens=[(end, 0)]
        )
    return EndedTokenizer(tokenizer, 0)


def _iterate_readable_pieces(document: Document) -> Iterator[str]:
    try:
        yield from document.pieces()
    except (OSError, ValueError):
        return  # it is named where it would have been tokenized


# -- writing ----------------------------------------------------------------------------------------------------------


def write_tokens(
    places: Sequence[str | Path],
    tokenizer: str,
    out: Path,
    *,
    val: float = VAL,
    end: str | None = None,
    separator: str | None = None,
    version: int = VERSION,
    on_progress: OnProgress = lambda done, of: None,
) -> TokensReport:
    """Write the tokens of all documents to a new folder, complete or not at all, and return the report.

    `version` is that of the index; runs that began with an earlier one need its tokens to resume.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FolderTaken(f"{out} already exists", allowed="a new folder", do="give --out FOLDER, another name")
    asked = TRAIN.fullmatch(tokenizer)
    if asked and int(asked[1]) < SMALLEST:
        raise WrongUse(
            f"--tokenizer {tokenizer}", allowed=f"{SMALLEST} tokens or more", do=f"--tokenizer train:{SMALLEST}"
        )
    if not asked:
        opened = read_ended_tokenizer(tokenizer, end)
    documents, left_out, notes = _select_with_text(list_documents(places, separator))
    if len(documents) == 1:
        documents = _divide_document(documents[0], val)
        notes.append(f"one document: its last {val:.0%} is held out; --separator TEXT divides it into documents")
        held = {1}
    else:
        held = select_validation_exactly(compute_split_positions(one.name for one in documents), val)
    if asked:
        own = (one for number, one in enumerate(documents) if number not in held)
        opened = train_tokenizer(own, int(asked[1]), end or END, version)
    with (
        replace_storage_errors(
            f"{out} cannot be written",
            allowed="a writable folder with room for the tokens",
            do="give --out FOLDER, a writable path",
        ),
        create_folder_atomically(out) as draft,
    ):
        failed, inner_marks = _write_documents(documents, held, opened, draft, version, on_progress)
        left_out += failed
        index = read_token_index(draft)
        _refuse_empty(index, left_out, out)
    names = {token: opened.tokenizer.id_to_token(token) for token in (opened.end, *(index.begin or ()))}
    for token, count in inner_marks.items():
        many = format_counted_noun(count, "document")
        part = f"the end token {names[token]}; --end TOKEN names another"
        if token != opened.end:
            part = f"the token {names[token]}, with which a document begins"
        notes.append(f"{many} more in a run: the text itself has {part}")
    begin = tuple(names[token] for token in index.begin or ())
    found = tuple(left_out), tuple(notes)
    return TokensReport(out, index.vocabulary, names[opened.end], begin, index.dtype, index.train, index.val, *found)


def _select_with_text(documents: Sequence[Document]) -> tuple[list[Document], list[SkippedDocument], list[str]]:
    """Return the documents with text, of which a share is held out, the others, and notes.

    Raise BadData if none has text.
    """
    found, left_out, json_text = list[Document](), list[SkippedDocument](), list[str]()
    for document in documents:
        try:
            pieces = document.pieces()
            first = next(pieces, "")
            if first.strip() or next(pieces, ""):
                found.append(document)
            else:
                left_out.append(SkippedDocument(document.name, "empty"))
            if "#" not in document.name and _JSON.match(first):
                json_text.append(document.name)
        except (OSError, ValueError) as error:
            left_out.append(SkippedDocument(document.name, _describe_read_error(error)))
    if not found:
        raise BadData(
            f"no document has text; {left_out[0].name}: {left_out[0].reason}",
            allowed="text in UTF-8; in a .jsonl file, lines with a field text",
            do="add documents, rename the field, or convert them: iconv -f latin1 -t utf-8 FILE",
        )
    notes = [
        f"{format_counted_noun(len(json_text), 'file')} of JSON read as plain text, such as {name}; in a .jsonl "
        "file, the field "
        "text of each line is a document"
        for name in json_text[:1]
    ]
    return found, left_out, notes


def _refuse_empty(index: TokenIndex, left_out: Sequence[SkippedDocument], out: Path) -> None:
    for name, split in (("train", index.train), ("held-out", index.val)):
        if not split.documents:
            why = f"; {left_out[0].name}: {left_out[0].reason}" if left_out else ""
            raise BadData(
                f"{out}: no {name} document has text{why}",
                allowed="text on both sides",
                do="add documents, or hold out another share: --val 0.1",
            )


def _divide_document(document: Document, val: float) -> list[Document]:
    """Return the first part and the last share of a document, divided at the beginning of a line."""
    try:
        text = "".join(document.pieces())
    except (OSError, ValueError) as error:
        raise BadData(
            f"{document.name}: {_describe_read_error(error)}", allowed="text in UTF-8", do="convert it, or add files"
        ) from error
    if len(text) < SHORTEST:
        raise BadData(
            f"{document.name} is the only document, and has {len(text):,} characters",
            allowed=f"several documents, or one of {SHORTEST:,} characters or more",
            do="add files",
        )
    at = round(len(text) * (1.0 - val))
    found = text.find("\n", at)
    at = found + 1 if 0 <= found < len(text) - 1 else at
    return [
        _build_memory_document(f"{document.name}#0", text[:at]),
        _build_memory_document(f"{document.name}#1", text[at:]),
    ]


def _write_documents(
    documents: Sequence[Document],
    held: set[int],
    opened: EndedTokenizer,
    folder: Path,
    version: int,
    on_progress: OnProgress,
) -> tuple[list[SkippedDocument], Counter[int]]:
    """Write all documents; return those that are left out, and how often their text has the tokens around them."""
    tokenizer, end = opened
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    dtype: Literal["uint16", "uint32"] = "uint16" if vocabulary <= 2**16 else "uint32"
    begin = None if version == VERSION_WITHOUT_BEGINNINGS else find_document_beginning(tokenizer, end)
    empty = TokenSplit(0, 0, 0, ())
    index = TokenIndex(version, dtype, vocabulary, end, "", empty, empty, begin)
    train, val = (TokenWriter(folder, split, dtype, end, begin=index.written_begin) for split in ("train", "val"))
    left_out: list[SkippedDocument] = []
    batch: list[_Piece] = []
    for number, document in enumerate(documents):
        writer = val if number in held else train
        try:
            # A document of more than one piece is written as it is read: it may be larger than the memory.
            pieces = document.pieces()
            first, second = next(pieces, ""), next(pieces, None)
        except (OSError, ValueError) as error:
            left_out.append(SkippedDocument(document.name, _describe_read_error(error)))
            continue
        if second is None:
            batch.append(_Piece(writer, document.name, first))
        else:
            _write_batch(batch, tokenizer)
            left_out += _write_large_document(writer, document.name, chain((first, second), pieces), tokenizer)
        if len(batch) >= BATCH:
            _write_batch(batch, tokenizer)
        on_progress(number + 1, len(documents))
    _write_batch(batch, tokenizer)
    tokenizer.save(str(folder / TOKENIZER), pretty=False)
    digest = compute_sha256(folder / TOKENIZER)
    replace(index, tokenizer=digest, train=train.close(), val=val.close()).write(folder)
    return left_out, +(train.inner_marks + val.inner_marks)


class _Piece(NamedTuple):
    writer: TokenWriter
    name: str
    text: str


def _write_batch(batch: list[_Piece], tokenizer: Any) -> None:
    found = tokenizer.encode_batch([one.text for one in batch], add_special_tokens=False) if batch else []
    for one, encoded in zip(batch, found, strict=True):
        one.writer.add(encoded.ids, len(one.text.encode()))
        one.writer.end_document(one.name)
    batch.clear()


def _write_large_document(
    writer: TokenWriter, name: str, pieces: Iterator[str], tokenizer: Any
) -> Iterator[SkippedDocument]:
    try:
        for text in pieces:
            writer.add(tokenizer.encode(text, add_special_tokens=False).ids, len(text.encode()))
    except (OSError, ValueError) as error:
        yield SkippedDocument(name, f"all but its beginning: {_describe_read_error(error)}")
    writer.end_document(name)


def _describe_read_error(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8, at byte {error.start:,} of a block"
    return getattr(error, "strerror", None) or str(error)[:120] or type(error).__name__


# -- Python's own text ------------------------------------------------------------------------------------------------


def write_python_tokens(files: int, vocabulary: int, version: int = VERSION) -> Path:
    """Return a folder with the tokens of Python's own standard library, made once and kept in the cache.

    `version` is that of the index, as in `write_tokens`.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [folder / name for name in sorted(os.listdir(folder)) if name.endswith(".py")][:files]
    if len(found) < 2:
        raise BadData(
            f"{folder} has no source files of Python's standard library",
            allowed="a Python with its standard library as text",
            do="make tokens from your text: halfstep data tokens FILES --tokenizer train:4096 --out FOLDER",
        )
    python = ".".join(map(str, sys.version_info[:3]))
    place = find_cache_folder() / "tokens" / f"python-{python}-{len(found)}-{vocabulary}-{version}"
    if has_tokens(place):
        return place
    try:
        write_tokens(found, f"train:{vocabulary}", place, val=0.1, version=version)
    except (StorageFailed, FolderTaken):
        if not has_tokens(place):  # another rank was first, or there is no cache: for this process alone
            place = Path(tempfile.mkdtemp(prefix="halfstep-tokens-")) / "python"
            write_tokens(found, f"train:{vocabulary}", place, val=0.1, version=version)
    return place
