"""Gather the weights of fp8 layers in fp8 under FSDP2; imported only where there are such layers.

The scale of a weight is that of its bf16 values on all ranks, as it would be after a gather in bf16: the products have
the same bits, and half the bytes are sent. Parameters, optimizer and checkpoints stay plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData, FSDPParam, ShardedState
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from halfstep.precision.float8_layers import Float8Layer
from halfstep.step.synchronizers.shard_formats import read_param_policy

Largest = Callable[[Tensor], Tensor]
"""The largest numbers over all ranks, of a tensor with those of this rank."""


class _Float8GatheredParam(FSDPParam):
    """A parameter of FSDP2 that is gathered in fp8 while its layer computes in fp8, and as any other while not."""

    _in_fp8: bool
    _weight: _Float8WeightShard

    @property
    def _sharded_local_tensor(self) -> Any:
        in_fp8 = _computes_in_fp8(self._module_info.module)
        if in_fp8 != self._in_fp8 and self.sharded_state is ShardedState.SHARDED:
            # What FSDP2 keeps from one gather to the next is of the other format.
            self._in_fp8 = in_fp8
            self.all_gather_outputs, self._unsharded_inner_tensors = [], []
            vars(self).pop("_unsharded_param", None)
        return self._weight if self._in_fp8 else super()._sharded_local_tensor


class _Float8WeightShard:
    """The shard of a weight, as FSDP2's extension asks for it."""

    def __init__(self, group: Any, param: Any, largest: Largest) -> None:
        self.param, self._group, self._largest, self.layer = param, group, largest, param._module_info.module
        self._scale, self._version = torch.ones(()), -1

    @property
    def version(self) -> int:
        """A number that changes with the weight."""
        return int(self.param.sharded_param._version + self.param.sharded_param._local_tensor._version)

    def amax(self) -> Tensor:
        """Return the largest absolute value of this shard in the format that it would be gathered in."""
        # Rounding is monotonic, so that the largest number rounded is the largest rounded number.
        largest: Tensor = torch.linalg.vector_norm(self._shard_in_param_dtype(), math.inf, dtype=torch.float32)
        return largest

    def scale_by(self, amax: Tensor) -> None:
        self._scale, self._version = amax_to_scale(amax, self._format), self.version

    def forget_scale(self) -> None:
        """Compute the scale again before the next gather."""
        self._version = -1

    @property
    def _format(self) -> torch.dtype:
        format: torch.dtype = self.layer.config.cast_config_weight.target_dtype
        return format

    def _shard_in_param_dtype(self) -> Tensor:
        shard: Tensor = self.param._sharded_param_data.view(self.param.padded_sharded_param_size)
        return shard.to(read_param_policy(self._group, self.param).param_dtype or shard.dtype)

    def size(self) -> torch.Size:
        padded: torch.Size = self.param.padded_sharded_param_size
        return padded

    @torch.no_grad()
    def fsdp_pre_all_gather(self, _mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        # Outside of a window, such as in an evaluation after an update, no rank has computed the scales.
        if self._version != self.version:
            self.scale_by(self._largest(self.amax()))
        cast = hp_tensor_and_scale_to_float8(self._shard_in_param_dtype(), self._scale, self._format)
        return (cast._data.view(torch.uint8),), self._scale  # gloo knows no fp8

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            out._scale = scale
            return None
        data = gathered[0].view(self._format)
        return Float8TrainingTensor(data, scale, dtype, self.layer.linear_mm_config, GemmInputRole.WEIGHT), (data,)


def gather_in_fp8(groups: Iterable[Any], largest: Largest) -> list[_Float8WeightShard]:
    """Have FSDP2 gather the weights of fp8 layers in fp8 from now on; return these weights.

    Raises an error before anything is changed where FSDP2 has other private classes than this was written for.
    """
    found = list[_Float8WeightShard]()
    for group in groups:
        for param in group.fsdp_params:
            if isinstance(param, _Float8GatheredParam):
                found.append(param._weight)
            elif _can_gather_in_fp8(group, param):
                param._weight, param._in_fp8 = _Float8WeightShard(group, param, largest), False
                param._extensions_data = ExtensionsData()
                param.__class__ = _Float8GatheredParam
                if not found:
                    _check_sends_fp8(param)
                found.append(param._weight)
    return found


def _check_sends_fp8(param: Any) -> None:
    """Ask FSDP2 for what it would send of a parameter; restore its class and raise if that is not fp8."""
    weight = param._weight
    try:
        weight.scale_by(weight.amax())  # of this shard alone: nothing is sent here
        formats = [each.dtype for each in param.all_gather_inputs]
        if formats != [torch.uint8]:
            raise TypeError(f"FSDP2 sends {formats} instead of fp8")
    except BaseException:
        param.__class__ = FSDPParam
        raise
    finally:
        weight.forget_scale()


def _can_gather_in_fp8(group: Any, param: Any) -> bool:
    info = param._module_info
    # FSDP2 gathers no extension from the smaller groups of `reshard_after_forward`, and tensor parallel holds parts.
    whole = type(param) is FSDPParam and not param.is_dtensor and not group._use_post_forward_mesh
    alone = info.param_name == "weight" and not info.shared_modules and not param.offload_to_cpu
    return whole and alone and _computes_in_fp8(info.module)


def _computes_in_fp8(layer: nn.Module) -> bool:
    return (
        isinstance(layer, Float8Layer)
        and "forward" not in vars(layer)
        # One scale for the whole weight: those of rows are of other rows once it is transposed.
        and layer.config.cast_config_weight.scaling_granularity.name == "TENSORWISE"
    )


@torch.no_grad()
def compute_float8_scales(weights: Iterable[_Float8WeightShard], largest: Largest) -> None:
    """Compute the scales of all weights with one collective."""
    ours = [weight for weight in weights if _computes_in_fp8(weight.layer)]
    if ours:
        for weight, amax in zip(ours, largest(torch.stack([weight.amax() for weight in ours])), strict=True):
            weight.scale_by(amax)
