"""accelerate itself, as the zoo needs it: anew for each pain, and with the fp16 that it leaves out on a CPU."""

from __future__ import annotations

from typing import Any

import torch


def fresh_accelerator(precision: str) -> Any:
    """accelerate keeps one state a process; each pain begins with none."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, mixed_precision=precision)


def accelerator_with_fp16(init_scale: float = 2.0**16) -> Any:
    """Asked for fp16 on a CPU, accelerate computes in fp32; this switches on what it does where fp16 is real."""
    accelerator = fresh_accelerator("fp16")
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=init_scale)
    return accelerator
