"""fp8 and mxfp8 against bf16, over seeds: do they train as well, and does the test notice when they do not?

    python -m benchmarks.narrow_parity [--models gpt vit] [--seeds 5] [--processes 2] [--record]

A GPT of 0.15 M parameters on the bytes of Python's standard library, and a ViT of 0.1 M parameters on drawn gratings,
each in bf16, in three kinds of fp8 (emulated on a CPU), and in two sabotaged ones: fp8-rowwise whose scales are all 1,
and mxfp8 that drops every bias. The held-out loss is judged by `bench`'s equivalence test, against bf16. `--record`
keeps the result in benchmarks/narrow_parity.json. The last line is `same=N of 6 worse=N of 4 seconds=N`.

Without scales, fp8-rowwise loses nearly all gradients: they are in e4m3, where numbers below 2**-10 become zero. Those
of `fp8` are in e5m2, down to 2**-17; without scales it is shown as well, and not counted: at this size 0.1 to 4 % of
its inputs and weights become zero, and AdamW scales up what is left of its gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.weight_formats import GPT, Block, next_byte, text, windows
from halfstep import Stepper
from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.measure.parity import compare_paired_metrics, compute_margin, compute_smallest_margin
from halfstep.precision.precision import resolve_precision_name

RECORD = Path(__file__).with_suffix(".json")
BASE = "bf16"
NARROW = ("fp8", "fp8-rowwise", "mxfp8")
SABOTAGED = {"fp8-rowwise without scales": "fp8-rowwise", "mxfp8 without biases": "mxfp8"}
NOT_COUNTED = {"fp8 without scales": "fp8"}
WRONG = SABOTAGED | NOT_COUNTED
HELD_OUT = 8
"""Batches of the held-out loss."""


# -- models -----------------------------------------------------------------------------------------------------------


@cache
def data() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and those that are held out."""
    found = text()
    return found[: -len(found) // 20], found[-len(found) // 20 :]


def gpt() -> nn.Module:
    """Return a GPT whose head begins with the frequencies of the bytes as its bias."""
    model = GPT()
    model.head = nn.Linear(64, 256)
    nn.init.normal_(model.head.weight, std=0.02)
    with torch.no_grad():
        model.head.bias.copy_((torch.bincount(data()[0], minlength=256) + 1.0).log())
        model.head.bias.sub_(model.head.bias.logsumexp(0))
    return model


def some_bytes(number: int, seed: int, held: bool) -> tuple[Tensor, Tensor]:
    return windows(data()[held], number, seed)


class Vit(nn.Module):
    """A vision transformer over patches of 8 × 8; 32 classes, of which few are frequent."""

    def __init__(self, width: int = 64, classes: int = 32) -> None:
        super().__init__()
        self.cut, self.place = nn.Linear(64, width), nn.Parameter(torch.empty(16, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        with torch.no_grad():
            self.head.bias.copy_(FREQUENT.log())

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(1, 8, 8).unfold(2, 8, 8).flatten(3).flatten(1, 2)
        x = self.cut(patches) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


SIZE = 16
"""Images of a batch."""
FREQUENT = torch.softmax(-0.2 * torch.arange(32.0), 0)


def gratings(number: int, seed: int, held: bool) -> tuple[Tensor, Tensor]:
    """Return images of waves, in noise: eight directions and four wavelengths make a class."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + number + 500_000 * held)
    kinds = torch.multinomial(FREQUENT, SIZE, replacement=True, generator=generator)
    angle, wave = math.pi * (kinds % 8) / 8, 2.0 * math.pi / (3.0 + kinds // 8)
    shift = 2 * math.pi * torch.rand(SIZE, generator=generator)
    down, right = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angle.cos()[:, None, None] * right + angle.sin()[:, None, None] * down
    drawn = (wave[:, None, None] * along + shift[:, None, None]).sin()
    return drawn + 0.5 * torch.randn(SIZE, 32, 32, generator=generator), kinds


def class_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


MODELS: dict[str, tuple[Any, Any, Any]] = {"gpt": (gpt, some_bytes, next_byte), "vit": (Vit, gratings, class_of)}
UPDATES = {"gpt": 100, "vit": 40}
"""For the ViT fewer: later its loss falls so fast that bf16 itself differs by 10 % from seed to seed, and there is no
verdict (after 100 updates, with a margin of 30 %)."""


# -- arms -------------------------------------------------------------------------------------------------------------


@contextmanager
def sabotage(arm: str) -> Iterator[None]:
    """Make the layers of a sabotaged arm wrong."""
    if arm not in WRONG:
        yield
        return
    from halfstep.precision import float8_layers

    if WRONG[arm] != "mxfp8":
        from torchao.float8 import float8_scaling_utils as scaling

        scale = scaling.tensor_to_scale
        with mock.patch.object(scaling, "tensor_to_scale", lambda *args: torch.ones_like(scale(*args))):
            yield
        return
    forward = float8_layers.Mxfp8Layer.forward

    def without_bias(layer: Any, input: Tensor) -> Tensor:
        bias, layer._parameters["bias"] = layer.bias, None
        try:
            return forward(layer, input)
        finally:
            layer._parameters["bias"] = bias

    with mock.patch.object(float8_layers.Mxfp8Layer, "forward", without_bias):
        yield


def trained(model: str, arm: str, seed: int, updates: int) -> tuple[float, float]:
    """Train one arm; return its held-out loss, and the share of its work that ran in fp8."""
    torch.set_num_threads(1)
    make, batch, loss_fn = MODELS[model]
    torch.manual_seed(seed)
    net: nn.Module = make()
    with warnings.catch_warnings(), sabotage(arm):
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        stepper = Stepper(net, optimizer, precision=resolve_precision_name(WRONG.get(arm, arm)), clip_norm=1.0)
        for number in range(updates):
            stepper.step(loss_fn, batch(number, seed, False))
        with stepper.evaluating():
            losses = [float(loss_fn(net, batch(number, 99, True))) for number in range(HELD_OUT)]
    seen = stepper.observed
    assert seen is not None, "every arm takes at least one step"
    return sum(losses) / len(losses), sum(seen.fp8.values()) / (sum(seen.fp8.values()) + sum(seen.flops.values()))


def compare(models: Sequence[str], seeds: int, processes: int) -> list[dict[str, Any]]:
    arms = (BASE, *NARROW, *WRONG)
    jobs = [(model, arm, seed, UPDATES[model]) for model in models for arm in arms for seed in range(seeds)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        found = dict(zip(jobs, pool.map(trained, *zip(*jobs, strict=True)), strict=True))
    rows = []
    for model in models:
        updates = UPDATES[model]
        losses = {arm: [found[model, arm, seed, updates][0] for seed in range(seeds)] for arm in arms}
        margin = compute_margin(losses[BASE], points=compute_smallest_margin(losses[BASE], higher_is_better=False))
        for arm in arms:
            test = compare_paired_metrics(losses[BASE], losses[arm], margin, higher_is_better=False, base_name=BASE)
            mean, in_fp8 = sum(losses[arm]) / seeds, found[model, arm, 0, updates][1]
            verdict = "baseline" if arm == BASE else test.verdict
            rows.append(
                {
                    "model": model,
                    "updates": updates,
                    "arm": arm,
                    "loss": mean,
                    "losses": losses[arm],
                    "in_fp8": in_fp8,
                    "verdict": verdict,
                }
            )
            rows[-1] |= {"verdict": verdict, "difference": test.difference, "margin": margin.size, "note": test.note}
            print(
                f"{model} {arm:26} loss {mean:.4f} ({in_fp8:.0%} of FLOPs in fp8), margin {margin.size:.4f}: {verdict}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    begun = time.monotonic()
    rows = compare(given.models, given.seeds, given.processes)
    seconds = time.monotonic() - begun
    if given.record:
        facts = {"seeds": given.seeds, "processes": given.processes, "seconds": round(seconds)}
        facts["conditions"] = describe_conditions(collect_conditions(torch.device("cpu")))
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        own = {model: {**facts, "rows": [row for row in rows if row["model"] == model]} for model in given.models}
        RECORD.write_text(json.dumps({**before, **own}, indent=1) + "\n")
    verdicts = {(row["arm"], row["model"]): row["verdict"] for row in rows}
    many = len(given.models)
    same = sum(verdicts[arm, model] == "same" for arm in NARROW for model in given.models)
    worse = sum(verdicts[arm, model] == "worse" for arm in SABOTAGED for model in given.models)
    print(f"same={same} of {len(NARROW) * many} worse={worse} of {len(SABOTAGED) * many} {seconds=:.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
