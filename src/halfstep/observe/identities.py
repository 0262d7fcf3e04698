"""What identifies a tensor's memory, and the names of modules without the wrappers of torch.compile."""

from __future__ import annotations

from torch import Tensor, nn

from halfstep import distributed


def strip_compile_wrappers(path: str) -> str:
    """Return a path without the wrappers that torch.compile puts around modules."""
    return ".".join(name for name in path.split(".") if name != "_orig_mod")


def identify_storage(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory; 0 for fake and sparse tensors, and for wrappers without any."""
    try:
        # For every tensor of a step: those of the two usual classes are no shards.
        own = tensor if type(tensor) in (Tensor, nn.Parameter) else distributed.unwrap_local_tensor(tensor)
        return int(own.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
