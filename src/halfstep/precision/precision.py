"""Precisions as values: how a run stores, computes, reduces and protects numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from halfstep.errors import build_unknown_name_error
from halfstep.formats import BF16, FP16, FP32, FP64, TF32, Format
from halfstep.formats import widen as widen
from halfstep.precision import flags, names
from halfstep.precision.island import undo_policy
from halfstep.precision.names import (
    FP8_KINDS,
    PolicyRule,
    format_policy_name,
    is_policy,
    list_precision_names,
    parse_policy_name,
)

# -- half convolutions ------------------------------------------------------------------------------------------------
# Speed up fp16 convolutions on a CPU: oneDNN has no kernel for their backward and falls back to a reference loop.
# Disabling oneDNN only while a convolution's backward node runs was the fastest way tried. Disabled throughout, matrix
# products in fp16 become slower by two orders of magnitude.


_MARK = "_halfstep_spared"


def disable_onednn_fp16_backward(model: nn.Module) -> int:
    """Run the backward of each fp16 convolution in `model` without oneDNN; return the number of modules."""
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    for module in convolutions:
        if not hasattr(module, _MARK):
            module.register_forward_hook(_hook_onednn_switch)
            setattr(module, _MARK, True)
    return len(convolutions)


def _hook_onednn_switch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    node = output.grad_fn
    if node is None or output.dtype is not torch.float16 or output.device.type != "cpu":
        return
    # The user's own setting, not the current one: another thread's backward may have turned the switch off right now.
    before = flags.read_user_mkldnn()
    # Hooks of the graph node, not of the module: where the input needs no gradient, as in a first layer, torch calls a
    # module's backward hook before the kernel runs.
    node.register_prehook(lambda _grads: _set_onednn(False))
    node.register_hook(lambda _in, _out: _set_onednn(before))


def _set_onednn(on: object) -> None:
    torch.backends.mkldnn.enabled = on  # type: ignore[assignment]


# -- precision --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision: the formats and the protection that one name stands for. All of them are in `PRECISIONS`."""

    name: str
    summary: str
    computes: Format
    """The format of matrix multiplications and convolutions."""
    stores: Format = FP32
    """The format of trainable weights and of optimizer state."""
    reduces: Format = FP32
    """The format in which gradients are summed over ranks."""
    scaled: bool = False
    """Whether small gradients underflow in this format, so that the loss is scaled up before backward."""
    falls_to: str | None = None
    """The fallback for devices that do not support this format."""
    converts: str = ""
    """The kind of fp8 that linear layers compute in, where the kernel can; empty for none."""
    rules: tuple[PolicyRule, ...] = ()
    """The rules of a policy, which differ from the rest by module."""

    @property
    def needs(self) -> str:
        """The format that a device must have."""
        return self.converts.partition("-")[0] or self.computes.name

    @property
    def changes_model(self) -> bool:
        """Whether it converts layers of a model, or makes islands of some."""
        return bool(self.converts or self.rules)

    @property
    def casts(self) -> bool:
        """Whether weights are cast for computing, or used as they are stored."""
        return self.computes not in (self.stores, TF32)

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype that weights are cast to; None if they are used as they are stored."""
        return self.computes.dtype if self.casts else None

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context for the forward pass, and for nothing else. Reusable, by one thread at a time."""
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.computes.dtype)

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context for forward and backward, which sets global switches and restores them.

        Values that stay in fp32 are computed in IEEE fp32, in islands too, unless tf32 was requested by name.
        """
        fp32 = flags.create_fp32_scope("tf32" if self.computes is TF32 else "ieee", device)
        if self.casts:
            fp32 = flags.wrap_backward_outside_autocast(fp32)
        return flags.wrap_keeping_mkldnn(fp32) if self._spares_convolutions(device) else fp32

    @contextmanager
    def inference(self, device: torch.device) -> Iterator[None]:
        """Run forward passes without gradients inside this context: evaluation and prediction."""
        with torch.no_grad(), self.scope(device), self.autocast(device):
            yield

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Prepare a model before the first step: convert its layers, after another precision's were restored."""
        if self.changes_model:
            from halfstep.precision.policy import apply_policy

            apply_policy(model, self.converts, self.rules)
        else:
            undo_policy(model)
        if self._spares_convolutions(device):
            disable_onednn_fp16_backward(model)

    def _spares_convolutions(self, device: torch.device) -> bool:
        return self.computes is FP16 and device.type == "cpu"

    def __str__(self) -> str:
        return self.name


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(
            name="bf16",
            summary="fp32 weights, bf16 compute, fp32 reduce; fp32's range, so no loss scale",
            computes=BF16,
            falls_to="fp16",
        ),
        Precision(
            name="fp16",
            summary="fp32 weights, fp16 compute, fp32 reduce, loss scaled so that small gradients survive",
            computes=FP16,
            scaled=True,
            falls_to="tf32",
        ),
        Precision(
            name="fp32",
            summary="fp32 throughout, with TF32 switched off: the strict baseline",
            computes=FP32,
        ),
        Precision(
            name="tf32",
            summary="fp32 weights, products rounded to tf32 inside the tensor cores",
            computes=TF32,
            falls_to="fp32",
        ),
        Precision(
            name=names.FP64,
            summary="fp64 throughout, for a model in float64; never chosen by auto",
            computes=FP64,
            stores=FP64,
            reduces=FP64,
        ),
        *(
            Precision(name=kind, summary=summary, computes=BF16, falls_to="bf16", converts=kind)
            for kind, summary in {
                "fp8": "bf16, and linear layers in fp8 with a scale for each tensor",
                "fp8-rowwise": "bf16, and linear layers in fp8 with a scale for each row",
                "fp8-rowwise-gw-hp": "as fp8-rowwise, with the gradients of weights in bf16",
                "mxfp8": "bf16, and linear layers in fp8 with a scale for each 32 numbers",
            }.items()
        ),
    )
}
assert list(PRECISIONS) == [
    *list_precision_names(),
    names.FP64,
    *FP8_KINDS,
]  # the names are listed apart, so that reading them needs no torch


def resolve_precision_name(name: str) -> Precision:
    """Return the precision of exactly this name, or raise UnknownName; `parse_precision` accepts aliases."""
    if is_policy(name):
        default, rules = parse_policy_name(name)
        return add_policy_rules(resolve_precision_name(default), rules)
    if name not in PRECISIONS:
        raise build_unknown_name_error("precision", name, PRECISIONS)
    return PRECISIONS[name]


def add_policy_rules(precision: Precision, rules: tuple[PolicyRule, ...]) -> Precision:
    """Return a precision with the rules of a policy."""
    summary = f"{precision.summary}; by pattern: {', '.join(f'{rule.pattern} {rule.name}' for rule in rules)}"
    return replace(precision, name=format_policy_name(precision.name, rules), summary=summary, rules=rules)
