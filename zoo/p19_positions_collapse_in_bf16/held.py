"""One audited batch finds the cast; without it, and with the embedding as an island, no timestep is lost in bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p19_positions_collapse_in_bf16.plain import TIMESTEPS, batch, cast_loss, distinct, model

BF16 = resolve_precision_name("bf16")
"""The precision itself, not its name: that would become fp32 on a CPU that only emulates bf16."""


def run() -> Outcome:
    found = halfstep.audit(model(), cast_loss, batch(), precision=BF16)
    evidence = [one.finding.evidence for one in found.spotted]
    about = [words for words in evidence if "plain.py:" in words and f"up to {TIMESTEPS - 1}" in words]
    kept = _kept()
    return Outcome(
        good=bool(about) and kept == TIMESTEPS,
        seen=f"audit: {about[0] if about else evidence}; left whole, with the embedding as an island, "
        f"{TIMESTEPS} timesteps become {kept} different embeddings",
    )


def _kept() -> int:
    net = halfstep.island(model(), "unet.time_proj", "unet.time_embedding")
    seen: list[int] = []
    net.unet.time_embedding.register_forward_hook(lambda module, given, out: seen.append(distinct(out)))
    stepper = halfstep.Stepper(net, torch.optim.SGD(net.parameters(), lr=0.01), precision=BF16)
    stepper.step(whole_loss, batch())
    return seen[0]


def whole_loss(net: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return net(*given).float().square().mean()  # type: ignore[no-any-return]
