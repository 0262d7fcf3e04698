"""A model learns how a text begins, and runs of versions without beginnings go on as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file
from transformers import AutoTokenizer

import halfstep
from halfstep.data.check.tokens import check_tokens
from halfstep.data.token_files import INDEX, TokenArray, read_token_index
from halfstep.data.tokenizing import read_tokenizer, write_tokens
from halfstep.errors import BadData
from halfstep.files import read_json
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.runs.evaluate_run import evaluate
from halfstep.tasks.models.text.model import IGNORED
from halfstep.tasks.text import NO_BEGINNINGS, Text
from tests.data.test_tokens import tokenizer_folder
from tests.tasks.made import made

WORDS = ["red", "blue", "house", "tree", "river", "stone", "cloud", "bird", "night", "day"]
BEFORE = Path(__file__).parent / "text_run_without_beginnings"
"""Tokens, a stopped run and the weights of the same run without the stop, written before documents had beginnings."""


def write_titles(place: Path, count: int, words: int) -> Path:
    draw = np.random.default_rng(0)
    texts = ("Title: " + " ".join(draw.choice(WORDS, words)) + "." for _ in range(count))
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return place


def small_run(folder: Path, tokens: Path, **more: Any) -> list[str]:
    settings = {
        "model.width": 64, "model.layers": 1, "model.heads": 2, "data.name": "tokens", "data.path": tokens,
        "data.length": 64, "train.steps": 60, "optimizer.lr": 1e-2, "num_workers": 0, "run.dir": folder,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**settings, **more}.items()] + ["--fp32"]


@pytest.fixture(scope="module", params=["end token", "<bos>"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 400 documents that begin with the same word."""
    root = tmp_path_factory.mktemp("titles")
    bos = request.param == "<bos>"
    tokenizer = str(tokenizer_folder(root / "tokenizer", "<bos>")) if bos else "train:320"
    write_tokens([write_titles(root / "d.jsonl", 400, 12)], tokenizer, root / "tokens")
    halfstep.fit("text_tiny", settings=small_run(root / "run", root / "tokens"), quiet=True)
    return root / "run"


def test_a_model_knows_how_every_text_begins_and_writes_texts_without_a_prompt(run: Path) -> None:
    loaded = halfstep.load(run)
    task = loaded.task
    assert isinstance(task, Text)
    beginning = task.prompt("")
    first, *_ = read_tokenizer(run.parent / "tokens").encode("Title:", add_special_tokens=False).ids
    assert task.prompt("Title:")[: len(beginning)].tolist() == beginning.tolist()
    with torch.no_grad():
        logits = loaded.model.logits(beginning[None], torch.arange(len(beginning))[None])[0, -1]
    assert logits.softmax(-1)[first] > 0.95
    torch.manual_seed(0)
    texts = [str(loaded.predict("").values["text"]) for _ in range(8)]
    assert all(text.startswith("T") and len(text) > 20 for text in texts)
    assert len(set(texts)) == len(texts)


def test_an_export_begins_a_text_as_the_training_does(run: Path, tmp_path: Path) -> None:
    halfstep.export(run, tmp_path / "out")
    tokenizer, loaded = AutoTokenizer.from_pretrained(tmp_path / "out"), halfstep.load(run)
    assert tokenizer("Title: red").input_ids == loaded.task.prompt("Title: red").tolist()
    assert [tokenizer.bos_token_id] == loaded.task.prompt("").tolist()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def task_with(begin: tuple[int, ...] | None) -> Text:
    """Of a vocabulary in which 0 ends a document."""
    task = made("text")
    assert isinstance(task, Text)
    task._begin, task._end, task._vocabulary = begin, 0, 512
    return task


@pytest.mark.parametrize(
    ("begin", "window", "targets", "positions"),
    [
        ((0,), [0, 6, 7, 0, 8, 0, 9, 5], [6, 7, 0, 8, 0, 9, 5], [0, 1, 2, 0, 1, 0, 1]),
        ((0,), [5, 6, 0, 7, 0, -100, -100, -100], [6, 0, 7, 0, -100, -100, -100], [0, 1, 0, 1, 0, 0, 0]),
        ((1,), [0, 1, 7, 0, 1, 8, 9, 5], [-100, 7, 0, -100, 8, 9, 5], [0, 0, 1, 2, 0, 1, 2]),
        ((1,), [6, 0, 1, 8, 0, -100, -100, -100], [0, -100, 8, 0, -100, -100, -100], [0, 1, 0, 1, 2, 3, 4]),
        ((1, 2), [0, 1, 2, 8, 0, 1, 2, 5], [-100, -100, 8, 0, -100, -100, 5], [0, 0, 1, 2, 3, 0, 1]),
        ((1, 2), [2, 8, 0, 1, 2, 5, 6, 7], [8, 0, -100, -100, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3]),
        ((0, 2), [0, 2, 8, 0, 2, 5, 6, 7], [-100, 8, 0, -100, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3]),
        (None, [5, 6, 0, 7, 0, 0, 8, 9], [6, 0, -100, 0, -100, -100, 9], [0, 1, 2, 0, 1, 0, 0]),
    ],
)
def test_positions_and_targets_of_documents_in_one_window(
    begin: tuple[int, ...] | None, window: list[int], targets: list[int], positions: list[int]
) -> None:
    task = task_with(begin)
    sample = task.transform("train", {"tokens": torch.tensor(window)})
    assert sample["tokens"].tolist() == [max(token, 0) for token in window[:-1]]
    assert sample["targets"].tolist() == targets
    assert sample["positions"].tolist() == positions


def test_every_token_of_a_document_is_a_target_once(run: Path) -> None:
    index = read_token_index(run.parent / "tokens")
    task = halfstep.load(run).task
    for split in ("train", "val"):
        source = task.source(split)
        samples = [task.transform(split, source.read(number)) for number in range(len(source))]
        targets = torch.cat([one["targets"] for one in samples])
        tokens = TokenArray(run.parent / "tokens", split)
        stored = tokens.read(0, len(tokens)).tolist()
        assert targets[targets != IGNORED].tolist() == [t for t in stored if t not in index.written_begin]
        assert int((targets != IGNORED).sum()) == index.count_targets(split)


def test_bits_per_byte_are_of_all_bytes_of_the_text(run: Path) -> None:
    found, index = evaluate(run).metrics, read_token_index(run.parent / "tokens")
    total = found["loss"] * index.count_targets("val") / np.log(2)
    assert found["bits_per_byte"] == pytest.approx(total / index.val.bytes, rel=1e-5)


# -- before documents had beginnings ----------------------------------------------------------------------------------


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    return tmp_path / "before"


OLD = [
    *("model.width=8", "model.layers=1", "model.heads=1", "data.name=tokens", "data.path=tokens", "data.length=16"),
    *("train.steps=6", "train.batch_size=2", "train.seed=0", "optimizer.lr=3e-3", "num_workers=0", "run.dir=run"),
    *("checkpoint.every_steps=2", "checkpoint.keep=2", "train.device=cpu", "precision=fp32"),
]


def test_a_run_of_an_earlier_version_resumes_and_says_what_its_model_does_not_learn(before: Path) -> None:
    done = halfstep.fit({"task": "text"}, settings=OLD, quiet=True)
    assert done.steps == 6
    # On the machine that wrote it, the same bits; rounding differs between processors.
    for name, expected in load_file(before / "expected.safetensors").items():
        torch.testing.assert_close(load_file(before / "run" / "last.safetensors")[name], expected, rtol=0, atol=1e-5)
    start = [event for event in read_events(before / "run" / JOURNAL) if event["event"] == "start"][-1]
    assert start["resumed"]["attempt"] == 2
    assert NO_BEGINNINGS in start["notes"]
    assert read_json(before / "run" / "task.json")["begin"] is None
    loaded = halfstep.load(before / "run")
    assert loaded.task.prompt("").tolist() == [0]
    assert loaded.task.prompt("red").tolist() == read_tokenizer("tokens").encode("red").ids
    lines = halfstep.export(before / "run", before / "out").lines
    assert any("bos, eos and pad" in line for line in lines)
    assert AutoTokenizer.from_pretrained(before / "out")("red").input_ids == loaded.task.prompt("red").tolist()
    assert evaluate(before / "run").metrics["loss"] == pytest.approx(done.metrics["loss"], rel=1e-5)


def test_tokens_of_an_earlier_version_are_read_as_before_with_a_warning(before: Path, tmp_path: Path) -> None:
    found = check_tokens(before / "tokens")
    assert found.ok
    assert {fault.id: fault.files for fault in found.findings}["no-beginnings"] == (INDEX,)
    write_tokens(["d.jsonl"], "tokens", tmp_path / "again", val=0.1, version=1)
    for path in sorted((before / "tokens").iterdir()):
        if path.name != INDEX:
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert read_token_index(tmp_path / "again") == read_token_index(before / "tokens")


def test_a_run_does_not_go_on_with_tokens_that_begin_otherwise(before: Path) -> None:
    shutil.rmtree("tokens")
    write_tokens(["d.jsonl"], "train:320", Path("tokens"), val=0.1)
    with pytest.raises(BadData, match="begin"):
        halfstep.fit({"task": "text"}, settings=OLD, quiet=True)


def test_a_run_on_pythons_own_text_resumes_on_its_earlier_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = made("text")
    assert isinstance(task, Text)
    new = task.source("train")
    earlier = made("text")
    earlier.resume({key: value for key, value in task.facts().items() if key != "begin"})
    old = earlier.source("train")
    assert {path.parent.name[-2:] for _, path in [*new.every_file(), *old.every_file()]} == {"-1", "-2"}
    assert earlier.facts()["begin"] is None
    finished = made("text")
    finished.remember(earlier.facts())
    assert next(path for _, path in finished.source("val").every_file()) == old.every_file()[0][1]
