"""Keep a copy of the run in memory for rollbacks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.step.census import put_buffer
from halfstep.step.experiment.rerun import OtherWeights
from halfstep.step.stepper import Stepper

FIRST_PAUSE = 5
"""The steps between the first copies; the interval doubles with each."""


class RollbackSnapshot:
    """A copy of the weights, buffers, optimizers, schedules and averages of a good step.

    A rollback does not rewind everything: attempts and skips continue to be counted, random numbers are not drawn again
    and batches are not repeated. Precision and loss scale stay as they are.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor | None] = {}
        self._state: dict[str, Any] | None = None
        self._pause, self._left = FIRST_PAUSE, 0
        self._model_version = stepper.model_version

    @property
    def step(self) -> int | None:
        """Return the number of applied updates in the copy, or None."""
        return None if self._state is None else int(self._state["counts"]["applied"])

    def take_if_due(self, every: int) -> None:
        """Make a copy if it is due; call it once for each good step.

        Copies are frequent at first, when a hundred steps are a large part of the training. One is also made after
        parameters are added, removed or unfrozen, because the previous one no longer fits.
        """
        self._left -= 1
        if self._left <= 0 or self._model_version != self._stepper.model_version:
            self.take()
            self._left = min(self._pause, every)
            self._pause = min(2 * self._pause, every)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the run, reusing the memory of the previous copy where tensors fit."""
        stepper = self._stepper
        # Called in the middle of a step: forward has already written to the buffers, and the update is still to come.
        # The buffers from before the step belong to these weights.
        buffers = stepper.buffers_to_keep()
        self._weights = _copy_tensors(dict(stepper.model.named_parameters(remove_duplicate=False)), self._weights)
        self._buffers = _copy_tensors(buffers, self._buffers)
        # Released first, so that two copies of the state never exist at once.
        self._state = None
        self._state = copy.deepcopy(stepper.state_dict())
        self._model_version = stepper.model_version

    @torch.no_grad()
    def restore(self) -> int | None:
        """Restore the copy and return its step.

        Returns None if there is no copy or it no longer fits the run; then nothing is changed.
        """
        stepper, model = self._stepper, self._stepper.model
        if not self._try_restore():
            self._weights, self._buffers, self._state, self._left = {}, {}, None, 0
            return None
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(self._weights[name])
        modules = dict(model.named_modules())  # those of torch.jit have no get_submodule()
        for name, saved in self._buffers.items():
            path, _, own = name.rpartition(".")
            put_buffer(modules[path]._buffers, own, saved)
        return stepper.counts.applied

    def list_weights(self) -> OtherWeights:
        """Return the trained weights, each with its copy, if these are of an earlier update."""
        stepper = self._stepper
        known = self.step is not None and self.step < stepper.counts.applied and self._fits(stepper.model)
        trained = [(name, p) for name, p in stepper.model.named_parameters() if p.requires_grad]
        if not known or stepper.weights is not None or distributed.is_sharded([p for _, p in trained]):
            return ()
        return [(p, self._weights[name]) for name, p in trained]

    def _try_restore(self) -> bool:
        """Restore the Stepper's state and return whether it fits.

        A state that does not fit is refused before any change.
        """
        if self._state is None or not self._fits(self._stepper.model):
            return False
        try:
            self._stepper.load_state_dict(self._merge_states(self._stepper.state_dict()))
        except HalfstepError:
            return False
        return True

    def _fits(self, model: nn.Module) -> bool:
        now = dict(model.named_parameters(remove_duplicate=False))
        modules = {path for path, _ in model.named_modules()}
        return (
            now.keys() == self._weights.keys()
            and all(parameter.shape == self._weights[name].shape for name, parameter in now.items())
            and all(name.rpartition(".")[0] in modules for name in self._buffers)
        )

    def _merge_states(self, now: Mapping[str, Any]) -> dict[str, Any]:
        # Optimizers adopt the tensors that they are given: without a second copy, training would change this one.
        saved = copy.deepcopy(self._state)
        assert saved is not None
        saved["precision"] = now["precision"]
        saved["counts"] = {**now["counts"], "applied": saved["counts"]["applied"], "skipped_in_a_row": 0}
        for name, loss in saved["losses"].items():
            loss["loss_scale"] = now["losses"][name]["loss_scale"]
        return saved


def _copy_tensors(current: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of these tensors, in the memory of the old copies where possible."""
    copies = {}
    for name, tensor in current.items():
        before = old.get(name)
        if before is not None and tensor is not None and _has_same_layout(before, tensor):
            copies[name] = before.copy_(tensor)
        else:
            copies[name] = None if tensor is None else tensor.detach().clone()
    return copies


def _has_same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout
