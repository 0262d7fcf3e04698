"""How gradients become the same on all processes. One object per situation, so that the step has no branch on it.

torch's own machinery does the work: DistributedDataParallel round a module whose forward *is* the loss function, so
that `model.encode(...)` inside it synchronises as well as `model(...)`; FSDP2 where the model is sharded already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.step.gradients import Gradients

LossFunction = Callable[[Any, Any], Any]


class Synchroniser(ABC):
    """Runs a loss function so that, after the last micro-batch, gradients are averaged over processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """One micro-batch, in the function form of the step."""

    @abstractmethod
    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Round a forward pass that the caller writes."""

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """After the last backward."""
        return

    def follow(self) -> None:
        """Parameters came, left or were unfrozen."""
        return


class Alone(Synchroniser):
    """One process: nothing to do."""

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()


class _Job(nn.Module):
    """A module whose forward is the loss function of the moment."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFunction, batch: Any) -> Any:
        return loss_fn(self.model, batch)


class Replicated(Synchroniser):
    """A plain model, the same on every process."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._options = dict(options)
        self.follow()

    def follow(self) -> None:
        self._job = DistributedDataParallel(_Job(self.model), **self._options)

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        with nullcontext() if last else self._job.no_sync():
            return self._job(loss_fn, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        raise WrongUse(
            "stepper.forward() with a plain model on several processes",
            allowed="the function form, or a model in DistributedDataParallel",
            do="stepper.step(loss_fn, batch), or Stepper(DistributedDataParallel(model), ...)",
        )


class Wrapped(Synchroniser):
    """A model that came in DistributedDataParallel: its own forward synchronises, and nothing else of it does."""

    model: DistributedDataParallel

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        raise WrongUse(
            "stepper.step() with a model in DistributedDataParallel",
            allowed="the plain model, which halfstep wraps so that all of its methods synchronise",
            do="Stepper(model.module, ...); or keep the wrapper and use stepper.forward()",
        )

    def forward(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.model.no_sync()


class Sharded(Synchroniser):
    """A model under FSDP2's fully_shard."""

    model: Any

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        with self.forward(last):
            return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class Averaged(Synchroniser):
    """Several losses, each with a backward of its own: gradients are averaged after the last one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, gradients: Sequence[Gradients]) -> None:
        for some in gradients:
            _average_(some.trainable)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


@torch.no_grad()
def _average_(parameters: list[Tensor]) -> None:
    """Every process sends every parameter, reached or not, so that all of them speak of the same ones."""
    mine = [p.grad is not None for p in parameters]
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    reached = torch.tensor(mine, dtype=pieces[0].dtype, device=pieces[0].device)
    flat = torch.cat([*(piece.flatten() for piece in pieces), reached]) / world.size()
    dist.all_reduce(flat)
    *averages, anywhere = flat.split([*(p.numel() for p in parameters), len(parameters)])
    # Read only where a parameter was not reached here: it still has no gradient, if it was reached nowhere.
    somewhere = mine if all(mine) else (anywhere > 0).tolist()
    for parameter, average, any_process in zip(parameters, averages, somewhere, strict=True):
        parameter.grad = average.view_as(parameter).clone() if any_process else None


def synchroniser(model: nn.Module, *, losses: int, ddp: Mapping[str, Any]) -> Synchroniser:
    """The one that fits this model in this world."""
    if world.size() == 1:
        return Alone(model)
    if isinstance(model, FSDPModule):
        return Sharded(model)
    if isinstance(model, DistributedDataParallel):
        return Wrapped(model)
    return Replicated(model, ddp) if losses == 1 else Averaged(model)
