"""The formats in which a model is stored: trained weights in 16 bits are refused, other mistakes are findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding, format_first_names
from halfstep.formats import is_narrow, name_dtype
from halfstep.numbers import format_bytes
from halfstep.precision.precision import Precision

TRAINED, TABLES, BASE, WIDENED, HEAD = "stored.trained", "stored.tables", "stored.base", "stored.widened", "stored.head"
_TABLES = re.compile(r"(inv_freq|freqs|freqs_cis)$")
"""Names of buffers with the frequencies of rotary positions. Their cosines lose nothing that a cast does not lose."""
_ONLY_TRAINED = "for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data"


def check_trained_weights_wide(trained: Iterable[Tensor], model: nn.Module, names: Mapping[int, str]) -> None:
    """Raise WrongUse for trained weights in 16 bits."""
    narrow = [names.get(id(p), "(not of the model)") for p in trained if is_narrow(p.dtype)]
    if not narrow:
        return
    # model.float() would widen a frozen base too, several times the bytes of an adapter.
    frozen = any(not p.requires_grad for p in model.parameters())
    raise WrongUse(
        f"trainable weights stored in 16 bits: {format_first_names(narrow)}",
        allowed="trainable weights in fp32, or with weight_format='bf16-split' or 'bf16-stochastic', because plain "
        "16-bit weights lose small updates to rounding; frozen weights in 16 bits",
        do=f"{_ONLY_TRAINED if frozen else 'model.float()'} before building the optimizer, or "
        "Stepper(..., weight_format='bf16-split')",
        id=TRAINED,
    )


def store_trained_in_fp32(model: nn.Module) -> list[str]:
    """Store every trained parameter in fp32, and return the names of those that were not.

    peft leaves layers that are trained whole in the format of the base.
    """
    narrow = [(name, p) for name, p in model.named_parameters() if p.requires_grad and is_narrow(p.dtype)]
    for _, parameter in narrow:
        parameter.data = parameter.data.float()
    return [name for name, _ in narrow]


def find_stored_format_mistakes(model: nn.Module, precision: Precision) -> list[Finding]:
    """Return findings about formats that a run in this precision is better without; reads no tensor."""
    return [
        *_find_cast_tables(model),
        *_find_other_base(model, precision),
        *_find_widened_base(model),
        *_find_separate_head(model),
    ]


def _find_cast_tables(model: nn.Module) -> Iterator[Finding]:
    cast = [(n, b) for n, b in model.named_buffers() if _TABLES.search(n) and is_narrow(b.dtype)]
    if cast:
        names, format = [name for name, _ in cast], name_dtype(cast[0][1].dtype)
        yield Finding(
            TABLES,
            "warning",
            f"frequencies of rotary positions are stored in {format}: {format_first_names(names)}; their rounding "
            "grows with the "
            "position",
            "from_pretrained(..., dtype=...) instead of model.to(...), or cast parameters only: "
            "for p in model.parameters(): p.data = p.data.to(...)",
        )


def _find_other_base(model: nn.Module, precision: Precision) -> Iterator[Finding]:
    """Find weights under an adapter that have another 16-bit format than the run."""
    narrow = precision.narrow
    if narrow is None:
        return
    # The frozen weight of an adapter is next to the trained ones, as in q_proj.base_layer.weight and
    # q_proj.lora_A.default.weight; those of a frozen encoder are not.
    trained = [_find_parent_path(name) for name, p in model.named_parameters() if p.requires_grad]
    near = {*trained, *(path.rpartition(".")[0] for path in trained)} - {""}
    other = {
        name: p.dtype
        for name, p in model.named_parameters()
        if not p.requires_grad and is_narrow(p.dtype) and p.dtype is not narrow and _find_parent_path(name) in near
    }
    if other:
        format = name_dtype(next(iter(other.values())))
        yield Finding(
            BASE,
            "warning",
            f"a frozen base in {format} under an adapter, in a run in {precision.name}: "
            f"{format_first_names(list(other))}; between "
            f"layers numbers have the range and the digits of {format}",
            f"from_pretrained(..., dtype={narrow}), or precision={format!r}",
        )


def _find_parent_path(name: str) -> str:
    """Return the path of the module above the one that holds a parameter."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _find_widened_base(model: nn.Module) -> Iterator[Finding]:
    """Find matrices in fp32 next to a quantized base, as peft's preparation leaves them."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    wide = [(name, p) for name, p in frozen if p.dtype is torch.float32 and p.dim() > 1]
    if wide and any(p.dtype in (torch.int8, torch.uint8) for _, p in frozen):
        spare = sum(p.nbytes for _, p in wide) // 2
        yield Finding(
            WIDENED,
            "note",
            f"frozen matrices in fp32 next to a quantized base: {format_first_names([name for name, _ in wide])}; in "
            "16 bits they "
            f"take {format_bytes(spare)} less",
            "model.enable_input_require_grads() instead of prepare_model_for_kbit_training(model), which widens them",
        )


def _find_separate_head(model: nn.Module) -> Iterator[Finding]:
    """Find a head that its model calls tied to the embedding, in another format than that."""
    for path, module in model.named_modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        try:
            ends: list[Any] = [module.get_output_embeddings(), module.get_input_embeddings()]  # type: ignore[operator]
        except (AttributeError, NotImplementedError):  # a model without a head
            continue
        head, embedding = (getattr(end, "weight", None) for end in ends)
        # A layer that an adapter trains whole is saved with the adapter, and no longer tied.
        if head is None or embedding is None or any(hasattr(end, "modules_to_save") for end in ends):
            continue
        if head is not embedding and head.shape == embedding.shape and head.dtype is not embedding.dtype:
            yield Finding(
                HEAD,
                "warning",
                f"the head of {path or type(module).__name__} is in {name_dtype(head.dtype)} and its embedding in "
                f"{name_dtype(embedding.dtype)}: a cast has made two matrices of one that config.tie_word_embeddings "
                "declares tied; whoever loads them by that config has one of the two",
                "cast the whole model, or set config.tie_word_embeddings=False to keep both",
            )
        return
