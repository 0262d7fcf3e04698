"""Muon in the backward pass, which frees each gradient early, and AdamW under the scaler."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def run() -> Outcome:
    model, hidden, others = make_model()
    muons = {p: torch.optim.Muon([p], lr=0.02) for p in hidden}
    adamw = torch.optim.AdamW(others, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step_and_free(p: Tensor) -> None:
        muons[p].step()  # not unscaled: Muon's update is the same for every scale of the gradient
        muons[p].zero_grad()

    for p in hidden:
        p.register_post_accumulate_grad_hook(step_and_free)
    for x in make_batches():
        adamw.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(adamw)
        scaler.update()
    return judge(model, muons.values(), scaler.get_scale())


def make_model() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The model, the matrices of its hidden layers, and its other parameters."""
    torch.manual_seed(0)
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(32, 4))
    hidden: list[Tensor] = [first.weight, second.weight]
    return model, hidden, [p for p in model.parameters() if p is not first.weight and p is not second.weight]


def make_batches() -> list[Tensor]:
    """Six batches; the second one overflows."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=generator) for _ in range(6)]
    batches[1] *= 1e4
    return batches


def judge(model: nn.Module, muons: Iterable[torch.optim.Optimizer], loss_scale: float) -> Outcome:
    momenta = [state["momentum_buffer"] for muon in muons for state in muon.state.values()]
    finite = sum(bool(momentum.isfinite().all()) for momentum in momenta)
    weights = [bool(p.isfinite().all()) for p in model.parameters()]
    return Outcome(
        good=finite == len(momenta) == 2 and all(weights) and loss_scale == 512.0,
        seen=f"after 1 overflow in 6 batches: momentum finite in {finite} of {len(momenta)} matrices, "
        f"weights in {sum(weights)} of {len(weights)} parameters, loss scale {loss_scale:.0f} of 1024",
    )
