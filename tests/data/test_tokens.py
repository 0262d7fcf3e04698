"""Token shards: documents in, the same numbers out, the same windows at any number of ranks and after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

import itertools

from halfstep.data import token_files, tokenizing
from halfstep.data.check.tokens import check_tokens
from halfstep.data.dataset import Order, Samples
from halfstep.data.fingerprint import fingerprint
from halfstep.data.loader import TrainLoader
from halfstep.data.token_files import (
    INDEX,
    TokenArray,
    TokenIndex,
    TokenShard,
    TokenSplit,
    TokenWriter,
    read_token_index,
)
from halfstep.data.token_windows import FILLER, TokenWindows
from halfstep.data.tokenizing import (
    Document,
    TokensReport,
    find_document_beginning,
    list_documents,
    read_ended_tokenizer,
    read_tokenizer,
    train_tokenizer,
    write_tokens,
)
from halfstep.errors import BadData, BadSample, FolderTaken, MissingExtra, WrongUse
from halfstep.files import write_text

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and"),
    *("runs", "away", "from", "all", "of", "them", "while", "nobody", "looks"),
]


def sentence(number: int, words: int = 40) -> str:
    draw = np.random.default_rng(number)
    return " ".join(draw.choice(WORDS, words)) + f" {number}.\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text("".join(sentence(100 * number + n) for n in range(20)))
    return folder


@pytest.fixture(scope="module")
def written(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokensReport:
    return write_tokens([corpus], "train:400", tmp_path_factory.mktemp("out") / "tokens", val=0.1)


def texts_of(folder: Path, split: str) -> dict[str, str]:
    tokens, tokenizer = TokenArray(folder, split), read_tokenizer(folder)
    ends = tokens.documents().tolist()
    read = (tokens.read(a, b).tolist() for a, b in zip([0, *ends[:-1]], ends, strict=True))
    return {
        name: tokenizer.decode(one[:-1], skip_special_tokens=False)
        for name, one in zip(tokens.names(), read, strict=True)
        if one[-1] == tokens.index.end
    }


def test_every_document_comes_back_as_it_was_on_one_side(corpus: Path, written: TokensReport) -> None:
    train, val = (texts_of(written.folder, split) for split in ("train", "val"))
    assert len(val) == 4
    assert not train.keys() & val.keys()
    assert {**train, **val} == {path.name: path.read_text() for path in corpus.iterdir()}
    assert written.train.bytes + written.val.bytes == sum(path.stat().st_size for path in corpus.iterdir())
    assert written.dtype == "uint16"
    assert written.left_out == ()


def test_more_documents_move_no_other_to_the_other_side(corpus: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": sentence(number)}) for number in range(2000)]
    held = []
    for count in (1500, 2000):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:count]))
        out = tmp_path / f"out-{count}"
        write_tokens([tmp_path / "a.jsonl"], "train:400", out)
        held.append({one for one in TokenArray(out, "val").names() if int(one.partition("#")[2]) < 1500})
    assert held[0] == held[1]
    assert 30 < len(held[0]) < 130


def test_the_tokenizer_is_trained_without_held_out_text(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    for path in corpus.iterdir():
        (folder / path.name).write_text(path.read_text())
    report = write_tokens([folder], "train:600", tmp_path / "first")
    [held, *_] = TokenArray(report.folder, "val").names()
    (folder / Path(held).name).write_text("xylophonexylophone " * 2000)
    again = write_tokens([folder], "train:600", tmp_path / "second")
    assert held in TokenArray(again.folder, "val").names()
    first, second = (read_tokenizer(one.folder).get_vocab() for one in (report, again))
    assert first == second


def test_text_that_spells_the_end_token_ends_nothing(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{sentence(number)}<|endoftext|>{sentence(number + 9)}")
    report = write_tokens([tmp_path], "train:400", tmp_path / "out", val=0.3)
    for split in ("train", "val"):
        tokens = TokenArray(report.folder, split)
        assert (tokens.read(0, len(tokens)) == tokens.index.end).sum() == tokens.facts.documents
        assert all("<|endoftext|>" in text for text in texts_of(report.folder, split).values())


@pytest.mark.wording
def test_an_end_token_that_is_a_word_of_the_text_is_noted(corpus: Path, written: TokensReport, tmp_path: Path) -> None:
    report = write_tokens([corpus], str(written.folder), tmp_path / "out", end="a")
    assert any("end token a" in note for note in report.notes)
    assert not written.notes


def test_one_file_is_divided_by_a_separator_or_by_its_end(tmp_path: Path) -> None:
    stories = [sentence(number) for number in range(30)]
    (tmp_path / "stories.txt").write_text("<|endoftext|>\n".join(stories))
    divided = write_tokens([tmp_path / "stories.txt"], "train:400", tmp_path / "a", separator="<|endoftext|>\n")
    assert divided.train.documents + divided.val.documents == 30
    assert sorted({**texts_of(tmp_path / "a", "train"), **texts_of(tmp_path / "a", "val")}.values()) == sorted(stories)
    whole = write_tokens([tmp_path / "stories.txt"], "train:400", tmp_path / "b", val=0.2)
    assert (whole.train.documents, whole.val.documents) == (1, 1)
    first, last = (texts_of(tmp_path / "b", split).popitem()[1] for split in ("train", "val"))
    assert first + last == (tmp_path / "stories.txt").read_text()
    assert 0.1 < len(last) / len(first + last) < 0.25
    assert "held out" in whole.notes[0]


def test_what_is_no_text_is_left_out_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(sentence(number))
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbf" + sentence(7).encode())
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (folder / "binary.txt").write_bytes(b"PK\0\0")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "bad.jsonl").write_text('{"text": "good line of text"}\n{"body": 1}\nno json\n\n')
    report = write_tokens([folder], "train:400", tmp_path / "out", val=0.3)
    left_out = {one.name: one.reason for one in report.left_out}
    assert left_out.keys() == {"empty.txt", "latin.txt", "binary.txt", "bad.jsonl#1", "bad.jsonl#2"}
    assert "UTF-8" in left_out["latin.txt"]
    texts = {**texts_of(report.folder, "train"), **texts_of(report.folder, "val")}
    assert texts["bom.txt"] == sentence(7)
    assert texts["bad.jsonl#0"] == "good line of text"


@pytest.mark.wording
def test_json_that_is_read_as_text_is_noted_and_a_missing_field_named(corpus: Path, tmp_path: Path) -> None:
    rows = [{"content": sentence(number), "id": number} for number in range(40)]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    report = write_tokens([tmp_path / "list.json", corpus], "train:400", tmp_path / "out")
    assert "such as list.json" in report.notes[0]
    assert not write_tokens([corpus], "train:400", tmp_path / "plain").notes
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(BadData, match="no field text, but content, id"):
        write_tokens([tmp_path / "rows.jsonl"], "train:400", tmp_path / "rows")


def test_a_share_is_held_out_of_the_documents_with_text(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(20):
        (folder / f"blank{number}.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    for refused in (folder, folder / "latin.txt"):
        with pytest.raises(BadData):
            write_tokens([refused], "train:400", tmp_path / "out")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{sentence(number)}---{sentence(number + 50)}")
    report = write_tokens([folder], "train:400", tmp_path / "out")
    assert (report.train.documents, report.val.documents, len(report.left_out)) == (2, 1, 21)
    report = write_tokens([folder], "train:400", tmp_path / "divided", separator="---")
    assert report.train.documents + report.val.documents == 6
    assert [one.name for one in report.left_out] == ["latin.txt"]


def test_a_document_larger_than_a_piece_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 500)
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 300)
    monkeypatch.setattr(TokenWriter.__init__, "__defaults__", (300,))
    text = "".join(sentence(number) + "é" * (number % 3) for number in range(60))
    (tmp_path / "large.txt").write_text(text)
    (tmp_path / "small.txt").write_text(sentence(1))
    report = write_tokens([tmp_path / "large.txt", tmp_path / "small.txt"], "train:400", tmp_path / "out", val=0.5)
    assert max(len(report.train.shards), len(report.val.shards)) > 3
    texts = {**texts_of(report.folder, "train"), **texts_of(report.folder, "val")}
    assert texts == {"large.txt": text, "small.txt": sentence(1)}


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_document_in_pieces_has_the_tokens_of_the_whole(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(sentence(number) for number in range(60)).replace("\n", ends)
    for number in range(2):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    monkeypatch.setattr(tokenizing, "PIECE", 500)
    report = write_tokens([tmp_path / "0.txt", tmp_path / "1.txt"], "train:400", tmp_path / "out", val=0.5)
    whole = read_tokenizer(report.folder).encode(text, add_special_tokens=False).ids
    for split in ("train", "val"):
        assert TokenArray(report.folder, split).read(0, len(whole) + 1).tolist() == [*whole, 0]


def test_a_long_word_does_not_delay_the_training_of_a_tokenizer() -> None:
    text = sentence(1) * 20 + "ACGT" * 15_000
    begin = time.process_time()
    tokenizer, _ = train_tokenizer([Document("dna", lambda: iter([text]))], 400)
    assert time.process_time() - begin < 2.0
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_folder_that_is_taken_and_a_failed_run_leave_nothing(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    write_text(tmp_path / "taken" / "mine.txt", "mine")
    with pytest.raises(FolderTaken):
        write_tokens([corpus], "train:400", tmp_path / "taken")
    (tmp_path / "empty").mkdir()
    for name in "ab":
        (tmp_path / "empty" / f"{name}.txt").write_text(" ")
    with pytest.raises(BadData):
        write_tokens([tmp_path / "empty"], "train:400", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "taken"]


def test_wrong_words_are_refused(corpus: Path, written: TokensReport, tmp_path: Path) -> None:
    for tokenizer, error in {"train:10": WrongUse, "nowhere.json": BadData, str(corpus / "00.txt"): BadData}.items():
        with pytest.raises(error):
            write_tokens([corpus], tokenizer, tmp_path / "out")
    with pytest.raises(BadData):
        read_ended_tokenizer(written.folder, "<eot>")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "tokenizer.model").write_bytes(b"")
    with pytest.raises(BadData) as refused:
        read_ended_tokenizer(tmp_path / "older")
    assert "save_pretrained" in refused.value.do
    with pytest.raises(BadData):
        list_documents([tmp_path / "nothing.txt"])
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(BadData):
        list_documents([tmp_path / "a.txt.gz"])


def test_the_end_token_of_a_given_tokenizer(written: TokensReport, tmp_path: Path) -> None:
    for name in ("tokenizer.json",):
        (tmp_path / name).write_bytes((written.folder / name).read_bytes())
    assert read_ended_tokenizer(tmp_path).end == 0
    assert read_ended_tokenizer(tmp_path / "tokenizer.json", "a").end == read_tokenizer(tmp_path).token_to_id("a")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert read_ended_tokenizer(tmp_path).end == read_tokenizer(tmp_path).token_to_id("b")


@pytest.mark.wording
def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match="text"):
        write_tokens([corpus], "train:400", tmp_path / "out")


# -- the beginning of a document ---------------------------------------------------------------------------------------


def tokenizer_folder(folder: Path, *before: str, after: str = "") -> Path:
    """A tokenizer whose post-processor puts tokens around a text: <bos>, <eos> and <sop> are 0, 1 and 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<bos>", "<eos>", "<sop>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["".join(map(sentence, range(40)))], trainer)
    if before or after:
        template = [*before, "$A", *filter(None, [after])]
        tokens = [(name, special.index(name)) for name in special]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=tokens
        )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return folder


@pytest.mark.parametrize(
    ("before", "after", "begin", "written"),
    [
        (("<bos>",), "", (0,), [0]),
        (("<bos>",), "<eos>", (0,), [0]),
        (("<bos>", "<sop>"), "", (0, 2), [0, 2]),
        (("<eos>",), "", (1,), []),  # the end token of the document before
        ((), "", (1,), []),
        ((), "<eos>", (1,), []),
    ],
)
def test_a_document_begins_once_with_what_the_post_processor_puts_there(
    before: tuple[str, ...],
    after: str,
    begin: tuple[int, ...],
    written: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 500)  # the long document is tokenized in pieces
    texts = {"long.txt": "".join(map(sentence, range(30))), **{f"{n}.txt": f"<bos>{sentence(n)}" for n in range(5)}}
    (tmp_path / "texts").mkdir()
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text)
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", *before, after=after)
    report = write_tokens([tmp_path / "texts"], str(tokenizer), tmp_path / "out", val=0.2)
    index = read_token_index(tmp_path / "out")
    assert index.begin == begin
    plain = read_tokenizer(tokenizer)
    for split in ("train", "val"):
        tokens = TokenArray(report.folder, split)
        expected = []
        for name in tokens.names():
            expected += [*written, *plain.encode(texts[name], add_special_tokens=False).ids, 1]
        assert tokens.read(0, len(tokens)).tolist() == expected
        assert index.count_targets(split) == len(expected) - len(written) * index.split(split).documents
    assert not any(fault.severity == "error" for fault in check_tokens(tmp_path / "out").findings)
    assert "begins with " + " ".join(("<bos>", "<eos>", "<sop>")[token] for token in begin) in str(report)


@pytest.mark.parametrize("kind", ["drops", "raises", "has <unk>"])
def test_a_vocabulary_that_does_not_know_every_letter_has_a_beginning_too(kind: str) -> None:
    from tokenizers import Tokenizer, models, processors

    known = {"<bos>": 0, "<eos>": 1, "A": 2, "C": 3, "<unk>": 4}
    model = models.BPE(known, []) if kind == "drops" else models.WordLevel(known, unk_token="<unk>")
    if kind == "raises":
        model = models.WordLevel({"<bos>": 0, "<eos>": 1, "C": 2}, unk_token="none")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    assert find_document_beginning(tokenizer, 1) == (1,)
    around = [("<bos>", 0), ("<eos>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=around)
    assert find_document_beginning(tokenizer, 1) == (0,)


def test_a_tokenizer_that_is_trained_here_begins_a_text_with_the_end_token(written: TokensReport) -> None:
    index, tokenizer = read_token_index(written.folder), read_tokenizer(written.folder)
    assert index.begin == (index.end,)
    [first, *others] = tokenizer.encode(sentence(3)).ids
    assert [first, *others] == [index.end, *tokenizer.encode(sentence(3), add_special_tokens=False).ids]


@pytest.mark.wording
def test_a_text_with_the_token_of_a_beginning_is_noted(tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", "<bos>")
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["added_tokens"][0] |= {"special": False}
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("".join(map(sentence, range(30))) + "<bos> one more")
    (tmp_path / "b.txt").write_text(sentence(31))
    report = write_tokens([tmp_path / "a.txt", tmp_path / "b.txt"], str(tokenizer), tmp_path / "out", val=0.5)
    assert "1 document more in a run: the text itself has the token <bos>, with which a document begins" in report.notes


# -- windows ----------------------------------------------------------------------------------------------------------


def made(folder: Path, tokens: Any, ends: list[int], vocabulary: int = 1000, shard: int = 1 << 20) -> Path:
    """A folder of tokens, with the same on both sides."""
    folder.mkdir(parents=True)
    splits = []
    for split in ("train", "val"):
        writer, start = TokenWriter(folder, split, "uint16", 0, shard), 0
        for number, end in enumerate(ends):
            writer.add(tokens[start:end], end - start)
            writer.end_document(f"{split}-{number}")
            start = end
        splits.append(writer.close())
    write_text(folder / "tokenizer.json", "{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    TokenIndex(2, "uint16", vocabulary, 0, digest, splits[0], splits[1], (0,)).write(folder)
    return folder


@pytest.mark.parametrize("length", [8, 103, 200])
def test_windows_hold_every_token_once_as_a_target(length: int, tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(range(1, 101)), [30, 37, 100], shard=16)
    windows = TokenWindows(TokenArray(folder, "train"), length)
    whole = [0, *range(1, 31), 0, *range(31, 38), 0, *range(38, 101), 0]
    read = [windows.read(number)["tokens"].tolist() for number in range(len(windows))]
    targets = [token for one in read for token in one[1:]]
    assert targets == [*whole[1:], *[FILLER] * (len(targets) - 103)]
    assert len(targets) - 103 < length
    assert [token for one in read for token in one[:-1]][:103] == whole[:-1]
    assert all(one[-1] == after[0] for one, after in itertools.pairwise(read))


def test_windows_of_an_index_without_beginnings_are_those_of_earlier_versions(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(range(1, 101)), [30, 37, 100], shard=16)
    content = json.loads((folder / INDEX).read_text())
    del content["begin"]
    (folder / INDEX).write_text(json.dumps({**content, "version": 1}))
    windows = TokenWindows(TokenArray(folder, "train"), 8)
    whole = [*range(1, 31), 0, *range(31, 38), 0, *range(38, 101), 0]
    assert len(windows) == 13
    read = [windows.read(number)["tokens"].tolist() for number in range(len(windows))]
    assert [token for one in read for token in one[:-1]][: len(whole) - 1] == whole[:-1]
    assert all(one[-1] == after[0] for one, after in itertools.pairwise(read))
    assert read[-1] == [*whole[96:], *[0] * (9 - len(whole[96:]))]


def test_a_split_without_tokens_has_no_windows(tmp_path: Path) -> None:
    with pytest.raises(BadData):
        TokenWindows(TokenArray(made(tmp_path / "none", [], [0]), "train"), 8)


def windows_digest(folder: Path, ranks: int, steps: int, first: int = 0) -> list[str]:
    """Of each step: the tokens of its 12 windows, over all ranks."""
    loaders = []
    for rank in range(ranks):
        samples = Samples(TokenWindows(TokenArray(folder, "train"), 16), lambda sample: sample, 3)
        loader = TrainLoader(
            samples, Order(len(samples), 3), batch_size=12 // ranks, collate=lambda s: {"t": np_stack(s)},
            device="cpu", rank=rank, size=ranks,
        )  # fmt: skip
        loaders.append(loader.windows(0, first))
    found = []
    for _ in range(steps - first):
        batches = [next(loader)[0].tensors["t"] for loader in loaders]
        found.append(hashlib.sha256(b"".join(one.numpy().tobytes() for one in batches)).hexdigest())
    return found


def np_stack(samples: list[Any]) -> Any:
    import torch

    return torch.stack([one["tokens"] for one in samples])


@pytest.mark.parametrize("steps", [50, pytest.param(834, marks=pytest.mark.full)])  # 600 and 10,008 windows
def test_the_same_windows_at_1_2_and_3_ranks_and_from_the_middle(steps: int, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 1000, 16 * 10_080).tolist()
    folder = made(tmp_path / "t", tokens, [5000, 70_000, len(tokens)], shard=10_000)
    alone = windows_digest(folder, 1, steps)
    assert windows_digest(folder, 2, steps) == alone
    assert windows_digest(folder, 3, steps) == alone
    assert windows_digest(folder, 2, steps, first=steps // 2) == alone[steps // 2 :]
    assert len(set(alone)) == steps


def test_windows_go_to_workers_without_their_tokens(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(np.arange(1, 900)) * 200, [179_800])
    windows = TokenWindows(TokenArray(folder, "train"), 16)
    windows.read(0)
    sent = pickle.dumps(windows)
    assert len(sent) < 5000
    assert pickle.loads(sent).read(7)["tokens"].tolist() == windows.read(7)["tokens"].tolist()


def test_a_2_gb_file_opens_at_once_and_a_window_reads_a_page(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", [1, 2, 3], [3])
    index = read_token_index(folder)
    with (folder / "train-00000.bin").open("r+b") as file:
        file.truncate(2 * 2**30)
    train = TokenSplit(1, 2**30, 2**30, (TokenShard("train-00000.bin", 2**30, "0" * 64),))
    TokenIndex(1, "uint16", 1000, 0, index.tokenizer, train, index.val).write(folder)
    resident = host_bytes()
    begin = time.process_time()
    windows = TokenWindows(TokenArray(folder, "train"), 256)
    assert time.process_time() - begin < 0.2
    for number in range(0, len(windows), len(windows) // 50):
        assert windows.read(number)["tokens"].shape == (257,)
    assert len(windows) == 2**22
    assert host_bytes() - resident < 64 * 2**20


def host_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def test_packing_reads_more_than_200_000_tokens_a_second_of_a_processor(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(np.arange(1, 900)) * 200, [179_800])
    samples = Samples(TokenWindows(TokenArray(folder, "train"), 256), lambda sample: sample, 0)
    begin = time.process_time()
    read = sum(len(item.sample["tokens"]) for item in samples.__getitems__([(0, n) for n in range(len(samples))]))
    assert read / (time.process_time() - begin) > 200_000


def test_a_shard_that_changes_under_a_run_is_a_bad_sample(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(range(1, 101)), [100])
    windows = TokenWindows(TokenArray(folder, "train"), 8)
    shard = folder / "train-00000.bin"
    before = windows.read(3)["tokens"].tolist()
    os.utime(shard, (1, 1))  # touched, and the same
    assert windows.read(3)["tokens"].tolist() == before
    content = shard.read_bytes()
    shard.write_bytes(content[::-1])
    with pytest.raises(BadSample):
        windows.read(3)
    shard.write_bytes(content[:20])  # cut off: to read the map would end the process
    with pytest.raises(BadSample):
        windows.read(3)
    shard.unlink()
    with pytest.raises(BadSample):
        windows.read(3)


@pytest.mark.parametrize(
    "damage",
    [
        {"end": 1000},
        {"vocabulary": 70_000},
        {"version": 9},
        {"version": 1},
        {"begin": None},
        {"begin": []},
        {"begin": [1000]},
        {"begin": [-1]},
        {"dtype": "int8"},
        {"more": 1},
        {"train": {"documents": 1, "tokens": 5, "bytes": 1, "shards": []}},
        {"train": {"documents": 1, "tokens": 0, "bytes": 1, "shards": [["../up.bin", 0, "0" * 64]]}},
    ],
)
def test_a_damaged_index_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    folder = made(tmp_path / "t", [1, 2, 3], [3])
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**content, **damage}))
    with pytest.raises(BadData):
        TokenArray(folder, "train")


@pytest.mark.wording
def test_shards_that_are_missing_or_cut_are_refused_before_the_first_step(tmp_path: Path) -> None:
    folder = made(tmp_path / "t", list(range(1, 101)), [100], shard=40)
    (folder / "train-00001.bin").write_bytes(b"\0" * 10)
    with pytest.raises(BadData, match=r"train-00001\.bin"):
        TokenArray(folder, "train")
    (folder / "train-00001.bin").unlink()
    with pytest.raises(BadData, match=r"train-00001\.bin"):
        TokenArray(folder, "train")


def test_the_fingerprint_changes_with_the_tokens_and_not_with_the_place(tmp_path: Path) -> None:
    def of(folder: Path) -> Any:
        return fingerprint(*(TokenWindows(TokenArray(folder, split), 8) for split in ("train", "val")))

    first = of(made(tmp_path / "a", list(range(1, 101)), [100]))
    assert of(made(tmp_path / "b", list(range(1, 101)), [100])) == first
    assert of(made(tmp_path / "c", [*range(1, 100), 7], [100])) != first
    assert {row.key for row in first.parts[0].rows} == {INDEX, "train-00000.bin"}


def test_a_killed_writer_leaves_no_folder_that_looks_complete(corpus: Path, tmp_path: Path) -> None:
    """Killed while it tokenizes: the next attempt is not in its way."""
    code = (
        "import sys, os, signal; from pathlib import Path\n"
        "from halfstep.data import tokenizing\n"
        "def die(done, of):\n    if done == 30: os.kill(os.getpid(), signal.SIGKILL)\n"
        "tokenizing.write_tokens([sys.argv[1]], 'train:400', Path(sys.argv[2]), on_progress=die)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus), str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert write_tokens([corpus], "train:400", tmp_path / "out").train.documents == 38
