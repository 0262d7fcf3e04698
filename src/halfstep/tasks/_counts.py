"""How often pairs of numbers occur, counted where they are: a run adds to its metrics between steps, and must not wait.

`torch.bincount` and masks that choose elements need to know on the host how much there is, and wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counted(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """For each sample a table of how many elements are `row` here and `column` there: samples × rows × columns, exact.

    Every number must be below its side of `shape`.
    """
    samples, cells = len(rows), shape[0] * shape[1]
    cell = rows.reshape(samples, -1).long() * shape[1] + columns.reshape(samples, -1).long()
    cell += torch.arange(samples, device=cell.device).unsqueeze(1) * cells
    one = torch.ones((), dtype=torch.int64, device=cell.device)
    tables = torch.zeros(samples * cells, dtype=torch.int64, device=cell.device)
    return tables.index_add_(0, cell.flatten(), one.expand(cell.numel())).view(samples, *shape)
