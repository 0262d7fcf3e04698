"""Adam and AdamW of torchao, whose moments of matrices are stored in 8 bits with a scale for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn, optim

from halfstep import distributed
from halfstep.errors import BadRecipe, convert_import_error
from halfstep.step.storage.small_states import build_dtensor_like, has_even_shards
from halfstep.step.synchronizers.shard_units import NORM_LAYERS

SMALLEST = 4096
"""Elements of the smallest tensor whose moments are stored in 8 bits; for smaller ones it saves nothing."""


class ParameterGroup(TypedDict, total=False):
    """Parameters of an optimizer; without `weight_decay`, the optimizer's own applies."""

    params: list[nn.Parameter]
    weight_decay: float
    fp32_state: bool


def build_low_bit_adam(name: str, state: str, groups: Iterable[ParameterGroup], **arguments: Any) -> optim.Optimizer:
    """Return torchao's Adam or AdamW with moments in `state`; raise BadRecipe, or MissingExtra without torchao.

    Groups with the option `fp32_state` keep their moments in fp32.
    """
    names = {("adamw", "int8"): "AdamW8bit", ("adamw", "fp8"): "AdamWFp8"}
    names |= {("adam", "int8"): "Adam8bit", ("adam", "fp8"): "AdamFp8"}
    if (name, state) not in names:
        raise BadRecipe(
            f"optimizer.state={state} with optimizer.name={name}",
            allowed="int8 and fp8 with adamw and adam",
            do="write optimizer.name=adamw, or leave optimizer.state out",
        )
    try:
        import torchao.optim as small
    except ImportError as error:
        raise convert_import_error(error) or error from error
    base = getattr(small, names[name, state])
    return type(base.__name__, (WideGroupsMixin, base), {"_tables": {}})(groups, **arguments)  # type: ignore[no-any-return]


class WideGroupsMixin:
    """Changes to an optimizer of torchao: groups with moments in fp32, lr as a number, no compilation on a CPU."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    block_size: int
    is_adamw: bool
    _subclass_zeros: Callable[[Tensor, bool, int], Tensor]
    _tables: dict[tuple[torch.device, bool], Tensor]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group; lr stays a number, which schedules and checkpoints expect."""
        group.setdefault("fp32_state", False)
        optim.Optimizer.add_param_group(self, group)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # torchao compiles code for a tensor; for a number it would compile again after each change.
            lr = torch.tensor(float(group["lr"]), dtype=torch.float32)
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, lr, group)
        return loss

    def _update(self, p: Tensor, lr: Tensor, group: dict[str, Any]) -> None:
        from torchao.optim.adam import single_param_adam

        if p.grad is not None and p.grad.is_sparse:
            raise RuntimeError("Sparse gradient is not supported")
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self._moment(p, group["fp32_state"], signed=True)
            state["exp_avg_sq"] = self._moment(p, group["fp32_state"], signed=False)
        state["step"] += 1
        # Compiling takes longer than many steps on a CPU.
        compiled = not p.is_cpu
        update = torch.compile(single_param_adam, fullgraph=True, dynamic=False) if compiled else single_param_adam
        moments = state["step"], state["exp_avg"], state["exp_avg_sq"], None
        numbers = lr, *group["betas"], group["weight_decay"], group["eps"]
        update(p.detach(), p.grad, *moments, *numbers, self.is_adamw, False)

    def _moment(self, p: Tensor, wide: bool, *, signed: bool) -> Tensor:
        if wide or p.numel() < SMALLEST or not has_even_shards(p, self.block_size):
            return torch.zeros_like(p, dtype=torch.float32)
        own: Any = self._subclass_zeros(distributed.unwrap_local_tensor(p.detach()), signed, self.block_size)
        if hasattr(own, "qmap"):
            # One table for all: 256 numbers are a sixteenth of a small tensor's state.
            own.qmap = self._tables.setdefault((own.device, signed), own.qmap)
        return build_dtensor_like(p, own, tuple(p.shape)) if distributed.is_dtensor_shard(p) else own


def group_low_bit_parameters(model: nn.Module, trained: list[nn.Parameter]) -> list[ParameterGroup]:
    """Return parameter groups: matrices; with moments in fp32 embeddings and norms; and vectors, without decay."""
    kinds = (nn.Embedding, nn.EmbeddingBag, *NORM_LAYERS)
    looked_up = {id(p) for part in model.modules() if isinstance(part, kinds) for p in part.parameters()}
    groups: list[ParameterGroup] = [
        {"params": [p for p in trained if p.ndim > 1 and id(p) not in looked_up], "fp32_state": False},
        {"params": [p for p in trained if p.ndim > 1 and id(p) in looked_up], "fp32_state": True},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "fp32_state": True},
    ]
    return [group for group in groups if group["params"]]
