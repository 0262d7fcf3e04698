"""Frozen bases and LoRA by peft: adapters and everything that is trained are stored in fp32, whatever the base has."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.data.file_state import compute_block_digest, list_block_offsets
from halfstep.errors import BadData, BadRecipe, WrongUse, check_packages_installed
from halfstep.formats import BF16, FP32, find_format, is_narrow
from halfstep.numbers import format_bytes
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.step.storage.stored_formats import store_trained_in_fp32
from halfstep.tasks.models.text import building
from halfstep.tasks.models.text.model import LanguageModel
from halfstep.tasks.options.text import NO_BASE, QUANTIZED

ADAPTER = "default"
"""The name that peft gives the first adapter."""
ALL_LINEAR = "all-linear"
"""peft's word for all matrices but the head."""
MERGE_ROUNDING = 0.001
"""Held-out loss for each token that rounding the merged weights to 16 bits may cost (0.1 % of the perplexity)."""
MOST_WHOLE = 2**30
"""Bytes of a file of the base up to which all of it is part of the fingerprint; of a larger one, a few blocks."""


def build_adapter_model(options: Any, config: Any, device: torch.device) -> LanguageModel:
    """Return the base of a recipe, frozen, with an adapter around it.

    `config` is that of a new base with random weights, where the recipe names none.
    """
    check_packages_installed("peft", *(("bitsandbytes",) if options.base_format in QUANTIZED else ()))
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if options.base == NO_BASE:
        language = building.build_random_model(config, _select_stored_dtype(options.base_format))
    else:
        language = building.load_base(
            options.base, options.download, **_build_quantization_options(options.base_format, device)
        )
        _leave_weights_unpacked(language)
    language.config.use_cache = False
    layers = (path for path, part in language.named_modules() if isinstance(part, (nn.Linear, Conv1D)))
    adapter, names = options.adapter, list(dict.fromkeys(path.rpartition(".")[2] for path in layers))
    settings = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha or 2 * adapter.rank,
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if adapter.targets == [ALL_LINEAR] else list(adapter.targets),
        modules_to_save=list(adapter.also_train) or None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # A tied head that is trained becomes a separate matrix, which `merged` respects.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # peft sets it as the layers of GPT-2 need it.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            wrapped = get_peft_model(language, settings)
    except ValueError as error:
        raise BadRecipe(
            f"model.adapter.targets={adapter.targets}: {str(error)[:200]}",
            allowed=f"names of its layers: {', '.join(names)}; or {ALL_LINEAR}, all but the head",
            do=f"write model.adapter.targets=[{', '.join(names[:2])}], or others of these",
        ) from error
    _refuse_unmatched(wrapped, adapter, names)
    store_trained_in_fp32(wrapped)
    model = LanguageModel(wrapped)
    model.leave_out_base()
    return model


def _select_stored_dtype(name: str) -> torch.dtype:
    dtype = (FP32 if name == FP32.name else BF16).dtype
    assert dtype is not None
    return dtype


def _build_quantization_options(base_format: str, device: torch.device) -> dict[str, Any]:
    if base_format not in QUANTIZED:
        return {"dtype": _select_stored_dtype(base_format)}
    from transformers import BitsAndBytesConfig

    # A function is one filter however often it is added.
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_drop_cast_message)
    how: dict[str, Any] = {"load_in_8bit": True}
    if base_format == "nf4":
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": BF16.dtype}
    return {"dtype": BF16.dtype, "quantization_config": BitsAndBytesConfig(**how), "device_map": {"": device}}


def _leave_weights_unpacked(language: nn.Module) -> None:
    """Compute 4-bit layers with the same code on each CPU.

    On a CPU with AVX512-BF16, bitsandbytes packs their weights in place at the first evaluation, in another layout. It
    fails for rows or columns that are no multiple of its blocks.
    """
    for module in language.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (not of this type)


def _drop_cast_message(record: logging.LogRecord) -> bool:
    """Drop the line that bitsandbytes logs for each product of an int8 base; `describe_model_parts` says it once."""
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def _refuse_unmatched(language: nn.Module, adapter: Any, known: list[str]) -> None:
    """Raise `BadRecipe` for a name that no layer has: peft is content with one that matches."""
    parts = (name.rpartition(".") for name, _ in language.named_modules())
    paths = [path for path, _, part in parts if part in ("lora_A", "modules_to_save")]
    for setting, names in (("targets", adapter.targets), ("also_train", adapter.also_train)):
        lost = [name for name in names if not any(path.endswith(name) for path in paths)]
        if lost and names != [ALL_LINEAR]:
            raise BadRecipe(
                f"model.adapter.{setting}: no layer is named {', '.join(lost)}",
                allowed=f"names of its layers: {', '.join(known)}",
                do=f"leave {lost[0]} out, or correct it",
            )


def use_inference_precision(model: nn.Module) -> AbstractContextManager[object]:
    """Return the context for inference with a base in 16 bits or fewer: some of its layers may be in fp32."""
    first = next(model.parameters())
    wide = all(p.is_floating_point() and not is_narrow(p.dtype) for p in model.parameters())
    return nullcontext() if wide else resolve_precision_name(BF16.name).inference(first.device)


# -- before the first step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartRow:
    """A part of a model: whether it is trained, how it is stored and computed, and its bytes."""

    part: str
    trained: bool
    stored: str
    computed: str
    bytes: int


def list_model_parts(model: LanguageModel, precision: Precision) -> list[PartRow]:
    """Return the parts of a model with an adapter."""
    computed = precision.computes.name
    kinds: dict[tuple[str, bool, str], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        part = "adapter" if "lora_" in name else "also trained" if parameter.requires_grad else "base"
        known = find_format(parameter.dtype)
        plain = known.name if known is not None else str(parameter.dtype).removeprefix("torch.")
        stored = {"Params4bit": "nf4", "Int8Params": "int8"}.get(type(parameter).__name__, plain)
        kinds.setdefault((part, parameter.requires_grad, stored), []).append(parameter)
    return [
        PartRow(part, trained, stored, computed, sum(p.nbytes for p in found))
        for (part, trained, stored), found in kinds.items()
    ]


def format_parts_table(rows: Iterable[PartRow]) -> list[str]:
    """Return the parts as lines of a table."""
    head = ("part", "trained", "stored", "computed", "bytes")
    cells = [head, *((r.part, "yes" if r.trained else "no", r.stored, r.computed, format_bytes(r.bytes)) for r in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def widen_base(model: LanguageModel, options: Any, precision: Precision) -> list[str]:
    """Store a base in 16 bits in fp32 where the run computes in fp32; return a line about it.

    Raise `BadRecipe` if the base is quantized.
    """
    if precision.narrow is not None:
        return []
    if options.base_format in QUANTIZED:
        raise BadRecipe(
            f"model.base_format={options.base_format} in {precision.name}",
            allowed="bf16, which bitsandbytes computes in",
            do="write precision=bf16, and train.strict=true if the device emulates it",
        )
    wide = [p for p in model.parameters() if not p.requires_grad and is_narrow(p.dtype)]
    for parameter in wide:
        parameter.data = parameter.data.float()
    return [f"the base is stored in fp32: the run computes in {precision.name}"] if wide else []


def describe_model_parts(model: LanguageModel, options: Any, precision: Precision) -> list[str]:
    """Return the table of parts, and the number of parameters that are trained."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    lines = [*format_parts_table(list_model_parts(model, precision)), f"{trained:,} parameters are trained"]
    if options.base_format == "int8":
        lines.append("bitsandbytes casts the inputs of its int8 products to fp16 (up to 65,504), then to int8")
    return lines


# -- the files of a base ----------------------------------------------------------------------------------------------


def list_base_files(name: str) -> list[Path]:
    """Return the files of a base that decide its weights; none for one of the hub."""
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name == "config.json" or path.suffix == ".safetensors")


def compute_base_fingerprint(name: str, known: str = "") -> str:
    """Return 16 hex digits of the files of a base; of one of the hub, once transformers has downloaded it.

    Raise `BadData` if they are not those that are `known`.
    """
    total = sha256()
    files = list_base_files(name)
    if not files:
        from transformers.utils import cached_file

        files = list_base_files(os.path.dirname(str(cached_file(name, "config.json", local_files_only=True))))
    for path in files:
        length = path.stat().st_size
        total.update(f"{path.name} {length} ".encode())
        total.update(compute_block_digest(path, list_block_offsets(length, length <= MOST_WHOLE)).encode())
    now = total.hexdigest()[:16]
    if known and now != known:
        raise BadData(
            f"the base {name} has changed since the run: {now}, then {known}",
            allowed="the base that the adapter was trained on",
            do=f"put the original base back at {name}",
        )
    return now


# -- merging ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def build_merged_model(model: LanguageModel, config: Any) -> LanguageModel:
    """Return a new model in the base's 16-bit format with the adapter in its weights; sums are made in fp32.

    A quantized base is taken as it computes, dequantized: its weights are not rounded to 8 or 4 bits again.
    """
    inner = model.inner
    ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
    config = copy.deepcopy(config)
    # One of two tied layers that is trained whole, or has an adapter, is no longer the other one.
    changed = any(hasattr(end, part) for end in ends for part in ("modules_to_save", "base_layer"))
    config.tie_word_embeddings = config.tie_word_embeddings and not changed
    plain = building.build_random_model(config)
    for name, parameter in plain.named_parameters():
        path, _, leaf = name.rpartition(".")
        parameter.copy_(_compute_merged_weight(inner.get_submodule(path), leaf))
    narrow = any(is_narrow(p.dtype) or not p.is_floating_point() for p in model.parameters() if not p.requires_grad)
    for parameter in plain.parameters() if narrow else ():
        # Not by plain.to(): the frequencies of rotary positions stay in fp32.
        parameter.data = parameter.data.to(BF16.dtype)
    return LanguageModel(plain)


def _compute_merged_weight(module: Any, leaf: str) -> Tensor:
    from peft.utils.integrations import dequantize_module_weight

    if hasattr(module, "modules_to_save"):
        module = module.modules_to_save[ADAPTER]
    layer = getattr(module, "base_layer", module)
    if leaf != "weight":
        found: Tensor = getattr(layer, leaf)
        return found.float()
    weight: Tensor = dequantize_module_weight(layer).float()
    if layer is not module:
        weight = weight + module.get_delta_weight(ADAPTER).to(weight)
    return weight


@dataclass(frozen=True)
class MergeLosses:
    """Held-out losses for each token: of the base, of base and adapter, and of the merged model."""

    base: float
    adapter: float
    merged: float

    def __str__(self) -> str:
        return f"held-out loss: base {self.base:.4f}, with adapter {self.adapter:.4f}, merged {self.merged:.4f}"

    def refuse_worse(self) -> None:
        """Raise `WrongUse` if the merge loses more than the adapter gained and more than rounding explains."""
        gained, lost = self.base - self.adapter, self.merged - self.adapter
        # Negated, so that a NaN is refused too.
        if not lost <= max(gained, MERGE_ROUNDING):
            raise WrongUse(
                f"the merged model loses {lost:.4f}, more than the adapter gained ({gained:.4f}); {self}",
                allowed=f"a merge that loses less than the adapter gained, or less than {MERGE_ROUNDING} by rounding",
                do="export without --merge: the adapter, to be loaded next to its base",
                id="merge-loses",
            )
