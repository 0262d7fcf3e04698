"""Synchronize a model under FSDP2's fully_shard: count its collectives, and repeat them where a rank fails.

FSDP2 gathers parameters in forward and backward, so the others wait for a rank in every layer. A rank that fails runs
the last successful micro-batch once more, for its collectives only, without those that it had already started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.errors import WrongUse, format_error_line
from halfstep.finding import Finding
from halfstep.precision.converted import find_converted_layers
from halfstep.precision.names import FP8
from halfstep.step.optimizer_slot import Gradients
from halfstep.step.ranks import Ranks
from halfstep.step.sync import LossFunction, Synchronizer
from halfstep.step.synchronizers.shard_formats import (
    build_unasked_reduction_findings,
    iterate_param_groups,
    keep_islands_wide,
    list_shard_formats,
)

PATIENCE = 4.0
"""Seconds that a failed rank waits for the others in its collectives; three windows' time if that is longer."""
GATHER, REDUCE = "gather", "reduce"


class CollectiveTracker:
    """The FSDP2 collectives of the current micro-batch, and what happens to them on this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.gathered = 0
        """Bytes of weights that were gathered since the window began, from all ranks of a group."""
        self.start()

    def start(self, *, done: Sequence[tuple[str, int]] = (), silent: bool = False, until: float | None = None) -> None:
        """Start a micro-batch. `done`: collectives started before; `silent`: send gradients as zeros."""
        self.seen: list[tuple[str, int]] = []
        self.silent, self._done, self._until = silent, list(done), until

    def skips(self, kind: str, elements: int) -> bool:
        """Count one more collective; return whether the others have it from this rank already."""
        self.seen.append((kind, elements))
        place = len(self.seen)
        if place > len(self._done):
            return False
        if self._done[place - 1] != (kind, elements):
            raise RuntimeError("another run of the loss function gathered other parameters")
        return True

    def wait(self, work: Any) -> None:
        """Wait for a collective, while checking for failed ranks."""
        with self.ranks.explained():
            self.ranks.wait(work, until=self._until)


class _CountedComm:
    """A collective of FSDP2, or the user's replacement for it, counted."""

    def __init__(self, inner: Any, traffic: CollectiveTracker) -> None:
        self.inner, self._traffic = inner, traffic

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.allocate(*args, **kwargs)

    def _run(self, output_tensor: Tensor, *args: Any, async_op: bool) -> Any:
        if async_op or output_tensor.device.type != "cpu":
            return self.inner(output_tensor, *args, async_op)
        # On a GPU the host does not wait in a collective; here it would, so it checks for failed ranks meanwhile.
        self._traffic.wait(self.inner(output_tensor, *args, True))
        return None


class _CountedGather(_CountedComm):
    """FSDP2's all-gather."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._traffic.skips(GATHER, output_tensor.numel()):
            output_tensor.zero_()
            return None
        self._traffic.gathered += output_tensor.nbytes
        return self._run(output_tensor, input_tensor, group, async_op=async_op)


class _CountedReduceScatter(_CountedComm):
    """FSDP2's reduce-scatter."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._traffic.skips(REDUCE, input_tensor.numel()):
            output_tensor.zero_()
            return None
        if self._traffic.silent:
            input_tensor.zero_()  # not a product with zero: the values may be NaN
        return self._run(output_tensor, input_tensor, group, op, async_op=async_op)


class ShardedSynchronizer(Synchronizer):
    """A model under FSDP2's fully_shard."""

    model: Any
    backward_goes_everywhere = True

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self._ranks, self._traffic = ranks, CollectiveTracker(ranks)
        self._good: tuple[LossFunction, Any] | None = None
        """The last successful loss function and micro-batch, for a rank that fails or has none."""
        self._expected: dict[bool, list[tuple[str, int]]] = {}
        self._length, self._took = -1, 0.0
        self._end()
        self._look()

    def _end(self) -> None:
        self._window = self._runs = 0
        self._finished = False
        self._current: tuple[LossFunction, Any, bool] | None = None

    @property
    def gathered_bytes(self) -> int:
        """The bytes of weights that were gathered in this window, or in the last one."""
        return self._traffic.gathered

    def follow(self) -> Synchronizer:
        """Replace the collectives of new parameter groups."""
        self._look()
        return self

    def _look(self) -> None:
        outside = [
            n for n, p in self.model.named_parameters() if p.requires_grad and not distributed.is_dtensor_shard(p)
        ]
        if outside:
            raise WrongUse(
                f"trainable parameters that FSDP2 does not hold: {', '.join(outside[:5])}",
                allowed="every trainable parameter in fully_shard, which synchronizes its parameters",
                do="fully_shard(model) without ignored_params, or freeze them",
            )
        self._groups = list(iterate_param_groups(self.model))
        keep_islands_wide(self.model)
        self.shard_formats = list_shard_formats(self.model)
        for group in self._groups:
            group._all_gather_comm = _CountedGather(_unwrap_comm(group._all_gather_comm), self._traffic)
            group._reduce_scatter_comm = _CountedReduceScatter(_unwrap_comm(group._reduce_scatter_comm), self._traffic)
        shards = [p for p in self.model.parameters() if distributed.is_dtensor_shard(p)]
        meshes = {group.mesh_info.mesh.ndim for group in self._groups}
        self._only_ours = max(meshes) == 1 and all(p.device_mesh.ndim == 1 for p in shards)
        """Whether the counted gather and reduce-scatter see all collectives of a window: one mesh dimension only."""
        fp8 = sys.modules.get("torchao.float8.fsdp_utils")
        gathers_fp8 = fp8 and any(isinstance(p.to_local(), fp8.WeightWithDynamicFloat8CastTensor) for p in shards)
        self._scale_weights = fp8.precompute_float8_dynamic_scale_for_fsdp if fp8 and gathers_fp8 else None
        """Computes the scales of weights that are gathered in fp8, with one collective instead of one in each gather.
        """
        self.findings = build_unasked_reduction_findings(self.shard_formats)
        if FP8 in find_converted_layers(self.model).values():
            self._gather_in_fp8()

    def _gather_in_fp8(self) -> None:
        try:
            from halfstep.step.synchronizers.float8_gather import compute_float8_scales, gather_in_fp8

            weights = gather_in_fp8(self._groups, self._ranks.largest)
        except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
            # Private classes of torch and torchao. In bf16 the products have the same bits.
            self.findings = (*self.findings, _build_bf16_gather_finding(error))
            return
        self._scale_weights = lambda _: compute_float8_scales(weights, self._ranks.largest)

    # -- a window -----------------------------------------------------------------------------------------------

    def begin(self, microbatches: int) -> None:
        """Start a window, and publish its number of micro-batches."""
        self._end()
        self._window, self._since = microbatches, time.perf_counter()
        self._traffic.gathered = 0
        self._traffic.start()
        if self._scale_weights is not None:
            self._scale_weights(self.model)
        self._publish(microbatches)

    def _publish(self, microbatches: int) -> None:
        """Publish the number of micro-batches when it changes: a rank without a batch has to know it."""
        if microbatches != self._length:
            self._ranks.publish("micro-batches", str(microbatches))
            self._length = microbatches

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Run the loss function; gradients are reduced in the last micro-batch only."""
        self._went_well()
        self._runs += 1
        self._current = loss_fn, batch, last
        self._traffic.start()
        with self.forward(last):
            return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Return a context for the caller's forward; gradients are reduced in the last micro-batch only."""
        # FSDP2's no_sync: gradients accumulate unsharded until the last micro-batch.
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """Record that the window succeeded, and how long it took."""
        self._went_well()
        self._finished = True
        self._took = time.perf_counter() - self._since

    def _went_well(self) -> None:
        if self._current is not None:
            loss_fn, batch, last = self._current
            self._good, self._expected[last] = (loss_fn, batch), self._traffic.seen
            self._current = None

    # -- a rank without a batch, or that failed -----------------------------------------------------------------

    def without_batch(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> None:
        """Run an earlier batch once per micro-batch of the others, and send zeros as gradients."""
        loss_fn, batch = self._remembered_step()
        place, length = 0, 1
        while place < length:
            self._traffic.start(silent=True)
            self.model.set_requires_gradient_sync(True)
            with autocast:
                losses = loss_fn(self.model, batch)
            if place == 0:  # the others have started the window too, since they sent their parameters
                length = max(1, *map(int, self._ranks.published_texts("micro-batches")))
            self.model.set_requires_gradient_sync(place == length - 1)
            _run_backward(losses)
            place += 1
        self._traffic.start()

    def _remembered_step(self) -> tuple[LossFunction, Any]:
        if self._good is None:
            raise WrongUse(
                "step(None) in the first window of a model under FSDP2",
                allowed="a rank without a batch gathers parameters by running an earlier batch once more",
                do="give every rank a batch in its first window",
            )
        return self._good

    def complete(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> bool:
        """Repeat the last successful micro-batch for the collectives that the others wait in.

        Returns False if there is none, or if its collectives differ from the started ones.
        """
        if self._finished:
            return True
        done = self._traffic.seen if self._current is not None else []
        if self._good is None or self._window == 0 or not self._can_skip(done):
            return False
        until = time.monotonic() + max(PATIENCE, 3 * self._took)
        begun = self._runs - 1 if self._current is not None else self._runs
        try:
            for place in range(begun, self._window):
                self.abandon()
                # The repeated run draws its gradients from an old batch: zeros are sent in their place.
                self._traffic.start(done=done, silent=True, until=until)
                self.model.set_requires_gradient_sync(place == self._window - 1)
                with autocast:
                    losses = self._good[0](self.model, self._good[1])
                _run_backward(losses)
                # Only the interrupted micro-batch had started collectives.
                done = []
        except Exception:
            return False
        return True

    def _can_skip(self, done: Sequence[tuple[str, int]]) -> bool:
        """Return whether the collectives started here match those of the last successful run."""
        if not done:
            return True
        # Collectives of tensor parallel, and the reduction over replicas, cannot be left out.
        return self._only_ours and any(list(done) == known[: len(done)] for known in self._expected.values())

    @property
    def begun(self) -> str:
        """The collectives started in this window."""
        return f"{self._runs} {self._finished} {self._traffic.seen if self._current is not None else []}"

    # -- nothing stays ------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Reshard the parameters, and drop all gradients that FSDP2 holds."""
        _reset_fsdp_state(self.model)
        for group in self._groups:
            # FSDP2 keeps gradients in several places, and each would be added to the next window.
            for parameter in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15
                    parameter.unsharded_accumulated_grad = None
                parameter.sharded_param.grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def settle(self) -> None:
        """Reshard parameters that are still gathered."""
        # A forward pass outside of a step leaves the root's parameters gathered; so does a failed one.
        if not all(group.is_sharded for group in self._groups):
            self.abandon()


def _build_bf16_gather_finding(error: Exception) -> Finding:
    return Finding(
        "fp8.gather",
        "note",
        f"weights of fp8 layers are gathered in bf16, in twice the bytes: FSDP2 of torch {torch.__version__} cannot "
        f"send them in fp8 ({format_error_line(error)})",
        "nothing, the results are the same; torch 2.11 to 2.15 with torchao 0.18 can",
    )


def _run_backward(output: Any) -> None:
    """Run backward from anything a loss function returned: only the collectives matter, not the gradients."""
    total = [leaf.sum() for leaf in _list_output_leaves(output) if leaf.requires_grad]
    if total:
        sum(total[1:], total[0]).backward()  # type: ignore[no-untyped-call]


def _list_output_leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for item in output for leaf in _list_output_leaves(item)] if isinstance(output, (list, tuple)) else []


def reshard_parameters(model: nn.Module) -> None:
    """Reshard the parameters of a model under FSDP2 that a forward pass outside of a step left gathered."""
    if not all(group.is_sharded for group in iterate_param_groups(model)):
        _reset_fsdp_state(model)


def _unwrap_comm(comm: Any) -> Any:
    return comm.inner if isinstance(comm, _CountedComm) else comm


def _reset_fsdp_state(model: Any) -> None:
    """Reshard the parameters and reset FSDP2 to the state between two forward passes, wherever an error left it."""
    state = model._get_fsdp_state()
    if state._is_root is None:
        return  # no forward pass yet
    # Not in every supported version of torch.
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
