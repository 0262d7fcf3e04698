"""Synchronize a model that every rank holds completely: with DistributedDataParallel, or by averaging gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import WrongUse
from halfstep.step.census import find_buffer
from halfstep.step.optimizer_slot import Gradients
from halfstep.step.ranks import Ranks
from halfstep.step.sync import LossFunction, Synchronizer

_SEND_BUFFERS = ("forward_sync_buffers", "broadcast_buffers")
"""DistributedDataParallel's names, the new one first, of the option to broadcast buffers before each forward."""
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_SEND_NONE = {next(name for name in _SEND_BUFFERS if name in _KNOWN): False}


class _LossModule(nn.Module):
    """A module whose forward is the current loss function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFunction, batch: Any) -> Any:
        return loss_fn(self.model, batch)


class ReplicatedSynchronizer(Synchronizer):
    """A plain model, the same on every rank.

    Rank 0's buffers are sent at the beginning of the window, as in DistributedDataParallel, but from here: the only
    collectives of a window are then buffers, buckets and the agreement, at points that a failed rank can still pass
    through.
    """

    fix = "Stepper(..., ddp={'find_unused_parameters': True}), or freeze the parameters that the loss does not use"

    def __init__(self, model: nn.Module, options: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._finds_unused = bool(options.get("find_unused_parameters", False))
        self._send_buffers = all(bool(options.get(name, True)) for name in _SEND_BUFFERS)
        rest = {name: value for name, value in options.items() if name not in _SEND_BUFFERS}
        self._options = {**rest, **_SEND_NONE, "process_group": ranks.group}
        self._known: set[tuple[int, ...]] = set()
        self.follow()

    def follow(self) -> Synchronizer:
        """Wrap the model anew for another set of trainable parameters; average instead if they alternate."""
        trainable = tuple(id(p) for p in self.model.parameters() if p.requires_grad)
        if trainable in self._known:  # parts trained in turns: no new wrapper at every turn
            return AveragingSynchronizer(self.model, self._ranks)
        self._known.add(trainable)
        self._wrap()
        return self

    def _wrap(self) -> None:
        # The loss function is the wrapped module's forward: any method that it calls on the model synchronizes, not
        # only forward.
        self._job = DistributedDataParallel(_LossModule(self.model), **self._options)
        self._buffers = BroadcastBuffers(self.model) if self._send_buffers else None
        self._end()

    def _end(self) -> None:
        self._sent = self._finished = False
        self._before_backward = -1
        """Collectives before the last backward; -1 while it cannot have started."""

    def begin(self, microbatches: int) -> None:
        """Start a window, with rank 0's buffers on every rank."""
        self._end()
        self._send()

    def _send(self) -> None:
        if self._buffers is not None and not self._sent:
            self._buffers.send(self._ranks)
        self._sent = True

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Run the loss function as the forward of the wrapped model."""
        # Gradients accumulate locally until the last micro-batch, so each window has one reduction.
        with nullcontext() if last else self._job.no_sync():
            losses = self._job(loss_fn, batch)
        if last:
            self._before_backward = self._ranks.collectives()
        return losses

    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Raise WrongUse: the caller's own forward would bypass the wrapper."""
        raise WrongUse(
            "stepper.forward() with a plain model on several processes",
            allowed="the function form, or a model in DistributedDataParallel",
            do="stepper.step(loss_fn, batch), or Stepper(DistributedDataParallel(model), ...)",
        )

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """Note that all buckets are reduced."""
        self._finished = True

    def without_batch(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> None:
        """Run a backward of zeros, which sends every bucket."""
        self.run(_compute_empty_zero_loss if self._finds_unused else _compute_full_zero_loss, None, True).backward()

    def complete(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> bool:
        """Send the remaining buffers and buckets of this rank."""
        self._send()
        if self._finished:
            return True
        begun = 0 if self._before_backward < 0 else self._ranks.collectives() - self._before_backward
        # Either no bucket was sent, and a backward of zeros keeps the reducer usable; or all of them were.
        if _is_reducer_finalized(self._job):
            if begun == 0:
                self.without_batch(gradients, autocast)
            return True
        _send_zero_buckets(self._job, begun, self._ranks)
        self.needs_rebuild = True
        return True

    def rebuild(self) -> None:
        """Replace a wrapper whose reduction was interrupted."""
        # A reducer that was interrupted cannot be used again. All ranks build a new one together, for they must agree
        # on its buckets. `init_sync=False` sends nothing else, since nothing has changed.
        self.needs_rebuild = False
        self._job = DistributedDataParallel(_LossModule(self.model), **{**self._options, "init_sync": False})


class UserDdpSynchronizer(Synchronizer):
    """A model that the user wrapped in DistributedDataParallel: only its own forward synchronizes."""

    model: DistributedDataParallel
    fix = (
        "call the wrapper, not its .module; wrap again after unfreezing; find_unused_parameters=True if some are unused"
    )

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._entered = self._finished = False
        self._before_backward = -1
        # DistributedDataParallel broadcasts buffers on entering forward: a failed rank has to know whether it did.
        self.model.register_forward_pre_hook(self._enter)

    def _enter(self, *_: object) -> None:
        self._entered = True

    def begin(self, microbatches: int) -> None:
        """Start a window."""
        self._entered = self._finished = False
        self._before_backward = -1

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Raise WrongUse: the function form needs the plain model."""
        raise WrongUse(
            "stepper.step() with a model in DistributedDataParallel",
            allowed="the plain model, which halfstep wraps so that all of its methods synchronize",
            do="Stepper(model.module, ...); or keep the wrapper and use stepper.forward()",
        )

    @contextmanager
    def forward(self, last: bool) -> Iterator[None]:
        """Return a context that synchronizes only the last micro-batch."""
        with nullcontext() if last else self.model.no_sync():
            yield
        if last:
            self._before_backward = self._ranks.collectives()

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """Note that all buckets are reduced."""
        self._finished = True

    def complete(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> bool:
        """Send the remaining buffers and buckets of this rank."""
        if self._finished:
            return True
        if not self._entered:
            # The others wait in this rank's part of the buffer broadcast.
            self.model._pre_forward()
        begun = 0 if self._before_backward < 0 else self._ranks.collectives() - self._before_backward
        if begun == 0 or not _is_reducer_finalized(self.model):
            _send_zero_buckets(self.model, begun, self._ranks)
            # DistributedDataParallel reorders its buckets once, after the first backward that every rank has seen.
            self.model.reducer._push_all_rebuilt_params()
        return True


class AveragingSynchronizer(Synchronizer):
    """Several losses, each with its own backward: gradients are averaged after the last one."""

    fix = "let every process compute every loss, from the same modules"

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks, self._finished = ranks, False
        self._members: set[int] = set()
        self.follow()

    def follow(self) -> Synchronizer:
        """Send rank 0's values of new parameters to the others."""
        parameters = list(self.model.parameters())
        members = {id(p) for p in parameters}
        if not members <= self._members:  # freezing and unfreezing changes no value
            broadcast_tensors_([*parameters, *self.model.buffers()], self._ranks)
            self._members, self._buffers = members, BroadcastBuffers(self.model)
        return self

    def begin(self, microbatches: int) -> None:
        """Start a window."""
        self._finished = False

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Run the loss function on the plain model."""
        return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Return an empty context: nothing is sent before `finish`."""
        return nullcontext()

    def without_batch(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> None:
        """Do nothing: `finish` sends zeros for parameters that were not reached."""
        return

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """Average the gradients, and send rank 0's buffers."""
        for some in gradients:
            _average_gradients_(some.trainable, self._ranks)
        self._buffers.send(self._ranks)
        self._finished = True

    def complete(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> bool:
        """Take part in `finish` with the gradients at hand: the window is dropped anyway."""
        if not self._finished:
            self.finish(gradients)
        return True


# -- DistributedDataParallel, from inside --------------------------------------------------------------------------


def _compute_full_zero_loss(model: Any, _: object) -> Tensor:
    """Return a loss whose gradient is zero for every parameter that DistributedDataParallel waits for."""
    # Every parameter is in the graph, so that each of its hooks fires and each bucket is sent.
    return torch.stack([p.sum() * 0.0 for p in model.parameters() if p.requires_grad]).sum()


def _compute_empty_zero_loss(model: Any, _: object) -> Tensor:
    """Return a loss that leaves parameters that no rank used without a gradient."""
    return torch.zeros((), device=next(model.parameters()).device, requires_grad=True) * 1.0


def _is_reducer_finalized(wrapped: DistributedDataParallel) -> bool:
    """Return whether no backward is in the middle of its reduction."""
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _send_zero_buckets(wrapped: DistributedDataParallel, begun: int, ranks: Ranks) -> None:
    """Send zeros for the buckets that this rank did not send, in the others' order, like torch's own Join."""
    for bucket in wrapped.reducer._get_zeros_like_grad_buckets()[begun:]:
        ranks.sum(bucket.buffer())
    if wrapped.find_unused_parameters:
        ranks.sum(wrapped.reducer._get_local_used_map())


# -- buffers and gradients -------------------------------------------------------------------------------------------


class BroadcastBuffers:
    """The buffers that rank 0 sends to the others in every window: always the same tensors, of the same sizes.

    A buffer may be rebound, or exist on some ranks only, if another rank had no batch; the tensors sent must not depend
    on that.
    """

    def __init__(self, model: nn.Module) -> None:
        slots = [module._buffers for module in model.modules()]
        named = [(some, name, buffer) for some in slots for name, buffer in some.items() if buffer is not None]
        self._places = list(
            {id(buffer): (some, name, torch.empty_like(buffer)) for some, name, buffer in named}.values()
        )
        """The last element receives the value where the buffer has another size by now."""

    def send(self, ranks: Ranks) -> None:
        """Overwrite every rank's buffers with rank 0's."""
        if self._places:
            broadcast_tensors_(
                [_reuse_or_allocate(spare, find_buffer(some, name)) for some, name, spare in self._places], ranks
            )


def _reuse_or_allocate(spare: Tensor, buffer: Tensor | None) -> Tensor:
    alike = buffer is not None and (buffer.shape, buffer.dtype) == (spare.shape, spare.dtype)
    return buffer if buffer is not None and alike else spare


@torch.no_grad()
def broadcast_tensors_(tensors: list[Tensor], ranks: Ranks) -> None:
    """Overwrite every rank's tensors with rank 0's: one broadcast per dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for some in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        ranks.send_from_rank_zero(flat)
        if ranks.rank == 0:
            continue
        for tensor, sent in zip(some, flat.split([t.numel() for t in some]), strict=True):
            # An expanded buffer cannot be written: several of its elements share memory.
            if not torch._debug_has_internal_overlap(tensor):
                tensor.copy_(sent.view(tensor.shape))


@torch.no_grad()
def _average_gradients_(parameters: list[Tensor], ranks: Ranks) -> None:
    """Average gradients over ranks; every rank sends every parameter, reached or not, so that all vectors match."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        alike.setdefault(_find_gradient_dtype(p), []).append(p)
    for some in alike.values():
        _average_one_dtype_(some, ranks)


def _find_gradient_dtype(p: Tensor) -> torch.dtype:
    dtype: torch.dtype | None = getattr(p, "grad_dtype", None)
    return p.dtype if dtype is None else dtype


def _average_one_dtype_(parameters: list[Tensor], ranks: Ranks) -> None:
    mine = [p.grad is not None for p in parameters]
    pieces = [torch.zeros_like(p, dtype=_find_gradient_dtype(p)) if p.grad is None else p.grad for p in parameters]
    # In the same all_reduce as the gradients: which parameters were reached on any rank.
    reached = torch.tensor(mine, dtype=pieces[0].dtype, device=pieces[0].device)
    flat = torch.cat([*(piece.flatten() for piece in pieces), reached]) / ranks.size
    ranks.sum(flat)
    *averages, anywhere = flat.split([*(p.numel() for p in parameters), len(parameters)])
    # Read by the host only where a parameter was not reached here: if it was reached nowhere, its gradient stays None.
    somewhere = mine if all(mine) else (anywhere > 0).tolist()
    for parameter, average, any_process in zip(parameters, averages, somewhere, strict=True):
        parameter.grad = average.view_as(parameter).clone() if any_process else None
