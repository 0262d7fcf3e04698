"""A base's own description of its tokenizer survives every export, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("peft")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import halfstep
from halfstep.data.tokenizing import write_tokens
from halfstep.errors import BadData, WrongUse
from halfstep.files import read_json, write_json
from halfstep.tasks.models.text import tokenizer_files
from halfstep.tasks.text import Text
from tests.data.test_tokens import sentence, tokenizer_folder

CHAT = [{"role": "user", "content": "the quick dog"}]
DESCRIPTION = {
    "tokenizer_config.json": """{\r\n  "bos_token": "<bos>",\n  "eos_token": "<eos>", "pad_token": "<sop>",\n
        "tokenizer_class": "PreTrainedTokenizerFast", "a key of its own": ["ä", 1]}""",
    "special_tokens_map.json": '{"bos_token": "<bos>", "eos_token": "<eos>",\t"pad_token": "<sop>"}',
    "chat_template.jinja": "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "generation_config.json": '{"eos_token_id": [1, 2],   "repetition_penalty": 50.0, "min_new_tokens": 30}',
    f"{tokenizer_files.TEMPLATES}/tools.jinja": "{{ messages | length }} tools",
}


def base_folder(folder: Path, **config: Any) -> Path:
    """A base whose tokenizer begins a text with <bos>, with every file that describes it."""
    tokenizer_folder(folder, "<bos>")
    (folder / tokenizer_files.TEMPLATES).mkdir()
    for name, text in DESCRIPTION.items():
        (folder / name).write_bytes(text.encode())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 2, "max_position_embeddings": 128}
    made = AutoConfig.for_model("llama", vocab_size=400, **{**sizes, **ends, **config})
    description = (folder / "generation_config.json").read_bytes()
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(description)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    base_folder(root / "base")
    lines = (json.dumps({"text": sentence(number)}) for number in range(40))
    (root / "d.jsonl").write_text("\n".join(lines))
    write_tokens([root / "d.jsonl"], str(root / "base"), root / "tokens", val=0.2)
    return root


def trained(root: Path, name: str, *more: str) -> Path:
    run = root / name
    if not run.exists():
        settings = [
            *(f"model.base={root / 'base'}", f"data.path={root / 'tokens'}", "data.length=32", f"run.dir={run}"),
            *("train.steps=2", "schedule.warmup_steps=0", "num_workers=0", "train.batch_size=2", "--fp32", *more),
        ]
        halfstep.fit("text_lora", settings=settings, quiet=True)
    return run


KINDS = {"adapter": ((), False), "merged": ((), True), "whole": (("model.adapter.kind=none",), False)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_export_has_the_files_of_the_base(kind: str, root: Path, tmp_path: Path) -> None:
    settings, merge = KINDS[kind]
    run = trained(root, f"run-{kind.replace('merged', 'adapter')}", *settings)
    done = halfstep.export(run, tmp_path / "out", merge=merge)
    assert any(line.startswith("checked: tokenizer loaded again") for line in done.lines), done.lines
    for name in (*DESCRIPTION, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (root / "base" / name).read_bytes(), name
    before, after = (AutoTokenizer.from_pretrained(place) for place in (root / "base", tmp_path / "out"))
    assert after("the quick").input_ids == before("the quick").input_ids
    for mark in ("bos", "eos", "pad"):
        assert getattr(after, f"{mark}_token_id") == getattr(before, f"{mark}_token_id") is not None
    assert after.apply_chat_template(CHAT) == before.apply_chat_template(CHAT)


def test_the_files_are_those_of_the_runs_time_even_if_the_base_is_gone(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    shutil.copytree(root / "tokens", tmp_path / "tokens")
    run = trained(tmp_path, "run", "model.adapter.kind=none")
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "base").mkdir()
    halfstep.export(run, tmp_path / "out")
    for name in (*DESCRIPTION, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (root / "base" / name).read_bytes(), name


def test_a_run_of_an_earlier_version_takes_them_from_the_base_while_it_is_there(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained(root, "run-whole", "model.adapter.kind=none"), run)
    facts = read_json(run / "task.json")
    assert facts is not None
    del facts["base_files"]
    write_json(run / "task.json", facts)
    halfstep.export(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == DESCRIPTION["chat_template.jinja"]
    text = (run / "recipe.yaml").read_text()
    (tmp_path / "none").mkdir()
    (run / "recipe.yaml").write_text(text.replace(str(root / "base"), str(tmp_path / "none")))
    halfstep.export(run, tmp_path / "described")
    assert not (tmp_path / "described" / "chat_template.jinja").exists()
    again = AutoTokenizer.from_pretrained(tmp_path / "described")
    assert (again.bos_token, again.eos_token) == ("<bos>", "<eos>")


@pytest.mark.wording
def test_a_base_that_contradicts_itself_is_reported_and_written_as_it_is(root: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(root / "base")
    tokenizer = tokenizer_files.parse_tokenizer((root / "base" / "tokenizer.json").read_bytes())

    def compare(of_base: bool) -> str:
        return tokenizer_files.compare_written_tokenizer(root / "base", tokenizer, config, of_base=of_base)

    assert compare(False).startswith("checked")
    config.pad_token_id, config.eos_token_id = 0, 2
    said = compare(True)
    assert "pad is token 0 in config.json, and 2 in the tokenizer" in said
    assert "eos is token 2 in config.json, and 1 in the tokenizer" in said
    with pytest.raises(WrongUse, match="pad"):
        compare(False)


@pytest.mark.wording
def test_a_tokenizer_that_transformers_cannot_load_is_reported(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(root / "base", folder)
    (folder / "tokenizer_config.json").write_text("{")
    tokenizer = tokenizer_files.parse_tokenizer((root / "base" / "tokenizer.json").read_bytes())
    config = AutoConfig.from_pretrained(root / "base")
    assert tokenizer_files.compare_written_tokenizer(folder, tokenizer, config, True).startswith("not checked")


def test_the_recipe_and_not_the_base_decides_how_a_text_is_sampled(root: Path) -> None:
    loaded = halfstep.load(trained(root, "run-adapter"))
    loaded.task.recipe.model.__dict__["temperature"] = 0.0
    prompt = loaded.task.prompt("the quick").tolist()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            logits = loaded.model.logits(torch.tensor([tokens]), torch.arange(len(tokens))[None])
            tokens.append(int(logits[0, -1].argmax()))
    assert isinstance(loaded.task, Text)
    expected = loaded.task._decode_text(prompt, tokens[len(prompt) :])
    assert str(loaded.predict("the quick").values["text"]).startswith(expected)


# -- tokens and base --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_tokens_that_begin_otherwise_than_the_base_are_refused(version: int, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    plain = json.loads((root / "base" / "tokenizer.json").read_text())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "tokenizer.json").write_text(json.dumps({**plain, "post_processor": None}))
    write_tokens(
        [root / "d.jsonl"], str(tmp_path / "plain"), tmp_path / "tokens", val=0.2, end="<eos>", version=version
    )
    with pytest.raises(BadData, match="<bos>"):
        trained(tmp_path, "run")
    # A base that begins no text on its own is content with both.
    shutil.copy(tmp_path / "plain" / "tokenizer.json", tmp_path / "base" / "tokenizer.json")
    assert (trained(tmp_path, "run") / "result.json").exists()
