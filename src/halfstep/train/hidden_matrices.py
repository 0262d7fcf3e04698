"""Find the matrices of a model's hidden layers, which Muon trains; its other parameters need another optimizer.

The type of a layer decides, not the shape alone: a table of positions has two dimensions too, and is no matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from halfstep.guard.monitors.base import TABLES

EMBEDDINGS, CONVOLUTIONS, VECTORS, OTHERS = "embeddings", "convolutions", "norms and biases", "other tensors"
_ORDER = (EMBEDDINGS, CONVOLUTIONS, VECTORS, OTHERS)
_HOLDERS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Layers whose own parameters of two dimensions are all matrices."""
_METHODS = ("get_output_embeddings", "get_classifier")
"""Methods of the models of transformers and timm that return the output layer; a model of one's own may have one."""


@dataclass(frozen=True)
class ParameterDivision:
    """The trained parameters of a model, in its order."""

    hidden: list[nn.Parameter]
    """The matrices of hidden layers."""
    others: list[nn.Parameter]
    names: list[str]
    """The output layers in `others` by their paths, and the kinds of the rest."""

    def __str__(self) -> str:
        many, rest = len(self.hidden), len(self.others)
        return f"Muon: {many} {'matrix' if many == 1 else 'matrices'} of hidden layers; AdamW: " + (
            f"{rest} {'other' if rest == 1 else 'others'} ({', '.join(self.names)})" if rest else "none"
        )


def divide_parameters(model: nn.Module) -> ParameterDivision:
    """Divide the trained parameters of a model into the matrices of its hidden layers and all others.

    Matrices are the weights of linear, attention and recurrent layers, with the two matrices of a LoRA adapter among
    them. Output layers are those of `find_output_layers`. A weight that is tied to an embedding is an embedding.
    """
    looked_up = {id(p) for part in model.modules() if isinstance(part, TABLES) for p in part.parameters()}
    outputs = {id(p): name for name, part in find_output_layers(model).items() for p in part.parameters()}
    matrices = {id(p) for part in model.modules() for p in _list_matrices(part)} - looked_up - outputs.keys()
    kernels = {id(p) for part in model.modules() if isinstance(part, _ConvNd) for p in part.parameters()}
    hidden, others, names = list[nn.Parameter](), list[nn.Parameter](), set[str]()
    for parameter in model.parameters():
        key = id(parameter)
        if not parameter.requires_grad:
            continue
        if key in matrices:
            hidden.append(parameter)
            continue
        others.append(parameter)
        if key in looked_up:
            names.add(EMBEDDINGS)
        elif key in outputs:
            names.add(outputs[key])
        elif parameter.ndim <= 1:
            names.add(VECTORS)
        else:
            names.add(CONVOLUTIONS if key in kernels else OTHERS)
    layers = [name for name in dict.fromkeys(outputs.values()) if name in names]
    return ParameterDivision(hidden, others, [*layers, *(kind for kind in _ORDER if kind in names)])


def find_output_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the output layers of a model by their paths.

    They are what the model's `get_output_embeddings()` (transformers) or `get_classifier()` (timm) returns: one layer
    or several, none for an Identity. In a model without these methods, they are the output layers of the models in it,
    and its last linear layer in the order in which layers were registered. That is the order of `__init__`, which is
    not always the order of `forward`: a model with another order can define `get_classifier()`.
    """
    paths = {id(part): name for name, part in model.named_modules(remove_duplicate=False)}
    found = _ask_output_layers(model)
    if found is None:
        found = [*_iterate_answers(model), *_list_last_linear_layer(model)]
    return {paths[id(part)]: part for part in found if id(part) in paths}


def _iterate_answers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output layers of the models in a model; not of models in those."""
    for child in model.children():
        found = _ask_output_layers(child)
        yield from _iterate_answers(child) if found is None else found


def _ask_output_layers(model: nn.Module) -> list[nn.Module] | None:
    """Return what a model names as its output layers; None if it names nothing."""
    for method in _METHODS:
        ask = getattr(model, method, None)
        try:
            answer = ask() if callable(ask) else None
        except (AttributeError, NotImplementedError):  # a model of transformers without a head
            continue
        several = list(answer.values()) if isinstance(answer, Mapping) else answer
        layers = several if isinstance(several, tuple | list) else [several]
        if found := [layer for layer in layers if isinstance(layer, nn.Module)]:
            return found
    return None


def _list_last_linear_layer(model: nn.Module) -> list[nn.Module]:
    """Return the linear layer that was registered last, with an adapter around it, or nothing."""
    last: tuple[str, nn.Module] | None = None
    for name, part in model.named_modules():
        # The matrices of an adapter are linear layers in the layer that they adapt.
        inside = last is not None and (last[0] == "" or name.startswith(f"{last[0]}."))
        if not inside and _is_linear(getattr(part, "base_layer", part)):
            last = name, part
    return [] if last is None else [last[1]]


def _is_linear(part: nn.Module) -> bool:
    return _read_linear_shape(part) is not None


def _read_linear_shape(part: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of a linear layer's weight, in either order; None for any other layer."""
    if isinstance(part, nn.Linear):  # before a look at its weight, which torch's spectral_norm computes
        return part.out_features, part.in_features
    transformers = sys.modules.get("transformers.pytorch_utils")
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    # Layers of other libraries, such as transformer_engine, have the names of torch's; GPT-2's is the transpose.
    named = isinstance(getattr(part, "in_features", None), int) and isinstance(getattr(part, "out_features", None), int)
    is_linear = named or (transformers is not None and isinstance(part, transformers.Conv1D))
    return tuple(weight.shape) if is_linear else None


def _list_matrices(part: nn.Module) -> list[nn.Parameter]:
    """Return a layer's own matrices."""
    own = [p for p in part.parameters(recurse=False) if p.ndim == 2]
    if isinstance(part, _HOLDERS):
        return own
    shape = _read_linear_shape(part)
    # Not the lengths that torch's weight_norm puts next to a weight: a matrix with one column.
    return [] if shape is None else [p for p in own if sorted(p.shape) == sorted(shape)]
