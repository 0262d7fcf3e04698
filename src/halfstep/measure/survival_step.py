"""One step of a copy of a case, forward and backward, under a rounding: its loss, its gradients, its ranges."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.errors import WrongUse
from halfstep.formats import widest
from halfstep.measure.batches import placed as placed_batch
from halfstep.measure.case import SEED, Case
from halfstep.observe.recorder import Recorder
from halfstep.observe.rounding import Rounding
from halfstep.precision import flags
from halfstep.precision.island import island
from halfstep.precision.precision import widen
from halfstep.step.attempt import generator_states, set_generator_states
from halfstep.step.loss_scale import DynamicScale

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one step came to."""

    rounding: Rounding | None
    loss: float
    gradients: Gradients
    """Of the parameters, divided by the loss scale again."""
    scale: float

    @property
    def gradients_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())

    @property
    def fits(self) -> bool:
        """Nothing overflowed in forward, and everything is finite."""
        overflowed = self.rounding is not None and self.rounding.ranges.first_on_the_way_forward is not None
        return not overflowed and math.isfinite(self.loss) and self.gradients_finite


def step(
    case: Case,
    device: torch.device,
    rounding: Rounding | None,
    *,
    scale: float = 1.0,
    islands: tuple[str, ...] = (),
) -> Outcome:
    """The step in the format that `rounding` emulates, or in strict fp32. Nothing of the person's is touched."""
    model = copy.deepcopy(case.model).to(device)
    model.zero_grad(set_to_none=True)
    if islands:
        island(model, *islands)
    batch = pytree.tree_map_only(Tensor, Tensor.clone, placed_batch(case.batch, device))
    with undisturbed(device), ExitStack() as active:
        if rounding is not None:
            active.enter_context(recurrent_steps_shown(model))
            active.enter_context(Recorder(model, rounding, rounding.run))
        with torch.autocast(device.type, dtype=rounding.carrier) if rounding else ExitStack():
            loss = one_loss(case.loss_fn(model, batch))
        (loss * scale).backward()
    # In fp64 where there is one, so that the division takes nothing away.
    gradients = {
        name: parameter.grad.detach().to(widest(device)) / scale
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Outcome(rounding, loss.item(), gradients, scale)


def step_with_loss_scale(
    case: Case, device: torch.device, make: Callable[[], Rounding], *, islands: tuple[str, ...] = ()
) -> Outcome:
    """The step at the first loss scale at which all gradients are finite, as a run would find it; else at the floor."""
    scale = DynamicScale()
    while True:
        outcome = step(case, device, make(), scale=scale.value, islands=islands)
        # A loss that is not finite is so at every scale.
        if outcome.gradients_finite or not math.isfinite(outcome.loss) or not scale.can_fall:
            return outcome
        scale.update(overflow=True)


@contextmanager
def recurrent_steps_shown(model: nn.Module) -> Iterator[None]:
    """oneDNN's kernel of a whole recurrent layer shows none of its numbers; without it, each step is seen."""
    before = torch._C._get_mkldnn_enabled()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The same random numbers in every step, fp32 that is fp32, no compilation; everything as before afterwards."""
    states = generator_states(device)
    with ExitStack() as active:
        active.callback(set_generator_states, states, device)
        active.enter_context(flags.fp32_scope("ieee", device))
        if "torch._dynamo" in sys.modules:
            active.enter_context(torch.compiler.set_stance("force_eager"))
        torch.manual_seed(SEED)
        yield


def one_loss(given: Any) -> Tensor:
    """One scalar from a loss, from (sum, count), or from a dict of those."""
    if isinstance(given, dict) and given:
        return torch.stack([one_loss(part) for part in given.values()]).sum()
    if isinstance(given, tuple) and len(given) == 2:
        return one_loss(given[0]).div(given[1])
    if isinstance(given, Tensor) and given.ndim == 0 and given.requires_grad:
        return widen(given)
    what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise WrongUse(
        f"{what} as the loss",
        allowed="a scalar tensor with a graph behind it, (sum, count), or a dict of those",
        do="return loss.mean(), and call the model outside torch.no_grad()",
    )
