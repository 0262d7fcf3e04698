"""Whether compiled code ran in a step, which may do what the same code does not when it is not compiled."""

from __future__ import annotations

import sys

from torch import nn


def uses_compiled(model: nn.Module) -> bool:
    """Whether any part of a model was given to torch.compile; functions outside of it do not show here."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False  # before Dynamo is loaded nothing can have been compiled
    return any(
        isinstance(module, dynamo.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward", type(module).forward), "_torchdynamo_orig_callable")
        for module in model.modules()
    )
