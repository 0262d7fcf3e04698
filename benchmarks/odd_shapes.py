"""Healthy runs of odd shapes for benchmarks/healthy_runs.py: what people do on purpose, and what looks like trouble."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.healthy_runs import Pair, Step, Training, draw, network, regression, sines, stepper_for
from halfstep import Counted, Stepper

Batch = tuple[Tensor, Tensor]


def times(factor: float, loss_fn: Callable[..., Tensor] = regression, offset: float = 0.0) -> Callable[..., Tensor]:
    """Return the loss multiplied by a factor."""
    return lambda model, batch: factor * loss_fn(model, batch) + offset


def classes(size: int, centres: Tensor, apart: float = 3.0) -> Batch:
    labels = torch.randint(0, len(centres), (size,))
    return apart * centres[labels] + torch.randn(size, 8), labels


# -- losses whose size is chosen -------------------------------------------------------------------------------------


def weight_warm_up() -> Training:
    """Raises the weight of the loss by six decades or more, in steps of the schedule."""
    model, true = network(), torch.randn(8, 4)
    first, rise = draw(-8.0, -4.0), int(draw(30, 100))
    sgd = draw(0.0, 2.0) < 1.0
    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3) if sgd else torch.optim.AdamW(model.parameters(), 1e-3)

    def run() -> Iterator[Step]:
        for step in range(150):
            yield times(10.0 ** (first + (1 - first) * min(step / rise, 1.0))), sines(16, true), None

    return Training(Stepper(model, optimizer, precision="fp32", observe=False), run(), level_changes=True)


def tiny_losses() -> Training:
    """Has losses of about 1e-9, as in physics with units, and some batches that are learned exactly."""
    model, true, size = network(), torch.randn(8, 4), 10.0 ** draw(-12.0, -8.0)

    def run() -> Iterator[Step]:
        for step in range(140):
            x, y = sines(16, true)
            yield times(size), (x, model(x).detach() if step % 40 == 39 else y), None

    return Training(stepper_for(model, 3e-3), run())


def huge_losses() -> Training:
    """Sums over a million elements, of which their number changes, with clipped gradients."""
    model, true, size = network(), torch.randn(8, 4), 10.0 ** draw(5.0, 9.0)

    def run() -> Iterator[Step]:
        for _ in range(140):
            yield times(size * draw(0.3, 3.0)), sines(16, true), None

    return Training(stepper_for(model, 3e-3, clip_norm=1.0), run())


def likelihood_crosses_zero() -> Training:
    """Learns a mean and a variance: the loss begins at several and ends below zero."""
    model, true = network(out=8), torch.randn(8, 4)

    def likelihood(model: nn.Module, batch: Batch) -> Tensor:
        mean, log_variance = model(batch[0]).float().chunk(2, -1)
        return F.gaussian_nll_loss(mean, batch[1], log_variance.exp() + 1e-6)

    def run() -> Iterator[Step]:
        for _ in range(200):
            yield likelihood, sines(16, true, noise=0.02), None

    return Training(stepper_for(model, 1e-2), run())


# -- terms and stages ------------------------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(out=8), nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def kl_annealing() -> Training:
    """Raises the weight of a divergence from nothing to one, once or in cycles, by sums or by means."""
    model, mixing, cycle = Vae(), torch.randn(4, 8), int(draw(30, 120))
    summed = draw(0.0, 2.0) < 1.0

    def run() -> Iterator[Step]:
        for step in range(160):
            beta = min(1.0, 2 * (step % cycle) / cycle)

            def loss_fn(model: nn.Module, x: Tensor, beta: float = beta) -> Tensor:
                out, mean, log_variance = model(x)
                apart = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
                if summed:
                    return (out - x).square().sum() + beta * apart.sum()
                return F.mse_loss(out, x) + beta * apart.sum(-1).mean()

            yield loss_fn, torch.randn(16, 4) @ mixing, None

    return Training(stepper_for(model, 3e-3), run())


def jumping_curriculum() -> Training:
    """Trains on regression targets whose size jumps at each stage, up and down."""
    model, true, length = network(), torch.randn(8, 4), int(draw(25, 50))

    def run() -> Iterator[Step]:
        for stage in (1.0, draw(3.0, 30.0), draw(0.1, 1.0), draw(10.0, 100.0)):
            for _ in range(length):
                yield regression, sines(16, true, stage), None

    return Training(stepper_for(model, 3e-3), run(), level_changes=True)


def smoothing_switched_on() -> Training:
    """Classes that are learned, from where on labels are smoothed and logits are divided by a temperature."""
    model, centres = network(out=10, activation=nn.ReLU), torch.randn(10, 8)
    begin, smoothing, temperature = int(draw(40, 90)), draw(0.05, 0.3), draw(0.3, 1.0)

    def run() -> Iterator[Step]:
        for step in range(150):

            def loss_fn(model: nn.Module, batch: Batch, on: bool = step >= begin) -> Tensor:
                logits = model(batch[0]).float() / (temperature if on else 1.0)
                return F.cross_entropy(logits, batch[1], label_smoothing=smoothing if on else 0.0)

            yield loss_fn, classes(16, centres, 5.0), None

    return Training(stepper_for(model, 1e-2), run(), level_changes=True)


def unfreezing() -> Training:
    """Trains the last layer alone, then all of them at a higher rate, with batch statistics."""
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    true, begin, raised = torch.randn(8, 4), int(draw(30, 80)), draw(1.0, 5.0)
    model[0].requires_grad_(False)
    stepper = stepper_for(model, 3e-3)
    (optimizer,) = stepper.optimizers.values()

    def run() -> Iterator[Step]:
        for step in range(140):
            if step == begin:
                model[0].requires_grad_(True)
                optimizer.param_groups[0]["lr"] *= raised
            yield regression, sines(16, true), None

    return Training(stepper, run())


# -- batches ---------------------------------------------------------------------------------------------------------


def changing_batches() -> Training:
    """A contrastive loss of 2 to 128 pairs, whose chance level is the logarithm of their number."""
    model = network(out=8)

    def contrastive(model: nn.Module, batch: Batch) -> Tensor:
        one, other = (F.normalize(model(x).float(), dim=-1) for x in batch)
        return F.cross_entropy(one @ other.mT / 0.07, torch.arange(len(one)))

    def run() -> Iterator[Step]:
        for _ in range(150):
            x = torch.randn(2 ** int(draw(1, 8)), 8)
            yield contrastive, (x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)), None

    return Training(stepper_for(model, 3e-3), run())


def rare_tokens() -> Training:
    """A masked loss over few tokens, sometimes one and sometimes none: a loss of exactly zero is healthy."""
    model, centres = network(out=10), torch.randn(10, 8)
    share, counted = draw(0.02, 0.2), draw(0.0, 2.0) < 1.0

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Any:
        x, labels, mask = batch
        total = (F.cross_entropy(model(x).float(), labels, reduction="none") * mask).sum()
        return Counted(total, mask.sum()) if counted else total / mask.sum().clamp(min=1)

    def run() -> Iterator[Step]:
        for _ in range(160):
            mask = (torch.rand(16) < share).float()
            if counted:
                mask[0] = 1.0  # a sum over nothing is refused by name
            yield loss_fn, (*classes(16, centres), mask), None

    return Training(stepper_for(model, 3e-3), run())


def tasks_in_turns() -> Training:
    """Three tasks whose losses are decades apart, drawn at random or in turns."""
    model, true, centres = network(out=10), torch.randn(8, 10), torch.randn(10, 8)
    low, high, shuffled = 10.0 ** draw(-4.0, -1.0), 10.0 ** draw(1.0, 3.0), draw(0.0, 2.0) < 1.0

    def classify(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def run() -> Iterator[Step]:
        for step in range(180):
            task = int(draw(0, 3)) if shuffled else step % 3
            if task == 0:
                yield times(low), sines(16, true), None
            elif task == 1:
                yield times(high), sines(16, true), None
            else:
                yield classify, classes(16, centres), None

    return Training(stepper_for(model, 1e-3), run())


# -- rates, rewards, games -------------------------------------------------------------------------------------------


def cyclic_rate() -> Training:
    """A learning rate that rises and falls by two decades, with warm restarts that make the loss jump."""
    model, true, cycle, top = network(), torch.randn(8, 4), int(draw(15, 50)), draw(1e-2, 5e-2)
    stepper = stepper_for(model, 1e-4)
    (optimizer,) = stepper.optimizers.values()

    def run() -> Iterator[Step]:
        for step in range(160):
            part = step % cycle / cycle
            optimizer.param_groups[0]["lr"] = 1e-4 + top * 0.5 * (1 + math.cos(math.pi * part))
            yield regression, sines(16, true), None

    return Training(stepper, run())


def rewards() -> Training:
    """A policy gradient with rewards that change their sign, are rare, and are a hundred at times."""
    model, best, rare = network(), torch.randint(0, 4, (64,)), draw(0.02, 0.3)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        chances = torch.distributions.Categorical(logits=model(batch[0]).float())
        taken = chances.sample()
        hit = (taken == batch[1]).float() * torch.where(torch.rand(len(taken)) < rare, 100.0, 1.0)
        advantage = hit - hit.mean() - 0.1
        return -(chances.log_prob(taken) * advantage).mean() - 0.01 * chances.entropy().mean()

    states = torch.randn(64, 8)

    def run() -> Iterator[Step]:
        for _ in range(160):
            rows = torch.randint(0, 64, (16,))
            yield loss_fn, (states[rows], best[rows]), None

    return Training(stepper_for(model, 3e-3), run())


def changing_balance() -> Training:
    """A generator and a critic with one to eight steps of one for each of the other, and rates that change."""
    model, rate = Pair(), draw(3e-4, 3e-3)
    parts = {"d": model.critic, "g": model.generator}
    optimizers = {name: torch.optim.Adam(part.parameters(), rate, (0.5, 0.9)) for name, part in parts.items()}

    def critic(model: Any, real: Tensor) -> dict[str, Tensor]:
        fake = model.generator(torch.randn(len(real), 4)).detach()
        return {"d": F.relu(1 + model.critic(fake)).mean() + F.relu(1 - model.critic(real)).mean()}

    def generator(model: Any, real: Tensor) -> dict[str, Tensor]:
        return {"g": -model.critic(model.generator(torch.randn(len(real), 4))).mean()}

    def run() -> Iterator[Step]:
        for turn in range(30):
            for name, many in (("d", 1 + int(draw(0, 8))), ("g", 1 + int(draw(0, 4)))):
                optimizers[name].param_groups[0]["lr"] = rate * (0.1 if turn % 10 == 9 else 1.0)
                for _ in range(many):
                    angle = 6.2832 * torch.rand(16)
                    real = draw(0.5, 2.0) * torch.stack([angle.cos(), angle.sin()], 1)
                    yield (critic if name == "d" else generator), real, name

    return Training(Stepper(model, optimizers, precision="fp32", observe=False), run())


ODD: dict[str, Callable[[], Training]] = {
    "weight warm-up": weight_warm_up,
    "tiny losses": tiny_losses,
    "huge losses": huge_losses,
    "likelihood": likelihood_crosses_zero,
    "kl annealing": kl_annealing,
    "jumping curriculum": jumping_curriculum,
    "smoothing on": smoothing_switched_on,
    "unfreezing": unfreezing,
    "changing batches": changing_batches,
    "rare tokens": rare_tokens,
    "tasks in turns": tasks_in_turns,
    "cyclic rate": cyclic_rate,
    "rewards": rewards,
    "changing balance": changing_balance,
}
