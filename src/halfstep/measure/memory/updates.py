"""Updates of a case on fake tensors, as a run takes them: forward, backward, update, gradients gone."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import WrongUse
from halfstep.measure.batches import placed as placed_batch
from halfstep.measure.batches import resized, size_of, tensors
from halfstep.measure.case import Case
from halfstep.measure.memory.placing import placed
from halfstep.measure.memory.timeline import BACKWARD, FORWARD, UPDATE, Timeline
from halfstep.measure.setting import Setting
from halfstep.observe.recorder import Recorder
from halfstep.precision.island import settle
from halfstep.precision.precision import Precision, widen
from halfstep.step.transaction import ONLY
from halfstep.train.recomputing import checkpoint_activations

_LATER = 1000
"""Updates that an optimizer is told it has taken. RAdam takes less memory in its first few; NAdam divides by 1 - it."""
_SCALE = 2.0**16
"""Any loss scale: its size changes no memory."""


class FakeArm:
    """A case under a setting, ready to step. To be made and used inside the mode of its fake tensors."""

    def __init__(self, case: Case, setting: Setting, precision: Precision, device: torch.device) -> None:
        self.precision, self.device, self.microbatches = precision, device, setting.microbatches
        self.model = placed(case.model, device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self.model)
        batch = placed_batch(case.batch, device, setting.channels_last)
        self.batch = resized(batch, setting.batch or size_of(batch))
        self.loss_fn = case.loss_fn
        precision.prepare(self.model, device)
        settle(self.model)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.optimizer = _as_it_runs(case.optimizer(self.model), device)
        self.timeline = Timeline()
        self.timeline.hold(self.model.parameters(), "weights")
        self.timeline.hold(self.model.buffers(), "buffers")
        self.timeline.hold(tensors(self.batch), "batch")

    def recorder(self) -> Recorder:
        """Round whatever is to be in the timeline."""
        return Recorder(self.model, self.timeline)

    def step(self) -> None:
        """One whole update."""
        torch.clear_autocast_cache()
        for _ in range(self.microbatches):
            with self.precision.scope(self.device):
                loss = self._forward()
                self.timeline.begin(BACKWARD)
                loss.backward()
                del loss  # with what is left of its graph
            gradients = (p.grad for p in self.model.parameters())
            self.timeline.hold((gradient for gradient in gradients if gradient is not None), "gradients")
        self.timeline.begin(UPDATE)
        with _AnyNumber():
            self.optimizer.step()
        self.timeline.hold(tensors(list(self.optimizer.state.values())), "optimizer")
        for parameter in self.model.parameters():
            parameter.grad = None

    def _forward(self) -> Tensor:
        """A micro-batch's loss, as backward runs on it."""
        self.timeline.begin(FORWARD)
        with self.precision.autocast(self.device):
            loss = self.loss_fn(self.model, self.batch)
        loss = _ready(loss)
        if self.microbatches > 1:
            loss = loss / self.microbatches
        return loss * _SCALE if self.precision.scaled else loss


def _as_it_runs(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """With the choices that torch makes by looking at real parameters: on a GPU it updates all of them together."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise WrongUse(
            f"{type(optimizer).__name__}, whose step runs the model as often as it likes",
            allowed="optimizers that take a step from gradients that are there: step()",
            do="estimate with the optimizer left out, and add its state by hand",
        )
    for group in optimizer.param_groups:
        alone = group.get("fused") or group.get("differentiable") or isinstance(group.get("lr"), Tensor)
        if device.type == "cuda" and not alone and group.get("foreach", False) is None:
            group["foreach"] = True
    return optimizer


def _ready(loss: Any) -> Tensor:
    """A loss, or (sum, count), or a dict with one of these, as one number to differentiate."""
    if isinstance(loss, dict) and ONLY in loss:
        loss = loss[ONLY]
    counted = isinstance(loss, tuple) and len(loss) == 2
    value = loss[0] if counted else loss
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise WrongUse(
            f"{what} as the loss" if not isinstance(value, Tensor) or value.ndim else "a loss that no parameter is in",
            allowed="a scalar tensor with a graph behind it, or (sum, count)",
            do="return loss.mean(), and call the model outside torch.no_grad()",
        )
    return widen(value) / 1.0 if counted else widen(value)


class _AnyNumber(TorchDispatchMode):
    """Optimizers that are not fused read their own step count: which number it is changes no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        return float(_LATER) if args[0].is_floating_point() else _LATER
