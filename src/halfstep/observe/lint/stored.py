"""Find trained weights that are stored in a narrow format: small updates of them are lost."""

from __future__ import annotations

from torch import nn

from halfstep.finding import Finding
from halfstep.formats import find_format, is_narrow


def find_narrow_weights(model: nn.Module) -> Finding | None:
    """Return a finding for trainable parameters in a narrow format, or None."""
    narrow = {name: p for name, p in model.named_parameters() if p.requires_grad and is_narrow(p.dtype)}
    if not narrow:
        return None
    first, parameter = next(iter(narrow.items()))
    format = find_format(parameter.dtype)
    assert format is not None
    total = sum(1 for p in model.parameters() if p.requires_grad)
    return Finding(
        "weights-narrow",
        "error",
        f"{len(narrow)} of {total} trained weights are stored in {format.name}, {first} first: "
        f"an update below {format.epsilon / 2:.1g} of a weight vanishes",
        "model.float(), and request the precision instead: the step casts weights for computing only",
    )
