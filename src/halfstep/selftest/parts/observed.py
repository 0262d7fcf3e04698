"""The first step runs in the requested precision; a step that does not is refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionNotObserved
from halfstep.observe.flops import SHARE_REQUIRED
from halfstep.precision.precision import Precision
from halfstep.selftest.part import PartContext, PartFailed, PartResult, require
from halfstep.selftest.small import build_convolutional_model, compute_classification_loss, create_image_batch
from halfstep.step.stepper import Stepper


class _WithoutAutocast(nn.Module):
    """A module that switches autocast off around itself, as code does that nobody remembers."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner, self._kind = inner, device.type

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self._kind, enabled=False):
            found: Tensor = self.inner(images)
            return found


def check(place: PartContext) -> PartResult:
    """Look at what every native precision of the device runs in."""
    shares = {precision.name: _measure_share(precision, place.device) for precision in place.native()}
    for precision in place.native():
        if precision.casts:
            _require_refusal(precision, place.device)
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return PartResult(f"{words} of the work", {"shares": shares})


def _measure_share(precision: Precision, device: torch.device) -> float:
    model = build_convolutional_model(device)
    # Seen with nothing of halfstep's: the format in which a layer's output arrives.
    seen: set[torch.dtype] = set()
    next(model.children()).register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision)
    stepper.step(compute_classification_loss, create_image_batch(device))
    wanted = precision.narrow or torch.float32
    require(seen == {wanted}, f"{precision}: a convolution's output was {', '.join(map(str, seen))}, not {wanted}")
    found = stepper.observed
    if found is None or found.share is None:
        raise PartFailed(f"{precision}: nothing was observed")
    require(found.expected == precision.computes.name, f"{precision}: {found.expected} was expected of it")
    require(found.share >= SHARE_REQUIRED, f"{precision}: only {found.share:.0%} of the work ran in it")
    return found.share


def _require_refusal(precision: Precision, device: torch.device) -> None:
    model = _WithoutAutocast(build_convolutional_model(device), device)
    before = [p.detach().clone() for p in model.parameters()]
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision)
    try:
        stepper.step(compute_classification_loss, create_image_batch(device))
    except PrecisionNotObserved:
        same = all(map(torch.equal, before, model.parameters()))
        require(same, f"{precision}: a step that was refused moved the weights")
    else:
        raise PartFailed(f"{precision}: a model that switches autocast off was trained in fp32 without a warning")
