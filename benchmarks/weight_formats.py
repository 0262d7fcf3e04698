"""Weights in bf16 and moments in 8 bits: bits, accuracy over seeds, and bytes for each parameter.

    python benchmarks/weight_formats.py [exact|parity|bytes|states ...] [--seeds 5] [--updates 200] [--record]

`exact` steps seven optimizers 200 times and compares `bf16-split` with fp32 masters whose 16-bit copies are rounded by
the same rule, and with fp32 weights under autocast. `parity` trains a GPT of 0.14 M parameters on the bytes of Python's
standard library at lr 1e-4, in each format, and judges the held-out loss by `bench`'s equivalence test; plain bf16
weights are its control. `bytes` compares the bytes of a real step on this CPU with those that `estimate` predicts.
`states` counts the bytes of Adam's moments, of the quantized tensors and of the whole model, before and after a resume.
int8 and fp8 need torchao (`pip install 'halfstep[narrow]'`) and are left out without it.
"""

from __future__ import annotations

import argparse
import copy
import glob
import importlib.util
import json
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Stepper, Window, estimate
from halfstep.measure.candidate import measure_peak_bytes
from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.measure.parity import compare_paired_metrics, compute_margin, compute_smallest_margin
from halfstep.precision.precision import resolve_precision_name
from halfstep.recipe.schema import OptimizerOptions
from halfstep.step.storage.weight_format import split_into_halves_
from halfstep.train.optimizers import make_optimizer

RECORD = Path(__file__).with_suffix(".json")
BF16 = resolve_precision_name("bf16")
SPLIT, STOCHASTIC = "bf16-split", "bf16-stochastic"
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
WITHIN, MOST_OF_FP32 = 0.03, 0.26


# -- exact --------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-4, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-4),
    "Muon": lambda p: torch.optim.Muon(p, 1e-4),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
}


def net(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=bias), nn.GELU(), nn.Linear(64, 8, bias=bias))
    with torch.no_grad():
        for p in model.parameters():  # every fifth number is a tie
            bits = p.view(torch.int32).flatten()
            bits[::5] = (bits[::5] & -65536) | 0x8000
    return model


def points(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


def rounded(wide: Tensor) -> Tensor:
    high = torch.empty_like(wide, dtype=torch.bfloat16)
    split_into_halves_(wide, high, torch.empty_like(wide, dtype=torch.int16))
    return high


def masters_of(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], updates: int) -> list[Tensor]:
    """Train fp32 masters by hand, computing with their copies in bf16."""
    model = copy.deepcopy(model)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = make(masters)
    for number in range(updates):
        for p, master in zip(model.parameters(), masters, strict=True):
            p.grad = None
            p.data = rounded(master.detach())
        with torch.autocast("cpu", torch.bfloat16):
            loss = squared(model, points(number))
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
    return [master.detach() for master in masters]


def exact(updates: int = 200) -> list[dict[str, Any]]:
    rows = []
    for name, make in OPTIMIZERS.items():
        model = net(bias=name != "Muon")
        start = [p.detach().clone() for p in model.parameters()]
        masters = masters_of(model, make, updates)
        under_autocast = copy.deepcopy(model)
        plain = Stepper(under_autocast, make(under_autocast.parameters()), precision=BF16)
        stepper = Stepper(model, make(model.parameters()), precision=BF16, weight_format=SPLIT)
        for number in range(updates):
            plain.step(squared, points(number))
            stepper.step(squared, points(number))
        assert stepper.weights is not None
        split = [stepper.weights.wide(p) for p in model.parameters()]
        same = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(split, masters, strict=True))
        autocast = [p.detach() for p in under_autocast.parameters()]
        away = distance(split, autocast) / distance(autocast, start)
        rows.append({"optimizer": name, "updates": updates, "bitwise": same, "from_autocast": away})
        print(f"exact {name:14} {updates} updates: bits of fp32 masters {same}; {away:.2e} of the way from autocast")
    return rows


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return float(torch.cat([(a - b).flatten() for a, b in zip(one, other, strict=True)]).double().norm())


# -- parity -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.n1(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Tensor:
    files = sorted(glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "*.py")))[:120]
    return torch.frombuffer(bytearray(b"".join(Path(file).read_bytes() for file in files)), dtype=torch.uint8).long()


def windows(data: Tensor, number: int, seed: int, size: int = 8, length: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + number)
    at = torch.randint(0, len(data) - length - 1, (size,), generator=generator)
    rows = torch.stack([data[i : i + length + 1] for i in at.tolist()])
    return rows[:, :-1], rows[:, 1:]


def next_byte(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


ARMS = {
    "fp32 weights": ("fp32", "fp32"),
    "bf16-split": (SPLIT, "fp32"),
    "bf16-stochastic": (STOCHASTIC, "fp32"),
    "int8 states": ("fp32", "int8"),
    "fp8 states": ("fp32", "fp8"),
    "bf16-stochastic, int8 states": (STOCHASTIC, "int8"),
}
CONTROL = "plain bf16"
LEARNING_RATE = 1e-4


class Trained(NamedTuple):
    start: float
    """The held-out loss before the first update."""
    loss: float
    way: Tensor
    """How far each weight went."""


def trained(arm: str, seed: int, updates: int, data: Tensor, held: Tensor) -> Trained:
    """Train one arm."""
    torch.manual_seed(seed)
    model = GPT()
    start = [p.detach().clone() for p in model.parameters()]
    weight_format, state = ARMS.get(arm, ("", "fp32"))
    if arm == CONTROL:
        model = model.bfloat16()
        start = [p.detach().float() for p in model.parameters()]
    optimizer = make_optimizer(OptimizerOptions(name="adamw", lr=LEARNING_RATE, state=state), model)  # type: ignore[arg-type]
    first, stepper = held_out(model, held), None
    if arm != CONTROL:
        stepper = Stepper(model, optimizer, precision=BF16, weight_format=weight_format, rounding_seed=seed)
    for number in range(updates):
        if stepper is not None:
            stepper.step(next_byte, windows(data, number, seed))
            continue
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_byte(model, windows(data, number, seed))
        loss.backward()
        optimizer.step()
    weights = None if stepper is None else stepper.weights
    end = [p.detach().float() if weights is None else weights.wide(p) for p in model.parameters()]
    way = torch.cat([(a - b).flatten() for a, b in zip(end, start, strict=True)])
    return Trained(first, held_out(model, held), way)


def held_out(model: nn.Module, held: Tensor) -> float:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [next_byte(model, windows(held, number, 99)).item() for number in range(16)]
    return sum(losses) / len(losses)


def compare(seeds: int, updates: int) -> list[dict[str, Any]]:
    data = text()
    data, held = data[: -len(data) // 20], data[-len(data) // 20 :]
    arms = [arm for arm, (_, state) in ARMS.items() if state == "fp32" or HAS_TORCHAO]
    found = {arm: [trained(arm, seed, updates, data, held) for seed in range(seeds)] for arm in (*arms, CONTROL)}
    wide = found["fp32 weights"]
    base = [run.loss for run in wide]
    margin = compute_margin(base, points=compute_smallest_margin(base, higher_is_better=False))
    rows = []
    for arm, runs in found.items():
        losses = [run.loss for run in runs]
        # Along the way of fp32 weights: random rounding goes to its sides as well.
        pairs = list(zip((run.way for run in runs), (run.way for run in wide), strict=True))
        whole = sum(float(other @ other) for _, other in pairs)
        way = sum(float(own @ other) for own, other in pairs) / whole
        apart = (sum(float((own - other).square().sum()) for own, other in pairs) / whole) ** 0.5
        gained = sum(run.start - run.loss for run in runs) / sum(run.start - run.loss for run in wide)
        test = compare_paired_metrics(base, losses, margin, higher_is_better=False)
        facts = {
            "arm": arm,
            "updates": updates,
            "loss": sum(losses) / seeds,
            "losses": losses,
            "way": way,
            "apart": apart,
        }
        rows.append({**facts, "gained": gained, "verdict": test.verdict, "margin": margin.size})
        print(
            f"parity {arm:30} loss {facts['loss']:.4f}, {way:.0%} of the way of fp32 weights and {apart:.0%} away from "
            f"their end, {gained:.0%} of their loss: {test.verdict}",
            flush=True,
        )
    return rows


# -- bytes --------------------------------------------------------------------------------------------------------


class Promised(NamedTuple):
    weight_format: str
    state: str
    microbatches: int
    held: int
    """Bytes of weights, gradients and states for each parameter."""
    casts: int


BYTES = {
    "masters": Promised("fp32", "fp32", 1, 16, 2),
    "split": Promised(SPLIT, "fp32", 1, 14, 0),
    "split, 2 micro-batches": Promised(SPLIT, "fp32", 2, 16, 0),
    "stochastic": Promised(STOCHASTIC, "fp32", 1, 12, 0),
    "stochastic, int8 states": Promised(STOCHASTIC, "int8", 1, 6, 0),
}


class Counted:
    """A guard that counts the bytes of gradients."""

    name, same_on_all_ranks, size = "counted", True, 0

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def passes(self, report: object) -> bool:
        self.size = sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)
        return True


def outputs_squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def wide_net(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))


def plain_parts(tree: Any) -> list[Tensor]:
    if hasattr(tree, "__tensor_flatten__"):
        return [part for name in tree.__tensor_flatten__()[0] for part in plain_parts(getattr(tree, name))]
    if isinstance(tree, Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [part for value in inner for part in plain_parts(value)]


def size(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def near(one: float, other: float) -> bool:
    return abs(one / other - 1) <= WITHIN


def bytes_of_a_step(width: int = 1024, names: Sequence[str] = tuple(BYTES)) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        weight_format, state, many, promised, promised_casts = BYTES[name]
        if state != "fp32" and not HAS_TORCHAO:
            continue
        model, x = wide_net(width), torch.randn(4, width)
        options = OptimizerOptions(name="adamw", state=state)  # type: ignore[arg-type]
        ledger = estimate(
            wide_net(width),
            outputs_squared,
            x,
            precision="bf16",
            optimizer=lambda m, options=options: make_optimizer(options, m),
            microbatches=many,
            weight_format=weight_format,
        )
        guard = Counted(model)
        optimizer = make_optimizer(options, model)
        stepper = Stepper(model, optimizer, precision=BF16, weight_format=weight_format, guards=[guard], observe=False)
        window = Window([x] * many)

        def update(stepper: Stepper = stepper, window: Window = window) -> None:
            stepper.step(outputs_squared, window)

        update()
        low = [] if stepper.weights is None else list(stepper.weights.state_dict()["low_bits"].values())
        weights, moments = [p.detach() for p in model.parameters()] + low, plain_parts(list(optimizer.state.values()))
        peak = measure_peak_bytes(update, torch.device("cpu"), [*weights, *moments, x])
        count = sum(p.numel() for p in model.parameters())
        real = (size(weights) + guard.size + size(moments)) / count
        casts = ledger.whole["cast copies"] / count
        told = sum(ledger.whole[part] for part in ("weights", "gradients", "optimizer")) / count
        rows.append(
            {
                "name": name,
                "promised": promised,
                "real": real,
                "predicted": told,
                "casts": casts,
                "peak": peak,
                "predicted_peak": ledger.peak,
                "states": size(moments) / (8 * count),
                "within": near(told, real)
                and near(told, promised)
                and abs(casts - promised_casts) <= WITHIN * promised
                and near(ledger.peak, peak),
            }
        )
        print(
            f"bytes {name:26} a parameter: {real:.2f} held, {told:.2f} predicted, {casts:.2f} of casts; "
            f"peak {peak / count:.2f}, {ledger.peak / count:.2f} predicted ({ledger.peak / peak - 1:+.1%})"
        )
    return rows


def state_bytes(width: int = 256, layers: int = 4) -> list[dict[str, Any]]:
    rows = []
    for state in ("int8", "fp8") if HAS_TORCHAO else ():
        steppers = []
        for _ in range(2):
            torch.manual_seed(0)
            model = GPT(width, layers)
            options = OptimizerOptions(name="adamw", lr=LEARNING_RATE, state=state)  # type: ignore[arg-type]
            steppers.append(Stepper(model, make_optimizer(options, model), precision=BF16, observe=False))
        steppers[0].step(next_byte, windows(torch.arange(10_000) % 256, 0, 0, size=1))
        steppers[1].load_state_dict(copy.deepcopy(steppers[0].state_dict()))
        for when, stepper in zip(("made", "loaded"), steppers, strict=True):
            moments = {
                p: plain_parts([kept["exp_avg"], kept["exp_avg_sq"]])
                for p, kept in stepper.optimizers["loss"].state.items()
            }
            small = {p: parts for p, parts in moments.items() if len(parts) > 2}
            quantized = size(plain_parts(list(small.values()))) / sum(8 * p.numel() for p in small)
            whole = size(plain_parts(list(moments.values()))) / sum(8 * p.numel() for p in moments)
            held = sum(p.numel() for p in small) / sum(p.numel() for p in moments)
            facts = {"state": state, "when": when, "quantized": quantized, "whole": whole, "elements": held}
            rows.append({**facts, "small": quantized <= MOST_OF_FP32})
            print(
                f"states {state:4} {when:6}: {quantized:.4f} of the bytes of fp32 moments for the quantized tensors, "
                f"{held:.1%} of the elements; {whole:.4f} for the whole model"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["exact", "parity", "bytes", "states", []], default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.parts or ["exact", "parity", "bytes", "states"]
    found: dict[str, Any] = {"conditions": describe_conditions(collect_conditions(torch.device("cpu")))}
    if "exact" in wanted:
        found["exact"] = exact()
    if "parity" in wanted:
        found["parity"] = compare(options.seeds, options.updates)
    if "bytes" in wanted:
        found["bytes"] = bytes_of_a_step(options.width)
    if "states" in wanted:
        found["states"] = state_bytes()
    if options.record:
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps({**before, **found}, indent=1) + "\n")
    good = {
        "exact": all(row["bitwise"] for row in found.get("exact", ())),
        "parity": all(
            row["way"] < 0.5 if row["arm"] == CONTROL else row["verdict"] == "same" for row in found.get("parity", ())
        ),
        "bytes": all(row["within"] for row in found.get("bytes", ())),
        "states": all(row["small"] for row in found.get("states", ())),
    }
    print(" ".join(f"{part}={good[part]}" for part in wanted))
    return 0 if all(good[part] for part in wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
