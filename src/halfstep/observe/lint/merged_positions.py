"""Find buffers whose values differ by little, such as frequencies, and become equal in a narrow format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.finding import Finding
from halfstep.formats import Format, find_format, is_narrow, widest_dtype
from halfstep.observe.lint.seen import NarrowOperation

PACKETS = (torch.ops.aten._to_copy,)
_FEWEST = 4
_FIX = "keep the buffer in fp32 and cast the values computed from it: {island}"


def look(seen: NarrowOperation) -> Finding | None:
    """Return a finding for the cast of a sorted buffer, if some of its values become equal."""
    if seen.buffer is None or not seen.has_values or not seen.inputs[0].is_floating_point():
        return None
    line = _find_monotonic_values(seen.inputs[0])
    return None if line is None else _find_merged_values(seen.buffer, line, seen.format)


def find_merged_stored_positions(model: nn.Module) -> list[tuple[str, Finding]]:
    """Return findings, by module, for buffers of integers that were stored in a narrow format, as by model.half()."""
    found = []
    for name, buffer in model.named_buffers():
        format = find_format(buffer.dtype)
        if format is None or not is_narrow(buffer.dtype) or buffer.numel() < _FEWEST:
            continue
        wide = buffer.detach().to(widest_dtype(buffer.device)).flatten()
        steps, counts = wide.diff(), format.largest_exact_integer
        whole = bool((wide == wide.round()).all()) and wide.max().item() >= counts
        if whole and bool((steps >= 0).all()) and bool((steps == 0).any()) and bool((steps > 0).any()):
            finding = Finding(
                "positions-merged",
                "warning",
                f"buffer {name} counts to {int(wide.max())} but is stored in {format.name}, which counts to {counts}: "
                f"{wide.unique().numel()} of its {wide.numel()} numbers differ",
                "cast the weights only, or register it after the cast: buffers stay in fp32",
            )
            found.append((name.rpartition(".")[0], finding))
    return found


def _find_monotonic_values(buffer: Tensor) -> Tensor | None:
    """Return the values of a strictly monotonic buffer, or None."""
    if buffer.numel() < _FEWEST or max(buffer.shape) != buffer.numel():
        return None
    line = buffer.detach().to(widest_dtype(buffer.device)).flatten()
    steps = line.diff()
    return line if bool((steps > 0).all() | (steps < 0).all()) else None


def _find_merged_values(name: str, line: Tensor, format: Format) -> Finding | None:
    left = line.to(format.dtype).unique().numel()
    if left == line.numel():
        return None
    return Finding(
        "positions-merged",
        "warning",
        f"buffer {name} contains {line.numel()} numbers in order; cast to {format.name}, {left} of them differ",
        _FIX,
    )
