"""What the server of forked processes loads before it forks: all that a run, a rank or a command would load itself."""

from __future__ import annotations

import contextlib
import gc

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import faults.child
import halfstep.cli.main
import tests.support.forked_python

with contextlib.suppress(ImportError):
    import timm  # noqa: F401

    import halfstep.tasks.classification
    import halfstep.tasks.segmentation

LOADED = (torch, faults.child, halfstep.cli.main, tests.support.forked_python)

# What is loaded stays: forks need not look through it, nor copy its pages to count references in them.
gc.collect()
gc.freeze()
