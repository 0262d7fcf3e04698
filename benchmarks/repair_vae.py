"""A variational autoencoder that overflows fp16 in one module, trained under guard: repair, next to fp32.

    python benchmarks/repair_vae.py [--seeds 3] [--steps 400] [--json]

Its latent code is stretched far beyond fp16's largest number and normalized again, all inside `decoder.stretch`: in
fp32 that is harmless, in fp16 every step fails. The guardian has to find the module, keep it in fp32 and go on in fp16.
Both arms see the same batches; `seed_sd` is how far fp32's own runs lie apart, which is what a difference of the two
has to be held against. The island has to be the right one, and has to be there again after saving and loading.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.guard.verdict import GuardEvent
from halfstep.precision.island import find_islands

CULPRIT = "decoder.stretch"
WIDTH, LATENT = 16, 4


class Stretch(nn.Module):
    """A latent code of large numbers, normalized: what a scaled latent does at the entry of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(LATENT, 32)

    def forward(self, code: Tensor) -> Tensor:
        large = self.project(code) * 1e6
        large = large - large.mean(-1, keepdim=True)
        return large / (large.abs().mean(-1, keepdim=True) + 1.0)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stretch, self.out = Stretch(), nn.Linear(32, WIDTH)

    def forward(self, code: Tensor) -> Tensor:
        return self.out(self.stretch(code))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(32, LATENT), nn.Linear(32, LATENT)
        self.decoder = Decoder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden).float(), self.log_variance(hidden).float()
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    decoded, mean, log_variance = model(x)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(-1).mean()
    return F.mse_loss(decoded.float(), x) + 0.001 * divergence


def batch(generator: torch.Generator) -> Tensor:
    """Points on a curved sheet of four dimensions in sixteen."""
    code = torch.randn(32, LATENT, generator=generator)
    mix = torch.linspace(-1.0, 1.0, LATENT * WIDTH).reshape(LATENT, WIDTH)
    return torch.sin(code @ mix + code.cos() @ mix.flip(0))


def stepper_for(seed: int, precision: str) -> halfstep.Stepper:
    torch.manual_seed(seed)
    model = Vae()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return halfstep.Stepper(model, optimizer, precision=precision, observe=False)


def train(seed: int, precision: str, steps: int) -> tuple[float, list[str], halfstep.Guardian, list[GuardEvent]]:
    """The mean loss of the last tenth, what is an island by then, and what was said."""
    told: list[GuardEvent] = []
    stepper = stepper_for(seed, precision)
    guardian = halfstep.Guardian(stepper, mode="repair", tell=told.append)
    generator = torch.Generator().manual_seed(1000 + seed)
    losses = [guardian.step(loss_fn, batch(generator)).loss for _ in range(steps)]
    return statistics.fmean(losses[-max(1, steps // 10) :]), list(find_islands(stepper.model)), guardian, told


def kept(seed: int, guardian: halfstep.Guardian) -> bool:
    """Whether the island is there again in a run that takes over the saved state."""
    state = json.loads(json.dumps(guardian.state_dict()))
    again = halfstep.Guardian(stepper_for(seed, "fp16"), mode="repair")
    again.load_state_dict(state)
    return list(find_islands(again.stepper.model)) == guardian.remedies.islands == [CULPRIT]


def one(seed: int, steps: int) -> dict[str, Any]:
    repaired, placed, guardian, told = train(seed, "fp16", steps)
    named = [t.facts["culprit"]["module"] for t in told if t.kind == "verdict" and t.facts.get("culprit")]
    fp32 = train(seed, "fp32", steps)[0]
    counts = guardian.stepper.counts
    return {
        "seed": seed,
        "fp16_repaired": repaired,
        "fp32": fp32,
        "islands": placed,
        "named": named,
        "kept": kept(seed, guardian),
        "precision": guardian.stepper.precision.name,
        "skipped": dict(counts.skipped),
        "said": [t.text for t in told if t.level != "info"],
    }


def good(run: dict[str, Any]) -> bool:
    return run["islands"] == [CULPRIT] and run["named"][:1] == [CULPRIT] and run["kept"] and run["precision"] == "fp16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="everything that was seen, before the last line")
    options = parser.parse_args()
    logging.getLogger("halfstep").setLevel(logging.ERROR)  # fp16 is slow here, and wanted
    runs = []
    for seed in range(options.seeds):
        runs.append(one(seed, options.steps))
        print(f"seed {seed}: {json.dumps(runs[-1])}", file=sys.stderr)
    fp32 = [run["fp32"] for run in runs]
    spread = statistics.stdev(fp32) if len(fp32) > 1 else 0.0
    if options.json:
        print(json.dumps(runs, indent=2))
    repaired = statistics.fmean(run["fp16_repaired"] for run in runs)
    print(
        f"repaired={sum(map(good, runs))}/{len(runs)} fp16_repaired={repaired:.5f} "
        f"fp32={statistics.fmean(fp32):.5f} seed_sd={spread:.5f}"
    )


if __name__ == "__main__":
    main()
