"""A copy of the run in memory, to go back to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.step.buffers import put_buffer
from halfstep.step.transaction import Stepper

FIRST_PAUSE = 5
"""Steps between the first copies, doubled with each."""


class Rewind:
    """Weights, buffers, optimizers, schedules and averages of a step that was good.

    What the run has lived through stays lived through: attempts and skips go on being counted, random numbers are not
    drawn again and batches not seen again. Precision and loss scale stay as they are now.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor | None] = {}
        self._state: dict[str, Any] | None = None
        self._pause, self._left = FIRST_PAUSE, 0
        self._followed = stepper.followed

    @property
    def step(self) -> int | None:
        """Updates that had been applied in what is kept; None before anything is."""
        return None if self._state is None else int(self._state["counts"]["applied"])

    def keep_if_due(self, every: int) -> None:
        """Once for each good step: often in the beginning, where a hundred steps are much of what was learnt.

        Also after somebody came, left or was unfrozen: the copy from before does not fit any more.
        """
        self._left -= 1
        if self._left <= 0 or self._followed != self._stepper.followed:
            self.keep()
            self._left = min(self._pause, every)
            self._pause = min(2 * self._pause, every)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the run as it is. The tensors of the last copy are written over where they fit.

        In the middle of a step, the forward pass has written to the buffers, and the update is still to come: those
        from before the step belong to these weights.
        """
        stepper = self._stepper
        buffers = stepper._buffers.remembered() if stepper._open else _buffers(stepper.model)
        self._weights = _copies(dict(stepper.model.named_parameters(remove_duplicate=False)), self._weights)
        self._buffers = _copies(buffers, self._buffers)
        self._state = None  # its memory is free for the new one
        self._state = copy.deepcopy(stepper.state_dict())
        self._followed = stepper.followed

    @torch.no_grad()
    def back(self) -> int | None:
        """Put it back, and return the step that the run is at again.

        None where nothing was kept, or what was kept does not fit the run any more: then nothing is changed.
        """
        stepper, model = self._stepper, self._stepper.model
        if not self._restored():
            self._weights, self._buffers, self._state, self._left = {}, {}, None, 0
            return None
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.copy_(self._weights[name])
        for name, kept in self._buffers.items():
            path, _, own = name.rpartition(".")
            put_buffer(model.get_submodule(path)._buffers, own, kept)
        return stepper.counts.applied

    def _restored(self) -> bool:
        """Whether the Stepper has its state back; one that does not fit is refused before anything is changed."""
        if self._state is None or not self._fits(self._stepper.model):
            return False
        try:
            self._stepper.load_state_dict(self._mended(self._stepper.state_dict()))
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

    def _mended(self, now: Mapping[str, Any]) -> dict[str, Any]:
        # Optimizers take over the tensors that they are given: a second copy, or the kept one would train along.
        kept = copy.deepcopy(self._state)
        assert kept is not None
        kept["precision"] = now["precision"]
        kept["counts"] = {**now["counts"], "applied": kept["counts"]["applied"], "skipped_in_a_row": 0}
        for name, lane in kept["lanes"].items():
            lane["loss_scale"] = now["lanes"][name]["loss_scale"]
        return kept


def _copies(current: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of these tensors, in the old copies' memory."""
    copies = {}
    for name, tensor in current.items():
        before = old.get(name)
        if before is not None and tensor is not None and _alike(before, tensor):
            copies[name] = before.copy_(tensor)
        else:
            copies[name] = None if tensor is None else tensor.detach().clone()
    return copies


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout


def _buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Those registered without a tensor, too: they may have one by the time that we go back."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    }
