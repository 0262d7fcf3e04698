"""What the server of forked processes loads before it forks.

A process of Python has one such server, whoever starts it first: rows of the fault matrix and tests on several ranks
ask for the same, or the children of one of them would load torch and torchmetrics each for themselves.
"""

from __future__ import annotations

PRELOADED = ["faults.child", "torch.distributed.fsdp", "torch.distributed.tensor", "halfstep"]
