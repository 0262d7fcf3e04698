"""A language model of transformers with two layers, for the pains of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 64
ROWS = torch.randint(1, WORDS, (4, 12), generator=torch.Generator().manual_seed(0))


def small_llama(dtype: torch.dtype, *, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, use_cache=False, eos_token_id=0, **sizes)
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def with_lora(base: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    return get_peft_model(base, adapter)


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def next_token(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=rows, labels=rows).loss
    return loss
