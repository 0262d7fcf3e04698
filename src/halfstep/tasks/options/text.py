"""The recipe schema of text. Imports no torch."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from halfstep.errors import BadRecipe
from halfstep.recipe.schema import Also, DataOptions, LossOptions, ModelOptions, Recipe, Section

NO_BASE = "none"


NO_ADAPTER, LORA = "none", "lora"
QUANTIZED = ("int8", "nf4")


class AdapterOptions(Section):
    """A small part that is trained on a frozen base, by peft."""

    kind: Literal["none", "lora"] = "none"
    """`lora` freezes the base and trains two small matrices for each of `targets`; `none` trains all weights."""
    rank: Annotated[PositiveInt, Also("lora_r")] = 8
    """The rank of the matrices."""
    alpha: Annotated[PositiveFloat | None, Also("lora_alpha")] = None
    """Their product is multiplied by alpha over rank; by default twice the rank."""
    targets: Annotated[list[str], Also("target_modules", "lora_target_modules")] = ["q_proj", "v_proj"]  # noqa: RUF012
    """Names of the layers that get an adapter; `[all-linear]` for all matrices but the head."""
    also_train: Annotated[list[str], Also("modules_to_save")] = []  # noqa: RUF012
    """Layers that are trained whole, such as lm_head or embed_tokens."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0), Also("lora_dropout")] = 0.0
    """Dropout of the adapters' inputs."""


class TextModel(ModelOptions):
    base: Annotated[str, Also("model_name_or_path", "base_model", "pretrained_model_name_or_path")] = NO_BASE
    """A pretrained model: a folder that transformers reads, or a hub name with `download`; `none` for a new one."""
    download: bool = False
    """Let transformers download a `base` from the hub; without it, nothing is fetched."""
    base_format: Literal["fp32", "bf16", "int8", "nf4"] = "bf16"
    """An adapter's base: the format its weights are stored in; int8 and nf4 by bitsandbytes. Others are in fp32."""
    adapter: AdapterOptions = AdapterOptions()
    """A small part that is trained on a frozen base."""
    type: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"] = "llama"
    """A new model: its architecture, by transformers' name."""
    width: Annotated[PositiveInt, Also("hidden_size", "n_embd", "d_model")] = 320
    """A new model: numbers that describe a token between two layers."""
    layers: Annotated[PositiveInt, Also("num_hidden_layers", "n_layer")] = 8
    """A new model: layers of attention."""
    heads: Annotated[PositiveInt, Also("num_attention_heads", "n_head")] = 5
    """A new model: heads of each attention; the width is a multiple of them."""
    kv_heads: Annotated[PositiveInt | None, Also("num_key_value_heads")] = None
    """A new model: heads with keys and values of their own, shared by the others; by default as many as `heads`."""
    mlp: Annotated[PositiveInt | None, Also("intermediate_size")] = None
    """A new model: the width inside the feed-forward layers; by default 2.7 times `width`."""
    vocabulary: PositiveInt | None = None
    """A new model: rows of its embedding; by default one for each token of the tokenizer."""
    rope_base: PositiveFloat = 10_000.0
    """A new model: the base of the rotary positions; larger for longer windows."""
    tied: Annotated[bool, Also("tie_word_embeddings")] = True
    """A new model: one matrix for the embedding and the output."""
    new_tokens: Annotated[PositiveInt, Also("max_new_tokens")] = 64
    """predict: how many tokens are written at most."""
    temperature: NonNegativeFloat = 0.8
    """predict: how bold the sampling is; 0 always takes the most likely token."""
    top_k: NonNegativeInt = 50
    """predict: sample among so many of the most likely tokens; 0 for all."""


class TextData(DataOptions):
    name: Literal["tokens", "python"] = "tokens"
    """`tokens` (a folder that `halfstep data tokens` made), or `python` (the text of Python's own standard library)."""
    path: Annotated[str, Also("data_dir")] = "tokens"
    """The folder of tokens; `cache:NAME` is one in the cache."""
    length: Annotated[int, Field(ge=2, le=2**20), Also("block_size", "max_length", "max_seq_length", "seq_len")] = 256
    """Tokens of a window: what the model sees at once."""
    samples: Annotated[int, Field(ge=2, le=1000)] = 120
    """python: how many of its source files are read."""
    vocabulary: Annotated[int, Field(ge=320, le=65_536), Also("vocab_size")] = 1024
    """python: how many tokens the tokenizer has that is trained on them."""


class TextLoss(LossOptions):
    pass


SCHEMA = Recipe[TextModel, TextData, TextLoss]
NEEDS = ("transformers", "tokenizers")
WRITES_FOLDER = True
"""`halfstep export` writes a folder that transformers loads."""


def check(recipe: Any) -> None:
    """Raise `BadRecipe` for settings that exclude each other."""
    model = recipe.model
    if model.weights == "pretrained":
        raise BadRecipe(
            "model.weights=pretrained for text",
            allowed="model.base=FOLDER for a pretrained model; model.weights: none, or a file",
            do="write model.base=FOLDER, and model.weights=none",
        )
    if model.adapter.kind != NO_ADAPTER and not model.adapter.targets:
        raise BadRecipe(
            "model.adapter.targets is empty",
            allowed="names of layers, such as q_proj",
            do="write model.adapter.targets=[q_proj, v_proj]",
        )
    if model.base != NO_BASE:
        _check_base(model)
        return
    if model.adapter.kind != NO_ADAPTER and model.base_format in QUANTIZED:
        raise BadRecipe(
            f"model.base_format={model.base_format} without model.base",
            allowed="the folder of a pretrained model",
            do="write model.base=FOLDER, or model.base_format=bf16",
        )
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise BadRecipe(
            f"model.width={model.width} with model.heads={model.heads}",
            allowed="a width that is an even multiple of the heads",
            do=f"write model.width={2 * model.heads * max(1, round(model.width / model.heads / 2))}",
        )
    if model.kv_heads is not None and (model.type == "gpt2" or model.heads % model.kv_heads):
        raise BadRecipe(
            f"model.kv_heads={model.kv_heads} with model.heads={model.heads} and model.type={model.type}",
            allowed="a divisor of the heads; gpt2 has none",
            do="leave model.kv_heads out",
        )


def _check_base(model: Any) -> None:
    if os.path.isdir(os.path.expanduser(model.base)) or model.download:
        return
    if model.base.lower().endswith(".gguf"):
        raise BadRecipe(
            f"model.base={model.base}, a GGUF file",
            allowed="a folder that transformers reads",
            do=f"halfstep data base {model.base} --out FOLDER, then model.base=FOLDER",
        )
    raise BadRecipe(
        f"model.base={model.base}, and there is no folder {model.base}",
        allowed="a folder with config.json and .safetensors; a hub name with --download, which transformers downloads",
        do=f"check the path, or add --download to get {model.base} from the hub",
    )
