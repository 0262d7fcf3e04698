"""Build language models: from the sizes of a recipe, or from a folder with a pretrained one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from halfstep.data.gguf_base import hide_progress_bars
from halfstep.errors import BadData, HalfstepError, format_error_line

SIZES = {"mlp": "intermediate_size", "kv_heads": "num_key_value_heads"}
GPT2 = {"width": "n_embd", "layers": "n_layer", "heads": "n_head", "mlp": "n_inner"}


def build_model_config(options: Any, vocabulary: int, length: int, begin: int, end: int) -> Any:
    """Return the config of a new model for these tokens."""
    common = {
        "vocab_size": max(options.vocabulary or 0, vocabulary),
        "tie_word_embeddings": options.tied,
        "bos_token_id": begin,
        "eos_token_id": end,
        "use_cache": False,
    }
    mlp = options.mlp or 16 * -(-round(2.7 * options.width) // 16)
    if options.type == "gpt2":
        sizes = {theirs: getattr(options, ours) for ours, theirs in GPT2.items()} | {"n_inner": mlp}
        return AutoConfig.for_model("gpt2", **common, **sizes, n_positions=length, **_NO_DROPOUT)
    return AutoConfig.for_model(
        options.type,
        **common,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads or options.heads,
        head_dim=options.width // options.heads,
        intermediate_size=mlp,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": options.rope_base},
    )


_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def build_random_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of this config with random weights."""
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def restore_model_config(saved: Mapping[str, Any]) -> Any:
    """Return the config that `convert_config_to_plain` gave."""
    content = dict(saved)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def convert_config_to_plain(config: Any) -> dict[str, Any]:
    """Return a config as plain data, without what a base was stored in."""
    left_out = ("transformers_version", "dtype", "torch_dtype", "quantization_config", "_name_or_path")
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


# -- bases ------------------------------------------------------------------------------------------------------------


def load_base(name: str, download: bool, **more: Any) -> Any:
    """Return a pretrained model from a folder, or from the hub where that was allowed; raise BadData if it fails."""
    read_base_config(name, download)
    with _replace_base_errors(name, download), hide_progress_bars():
        place = os.path.expanduser(name)
        # Weights as safetensors alone: other files of weights are pickles.
        language = AutoModelForCausalLM.from_pretrained(
            place, local_files_only=not download, use_safetensors=True, trust_remote_code=False, **more
        )
    # The recipe decides how a text is sampled: a base may penalize repetitions, or force a length.
    language.generation_config = GenerationConfig.from_model_config(language.config)
    return language


def read_base_config(name: str, download: bool) -> Any:
    """Return the config of a base; raise BadData if it cannot be read, or if the base has other inputs than text."""
    with _replace_base_errors(name, download):
        config = AutoConfig.from_pretrained(
            os.path.expanduser(name), local_files_only=not download, trust_remote_code=False
        )
        text = config.get_text_config()
    if text is not config:
        raise BadData(
            f"model.base={name} is a {type(config).__name__.removesuffix('Config')} model, with other inputs than text",
            allowed="a causal language model; the language part of another model, saved as one",
            do=f"save its language part: python -c {shlex.quote(_EXTRACTION.format(name=name, out=f'{name}-text'))}",
        )
    return config


_EXTRACTION = """
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
whole = AutoModelForImageTextToText.from_pretrained({name!r}, dtype='auto')
text = AutoModelForCausalLM.from_config(whole.config.get_text_config(), dtype=whole.dtype)
text.base_model.load_state_dict(whole.get_decoder().state_dict())
text.set_output_embeddings(whole.get_output_embeddings())
text.save_pretrained({out!r})
AutoTokenizer.from_pretrained({name!r}).save_pretrained({out!r})
"""


@contextmanager
def _replace_base_errors(name: str, download: bool) -> Iterator[None]:
    try:
        yield
    except (HalfstepError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a truncated or foreign file raises anything: SafetensorError, AttributeError, ...
        raise BadData(
            f"model.base={name} cannot be loaded: {format_error_line(error)[:300]}",
            allowed="config.json and .safetensors of a causal language model that transformers knows",
            do="check the name and the network" if download else f"check the files in {name}, or copy them again",
        ) from error
