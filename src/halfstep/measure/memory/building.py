"""A case on fake tensors, which have shapes, formats and devices, and no memory behind them."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from halfstep.measure.case import Case

_COPIED = "Accessing the data pointer of FakeTensor"
"""What torch says when a module on fakes is deep-copied, as nn.TransformerEncoder does with its layer."""


def fake_mode() -> FakeTensorMode:
    """Real tensors that a person's loss brings along become fake when they are used."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def built(make: Callable[[], Case], mode: FakeTensorMode) -> Case:
    """The case on fakes. A model that can be built on them costs nothing, however large; others are built for real."""
    try:
        with mode, warnings.catch_warnings(), _without_a_word():
            warnings.filterwarnings("ignore", _COPIED)
            case = make()
    except Exception:  # it needs a value while it is built, or its own error, which comes again now
        case = make()
    return as_fake(case, mode)


@contextmanager
def _without_a_word() -> Iterator[None]:
    """torch logs a traceback where a fake cannot do what is asked of it, as with weights from a file."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def as_fake(case: Case, mode: FakeTensorMode) -> Case:
    """The same case on fakes; the person's model, its gradients and its memory are not touched, nor copied."""
    return replace(case, model=_fake_model(case.model, mode), batch=_fake(case.batch, mode))


def _fake_model(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    real = {id(tensor): tensor for tensor in _tensors_of(model) if not isinstance(tensor, FakeTensor)}
    if not real:
        return model
    # What deepcopy finds in its memo it does not copy; one twin for each tensor keeps tied weights tied.
    memo: dict[int, Any] = {key: _twin(tensor, mode) for key, tensor in real.items()}
    return copy.deepcopy(model, memo)


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and what modules keep as plain attributes."""
    for module in model.modules():
        for value in (module._parameters, module._buffers, *vars(module).values()):
            if not isinstance(value, nn.Module):
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _twin(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    twin = mode.from_tensor(tensor)
    twin.grad = None
    return twin


def _fake(batch: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t), batch)
