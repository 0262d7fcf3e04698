"""The ledger of a step on a GPU that is not here, by the GPU's own rules of autocast.

Tensors that are only described can lie on a device that is not here: torch then takes CUDA's decisions about formats,
and allocates nothing. Where it would ask a driver, it is answered in here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from halfstep.errors import HalfstepError, PrecisionRefused
from halfstep.measure.case import Case
from halfstep.measure.code_lines import MEASURING, lines_outside, place
from halfstep.measure.memory.backward import walked
from halfstep.measure.memory.devices import Target
from halfstep.measure.memory.estimate import ledger_of
from halfstep.measure.memory.ledger import Ledger, Note
from halfstep.measure.setting import Setting

_REFUSED = "unsafe to autocast"
FOLLOWED = (
    "forward and backward by CUDA's rules, on tensors that are only described; what a kernel takes inside itself is "
    "not counted; not verified on this device"
)
NOT_FOLLOWED = (
    "by the CPU's rules, because CUDA's could not be followed without a GPU ({}); not verified on this device"
)
OTHER_RULES = "by the CPU's rules, not by this device's; not verified on this device"


def ledger_on(make_case: Callable[[], Case], setting: Setting, target: Target) -> Ledger:
    """The ledger of a setting on a device that need not be here."""
    if target.device.kind == "cpu":
        return ledger_of(make_case, setting)
    if target.rules != "cuda":
        return _marked(ledger_of(make_case, setting), target, OTHER_RULES)
    try:
        return _marked(ledger_by_cuda(make_case, setting), target, FOLLOWED)
    except HalfstepError:
        raise
    except Exception as error:
        # Kernels that ask the driver before they run: a recurrent layer of cuDNN, an extension of someone's own.
        reason = (str(error).splitlines() or [""])[0][:80] or type(error).__name__
    # Outside of the handler, so that an error of the person's, which comes again, is told once.
    return _marked(ledger_of(make_case, setting), target, NOT_FOLLOWED.format(reason))


def _marked(ledger: Ledger, target: Target, note: str) -> Ledger:
    remarks = [remark for remark in ledger.remarks if not remark.only_here]
    return replace(ledger, device=target.id, verified=False, remarks=(*remarks, Note(note)))


def ledger_by_cuda(make_case: Callable[[], Case], setting: Setting) -> Ledger:
    """Two updates on described tensors of a GPU; the ledger is of the second one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tensors without memory, and a driver that is not here
        with gpu_pretended(), walked():
            try:
                return ledger_of(lambda: without_values(make_case()), setting, "cuda")
            except RuntimeError as error:
                if _REFUSED in str(error):
                    raise _refusal(error, setting.precision) from None
                raise
            finally:
                torch.clear_autocast_cache()


def without_values(case: Case) -> Case:
    """A described tensor made from a number keeps that number, and torch would move it to the GPU for real."""
    for tensor in (*case.model.buffers(), *pytree.tree_leaves(case.batch)):
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
    return case


@contextmanager
def gpu_pretended() -> Iterator[None]:
    """torch behaves as with a GPU where it asks for one: autocast stays on, and attention takes its fused kernel."""
    with (
        _replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        _replaced(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        _replaced(functional, "scaled_dot_product_attention", _attention),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_attention_of_torch = functional.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as a GPU runs it, which never writes the matrix of scores.

    Without a GPU torch takes the formula instead of the kernel, and would keep that matrix several times.
    """
    if query.device.type != "cuda" or query.dim() != 4 or enable_gqa:
        return _attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if torch.is_autocast_enabled("cuda"):
        narrow = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    bias = (
        None
        if attn_mask is None
        else torch.zeros_like(attn_mask, dtype=query.dtype).expand(
            query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        )
    )
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return out


def _refusal(error: RuntimeError, precision: str) -> PrecisionRefused:
    what = str(error).split(" and ")[0].removeprefix("torch.nn.functional.")
    return PrecisionRefused(
        f"CUDA's autocast refuses {what} in {precision}, called at {_asked_at(error)}",
        allowed="binary_cross_entropy_with_logits, or the same loss in fp32",
        do="leave the sigmoid out and use nn.BCEWithLogitsLoss(), or wrap the loss: halfstep.island(nn.BCELoss())",
    )


def _asked_at(error: BaseException) -> str:
    """The innermost line of the person's own code."""
    lines = lines_outside(error, *MEASURING)
    return place(lines[-1]) if lines else "an unknown line"
