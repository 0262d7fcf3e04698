"""`halfstep data base`: a GGUF file becomes a folder that transformers reads, complete or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf

from halfstep.data.gguf_base import convert_gguf
from halfstep.data.tokenizing import Document, read_tokenizer, train_tokenizer
from halfstep.errors import BadData, FolderTaken

WIDTH, MLP = 32, 64
TEXT = "the quick brown fox jumps over the lazy dog " * 20


def written(path: Path, architecture: str = "llama") -> tuple[dict[str, Any], Any]:
    """Write a GGUF file of one layer; return its weights and its tokenizer."""
    tokenizer, _ = train_tokenizer([Document("t", lambda: iter([TEXT]))], 320)
    parts = json.loads(tokenizer.to_str())["model"]
    names = sorted(parts["vocab"], key=parts["vocab"].__getitem__)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(names), WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,)}
    shapes |= {f"blk.0.attn_{part}": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (WIDTH,), "blk.0.ffn_gate": (MLP, WIDTH), "blk.0.ffn_up": (MLP, WIDTH)}
    shapes |= {"blk.0.ffn_down": (WIDTH, MLP)}
    weights = {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(names))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(names))
    writer.add_token_merges([" ".join(pair) for pair in parts["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights, tokenizer


def _encode(read: Any) -> list[int]:
    # Without the beginning of a document, on which the file says nothing.
    ids: list[int] = read.encode(TEXT, add_special_tokens=False).ids
    return ids


def test_weights_and_tokenizer_of_the_file_are_in_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights, tokenizer = written(tmp_path / "model.gguf")
    report = convert_gguf(tmp_path / "model.gguf", tmp_path / "base")
    assert report.parameters == sum(weight.size for weight in weights.values())
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for theirs, ours in (
        ("embed_tokens", "token_embd"), ("norm", "output_norm"), ("layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ("layers.0.self_attn.o_proj", "blk.0.attn_output"), ("layers.0.mlp.down_proj", "blk.0.ffn_down"),
    ):  # fmt: skip
        np.testing.assert_array_equal(state[f"model.{theirs}.weight"].numpy(), weights[f"{ours}.weight"])
    # Whoever may read other files of this user may read the weights.
    assert (tmp_path / "base" / "model.safetensors").stat().st_mode == (tmp_path / "model.gguf").stat().st_mode
    assert _encode(read_tokenizer(tmp_path / "base")) == _encode(tokenizer)
    with pytest.raises(FolderTaken):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "base")


@pytest.mark.parametrize("damage", ["cut", "cut in a weight", "other", "text"])
def test_a_file_that_cannot_be_converted_leaves_no_folder(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "nothing" if damage == "other" else "llama")
    if damage.startswith("cut"):
        path.write_bytes(path.read_bytes()[: 3000 if damage == "cut" else -100])
    if damage == "text":
        path.write_text("not a model")
    with pytest.raises(BadData):
        convert_gguf(path, tmp_path / "base")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.gguf"]
