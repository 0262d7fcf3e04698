"""Check a folder of tokens: every shard against its digest, every token, and text that is on both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halfstep.data.check.page import Fault, build_finding_blocks, describe_verdict
from halfstep.data.token_files import (
    INDEX,
    SPLITS,
    TOKENIZER,
    TokenArray,
    TokenIndex,
    Tokens,
    compute_sha256,
    format_tokens_command,
    read_token_index,
)
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData
from halfstep.json_data import JsonResult
from halfstep.numbers import format_bytes
from halfstep.page import Column, Page, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line
from halfstep.status_line import OnProgress

RUN = 32
"""Tokens in a row that are searched for on the other side: chance does not repeat so many."""
MOST_SEARCHED = 2_000_000
"""Runs of held-out tokens that are searched for; of more, the first."""
WHOLE, PART = 0.5, 0.1
"""The share of a held-out document found in train from which it is a copy, and from which it is worth a look."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class SplitFacts(NamedTuple):
    """The size of a split."""

    documents: int
    tokens: int
    bytes: int
    median: int
    """Tokens of the median document."""


@dataclass(frozen=True)
class CheckedTokens(PageResult, JsonResult):
    """The facts of a folder of tokens, and everything that is wrong with it."""

    folder: Path
    ok: bool
    vocabulary: int
    unused: int
    """Tokens of the vocabulary that do not occur in train."""
    splits: dict[str, SplitFacts]
    findings: tuple[Fault, ...]

    def page(self) -> Page:
        """Return the facts, the faults and the verdict."""
        columns = (
            Column(),
            *(Column(head, "right") for head in ("documents", "tokens", "text", "bytes a token", "median")),
        )
        rows = tuple(
            (
                name,
                f"{s.documents:,}",
                f"{s.tokens:,}",
                format_bytes(s.bytes),
                f"{s.bytes / max(s.tokens, 1):.2f}",
                str(s.median),
            )
            for name, s in self.splits.items()
        )
        head = (
            f"{escape_to_one_line(self.folder)}: tokens, {self.vocabulary:,} in the vocabulary, {self.unused:,} unused"
        )
        return Page(
            f"tokens in {self.folder}",
            (
                Paragraph(Span(head, strong=True), wrap=False),
                Table(columns, rows),
                *build_finding_blocks(self.findings, self.folder),
                Paragraph(describe_verdict(self.findings), gap=True),
            ),
        )


def check_tokens(folder: Path, on_progress: OnProgress = lambda done, of: None) -> CheckedTokens:
    """Read all tokens of a folder, and return its facts and findings; raise BadData if they cannot be read."""
    index = read_token_index(folder)
    arrays = {split: TokenArray(folder, split, index) for split in SPLITS}
    total = sum(map(len, arrays.values())) * 2
    looked: dict[str, _SplitScan] = {}
    done = 0
    for split, tokens in arrays.items():
        looked[split] = _scan_split(tokens, index)
        done += len(tokens)
        on_progress(done, total)
    found_in_train = _measure_train_overlap(arrays["train"], arrays["val"])
    on_progress(total, total)
    faults = list(_iterate_faults(folder, index, looked, found_in_train))
    train = looked["train"]
    return CheckedTokens(
        folder=folder,
        ok=all(fault.severity != "error" for fault in faults),
        vocabulary=index.vocabulary,
        unused=int((train.counts[: index.vocabulary] == 0).sum()),
        splits={name: one.facts for name, one in looked.items()},
        findings=tuple(sorted(faults, key=lambda fault: ("error", "warning", "note").index(fault.severity))),
    )


class _SplitScan(NamedTuple):
    facts: SplitFacts
    counts: Tokens
    """How often each token occurs."""
    unbegun: list[str]
    unended: list[str]
    empty: list[str]
    digests: dict[str, bytes]
    """A digest of the tokens of each document that has some, by name."""
    damaged: list[str]


def _scan_split(tokens: TokenArray, index: TokenIndex) -> _SplitScan:
    damaged = [
        shard.file for shard in tokens.facts.shards if compute_sha256(tokens.folder / shard.file) != shard.sha256
    ]
    ends, names = tokens.documents(), tokens.names()
    if len(names) != len(ends) or (len(ends) and (ends[-1] != len(tokens) or (np.diff(ends) <= 0).any())):
        raise BadData(
            f"{tokens.folder}: the table of documents of {tokens.split} does not fit its tokens",
            allowed="a folder that halfstep data tokens wrote",
            do=f"make the tokens again: {format_tokens_command('FILES', tokens.folder)}",
        )
    counts = np.zeros(np.iinfo(index.dtype).max + 1 if index.dtype == "uint16" else index.vocabulary + 1, np.int64)
    for _, block in tokens.blocks():
        # Larger ones are counted together in the last place: a table of all of uint32 would take 32 GB.
        found = np.bincount(np.minimum(block, len(counts) - 1), minlength=len(counts))
        counts += found
    starts = [0, *ends[:-1].tolist()]
    begin = np.asarray(index.written_begin, tokens.dtype)
    unbegun, unended, empty, digests = [], [], [], {}
    for name, start, stop in zip(names, starts, ends.tolist(), strict=True):
        whole = tokens.read(start, stop)
        document = whole[len(begin) :]
        if not np.array_equal(whole[: len(begin)], begin):
            unbegun.append(name)
        if not len(document) or document[-1] != index.end or (document[:-1] == index.end).any():
            unended.append(name)
        if (document == index.end).all():
            empty.append(name)
        else:
            digests[name] = blake2b(document.tobytes(), digest_size=16).digest()
    median = int(np.median(np.diff(ends, prepend=0))) if len(ends) else 0
    facts = SplitFacts(len(ends), len(tokens), tokens.facts.bytes, median)
    return _SplitScan(facts, counts, unbegun, unended, empty, digests, damaged)


def _measure_train_overlap(train: TokenArray, val: TokenArray) -> dict[str, float]:
    """Return the share of each held-out document that is also in train, in runs of `RUN` tokens; 0 is left out."""
    ends, names = val.documents().tolist(), val.names()
    owners: list[int] = []
    runs: list[int] = []
    for number, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        # Without the tokens around the text, and one run after another: a copy of a document has all of them.
        own = _compute_run_hashes(val.read(start + len(val.index.written_begin), stop - 1))[::RUN]
        owners += [number] * len(own)
        runs += own.tolist()
        if len(runs) >= MOST_SEARCHED:
            break
    wanted = np.unique(np.asarray(runs, np.uint64))
    seen = np.zeros(len(wanted), bool)
    for _, block in train.blocks(overlap=RUN - 1):
        hashes = _compute_run_hashes(block)
        if len(wanted) and len(hashes):
            places = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
            seen[places[wanted[places] == hashes]] = True
    known = set(wanted[seen].tolist())
    totals, found = Counter(owners), Counter(o for o, run in zip(owners, runs, strict=True) if run in known)
    return {names[number]: found[number] / totals[number] for number in found}


def _compute_run_hashes(tokens: Tokens) -> Tokens:
    """Return a hash of each run of `RUN` tokens, by doubling; 64 bits, in which sums wrap."""
    found, length, factor = tokens.astype(np.uint64) + np.uint64(1), 1, _FACTOR
    with np.errstate(over="ignore"):
        while length < RUN:
            if len(found) <= length:
                return np.empty(0, np.uint64)
            found = found[:-length] * factor + found[length:]
            factor, length = factor * factor, length * 2
    return found


def _iterate_faults(
    folder: Path, index: TokenIndex, looked: dict[str, _SplitScan], in_train: dict[str, float]
) -> Iterator[Fault]:
    def fault(id: str, severity: Any, evidence: str, fix: str, files: list[str]) -> Iterator[Fault]:
        if files:
            yield Fault(id, severity, evidence, fix, tuple(files))

    every = list(looked.values())
    has_own = (folder / TOKENIZER).is_file() and compute_sha256(folder / TOKENIZER) == index.tokenizer
    # A model that was trained on the tokens needs the same ones again.
    made = {"tokenizer": str(folder / TOKENIZER)} if has_own else {}
    again = f"make the tokens again: {format_tokens_command('FILES', folder, **made)}"
    if not has_own:
        yield Fault("tokenizer-changed", "error", "these tokens come from another tokenizer", again, (TOKENIZER,))
    yield from fault(
        "shard-damaged", "error", "shard that differs from its digest", again, [n for o in every for n in o.damaged]
    )
    outside = [name for name, one in looked.items() if one.counts[index.vocabulary :].any()]
    yield from fault("outside-vocabulary", "error", "split with tokens beyond the vocabulary", again, outside)
    if index.begin is None:
        yield Fault(
            "no-beginnings",
            "warning",
            "documents without a beginning, of an earlier version: a model does not learn how a text begins",
            again,
            (INDEX,),
        )
    yield from fault(
        "not-begun",
        "error",
        "document that does not begin with the tokens of the index",
        again,
        [n for o in every for n in o.unbegun],
    )
    yield from fault(
        "not-ended",
        "error",
        "document that does not end with a single end token",
        again,
        [n for o in every for n in o.unended],
    )
    yield from fault("empty-document", "warning", "document without text", "remove them, and " + again,
                     [n for o in every for n in o.empty])  # fmt: skip
    train, val = looked["train"].digests, looked["val"].digests
    by_digest = {digest: name for name, digest in train.items()}
    both = [f"{name} = {by_digest[digest]}" for name, digest in val.items() if digest in by_digest]
    copied = [
        f"{n}: {share:.0%} of it" for n, share in in_train.items() if share >= WHOLE and val.get(n) not in by_digest
    ]
    advice = "keep one of each: metrics on held-out text would be too good"
    yield from fault("held-out-in-train", "error", "held-out document that is also in train", advice, [*both, *copied])
    partly = [f"{name}: {share:.0%} of it" for name, share in in_train.items() if PART <= share < WHOLE]
    yield from fault("held-out-partly", "warning", "held-out document with text of train", "look at them", partly)
    twice = []
    for one in every:
        first: dict[bytes, str] = {}
        twice += [f"{n} = {first[d]}" for n, d in one.digests.items() if first.setdefault(d, n) != n]
    yield from fault("duplicates", "warning", "duplicated document", "keep one of each", twice)
