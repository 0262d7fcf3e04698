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
from torch.nn.parallel import DistributedDataParallel

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.step.gradients import Gradients

LossFunction = Callable[[Any, Any], Any]


class Synchroniser(ABC):
    """Runs a loss function so that, after the last micro-batch, gradients are averaged over processes."""

    cure: str = ""
    """What to do where gradients turn out to differ between processes."""

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

    cure = "Stepper(..., ddp={'find_unused_parameters': True}), or freeze what the loss does not use"

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
    cure = (
        "call the wrapper, not its .module; wrap anew after unfreezing; find_unused_parameters=True where some are not"
    )

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

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.follow()

    def follow(self) -> None:
        outside = [n for n, p in self.model.named_parameters() if p.requires_grad and not world.is_shard(p)]
        if outside:
            raise WrongUse(
                f"trainable parameters that FSDP2 does not hold: {', '.join(outside[:5])}",
                allowed="every trainable parameter in fully_shard, which synchronises what it holds",
                do="fully_shard(model) without ignored_params, or freeze them",
            )

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        with self.forward(last):
            return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class Averaged(Synchroniser):
    """Several losses, each with a backward of its own: gradients are averaged after the last one."""

    cure = "let every process compute every loss, from the same modules"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.follow()

    def follow(self) -> None:
        _copy_from_rank_zero_([*self.model.parameters(), *self.model.buffers()])

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def finish(self, gradients: Sequence[Gradients]) -> None:
        for some in gradients:
            _average_(some.trainable)
        _copy_from_rank_zero_(list(self.model.buffers()))


@torch.no_grad()
def _copy_from_rank_zero_(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        # Backends write where a tensor's elements would be if it were contiguous.
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        if whole.data_ptr() != tensor.data_ptr() and not torch._debug_has_internal_overlap(tensor):
            tensor.detach().copy_(whole)


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
    if any(map(world.is_shard, model.parameters())):
        _check_sharding(model, losses)
        return Sharded(model)
    if isinstance(model, DistributedDataParallel):
        return Wrapped(model)
    return Replicated(model, ddp) if losses == 1 else Averaged(model)


def _check_sharding(model: nn.Module, losses: int) -> None:
    from torch.distributed.fsdp import FSDPModule  # slow to load, and loaded already where it is needed

    allowed = "fully_shard on the model itself, and one optimizer"
    if losses > 1:
        given, do = "several optimizers with a sharded model", "join the parameters in one optimizer"
        raise WrongUse(given, allowed=allowed, do=do)
    if not isinstance(model, FSDPModule):
        given, do = "a model of which only parts are sharded", "fully_shard(model) after its parts"
        raise WrongUse(given, allowed=allowed, do=do)
