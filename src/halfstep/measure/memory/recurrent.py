"""Describe an LSTM as a CPU runs it: by oneDNN, with a workspace that is kept for backward.

On fake tensors torch runs another implementation, which keeps less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_GATES = 4
_LINE, _PAGE = 64, 4096
"""Bytes to whose multiples rows and buffers are padded."""
_BAD_STRIDE = 256
"""Rows of a multiple of so many elements get another line."""
_VF: Any = torch._VF
_lstm_of_torch = _VF.lstm

State = tuple[Tensor, Tensor]


@contextmanager
def emulate_onednn_lstm() -> Iterator[None]:
    """Run LSTMs on fake CPU tensors as oneDNN does inside the context."""
    _VF.lstm = _run_onednn_lstm
    try:
        yield
    finally:
        _VF.lstm = _lstm_of_torch


def _run_onednn_lstm(*arguments: Any) -> Any:
    if not _uses_onednn(*arguments):
        return _lstm_of_torch(*arguments)
    inputs, (hidden, cell), weights, has_bias, layers, dropout, training, both_ways, batch_first = arguments
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        inputs, hidden, cell, *weights = (tensor.to(narrow) for tensor in (inputs, hidden, cell, *weights))
    inputs = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    ways, each = 2 if both_ways else 1, 4 if has_bias else 2
    states: list[State] = []
    for layer in range(layers):
        outputs = []
        for number in range(layer * ways, (layer + 1) * ways):
            output, *state = _OnednnLstmLayer.apply(
                inputs, hidden[number], cell[number], *weights[number * each : (number + 1) * each]
            )
            outputs.append(output)
            states.append((state[0], state[1]))
        inputs = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            inputs = torch.dropout(inputs, dropout, training)
    last = (torch.stack([state[which] for state in states]) for which in (0, 1))
    return (inputs.transpose(0, 1) if batch_first else inputs, *last)


def _uses_onednn(inputs: Tensor, state: Any, weights: Any, *_: Any) -> bool:
    """Return whether torch chooses oneDNN: fp32 or bf16 on a CPU, whole sequences, no projection."""
    usable = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    if not usable or not isinstance(state, Sequence) or not isinstance(inputs, FakeTensor):
        return False  # a packed sequence has its sizes in the place of the state
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    known = (autocast or inputs.dtype) in (torch.float32, torch.bfloat16)
    return known and inputs.device.type == "cpu" and inputs.numel() > 0 and state[0].shape[-1] == state[1].shape[-1]


class _OnednnLstmLayer(torch.autograd.Function):
    """One layer in one direction; the tensors that it makes are those of the kernel."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor) -> Any:
        (steps, samples, into), width = inputs.shape, hidden.shape[-1]
        blocked = inputs.new_empty((into + width) * _count_row_elements(_GATES * width, inputs.dtype))
        bias = inputs.new_empty(_GATES * width, dtype=torch.float32)
        output = inputs.new_empty((steps, samples, width))
        last = inputs.new_empty((samples, width)), inputs.new_empty((samples, width))
        workspace = inputs.new_empty(
            _compute_workspace_bytes(steps, samples, into, width, inputs.dtype), dtype=torch.uint8
        )
        scratch = inputs.new_empty(_compute_scratch_bytes(steps, samples, width, torch.float32), dtype=torch.uint8)
        ctx.save_for_backward(inputs, hidden, cell, *weights, output, *last, workspace)
        del blocked, bias, scratch
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        inputs, hidden, cell, *saved = ctx.saved_tensors
        (steps, samples, into), width = inputs.shape, hidden.shape[-1]
        # Gradients are fp32 in every format.
        gradients = tuple(None if gradient is None else gradient.float() for gradient in gradients)
        blocked = inputs.new_empty(
            (into + width) * _count_row_elements(_GATES * width, torch.float32), dtype=torch.float32
        )
        scratch = inputs.new_empty(_compute_scratch_bytes(steps, samples, width, inputs.dtype), dtype=torch.uint8)
        found = tuple(torch.empty_like(t, dtype=torch.float32) for t in (inputs, hidden, cell, *saved[:-4]))
        del blocked, scratch, gradients
        return found


def _compute_workspace_bytes(steps: int, samples: int, into: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes that are kept for backward: states, their gradients, cells, gates and outputs of all steps."""
    states, outputs = 2 * (steps + 1) * samples, steps * samples
    buffers = [_compute_padded_bytes(states, max(into, width), dtype)] * 2 + [
        _compute_padded_bytes(states, max(into, width), torch.float32)
    ]
    buffers += [states * _round_up(width * torch.float32.itemsize, _LINE)] * 2
    buffers += [_compute_padded_bytes(outputs, _GATES * width, dtype), _compute_padded_bytes(outputs, width, dtype)]
    return sum(_round_up(buffer, _PAGE) for buffer in buffers)


def _compute_scratch_bytes(steps: int, samples: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the gates of all steps, and of two states."""
    states = 2 * samples * _round_up(width * torch.float32.itemsize, _LINE)
    return _compute_padded_bytes(steps * samples, _GATES * width, dtype) + states


def _compute_padded_bytes(rows: int, elements: int, dtype: torch.dtype) -> int:
    return rows * _count_row_elements(elements, dtype) * dtype.itemsize


def _count_row_elements(elements: int, dtype: torch.dtype) -> int:
    """Return the elements of a padded row."""
    line = _LINE // dtype.itemsize
    padded = _round_up(elements, line)
    return padded + line if padded % _BAD_STRIDE == 0 else padded


def _round_up(size: int, to: int) -> int:
    return math.ceil(size / to) * to
