"""Healthy runs that look like trouble: is one of them stopped, refused or called sick?

    python benchmarks/healthy_runs.py [--runs 500] [--only SHAPE] [--json] [--record]
    python benchmarks/healthy_runs.py --odd [--runs 40] ...

Small models are really trained, in eight shapes: warm-ups of the learning rate, level changes, a curriculum, noisy
small batches, a loss term that is switched on, losses over four decades, a GAN, and warm-ups of an fp16 loss scale.
`--odd` trains those of benchmarks/odd_shapes.py instead, in fourteen further shapes.
Every other run is under `repair`, the others under the default; nothing else is set. False is whatever a person would
be misled by: an error, a verdict other than a warm-up of the scale, a remedy, a step refused by the guard, a run that
was ended; and a warning, unless it tells of a level in a shape where the level did change. `--record` keeps the result
in benchmarks/healthy_runs.json, or odd_runs.json. The last line is `healthy=N false=F stopped=S`: S of the runs were
ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper
from halfstep.errors import Diverged
from halfstep.guard.verdict import WARM_UP, GuardEvent
from halfstep.step.loss import DynamicScale

Step = tuple[Callable[[nn.Module, Any], Any], Any, str | None]
"""A loss function, a batch, and the one optimizer that takes the step, where there are several."""


@dataclass(frozen=True)
class Training:
    stepper: Stepper
    steps: Iterator[Step]
    level_changes: bool = False


def network(wide: int = 24, out: int = 4, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, wide), activation(), nn.Linear(wide, wide), activation(), nn.Linear(wide, out))


def stepper_for(model: nn.Module, rate: float, **options: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    return Stepper(model, optimizer, **{"precision": "fp32", "observe": False, **options})


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def sines(size: int, true: Tensor, scale: float = 1.0, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8)
    return x, scale * torch.sin(x @ true) + noise * torch.randn(size, true.shape[1])


def draw(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


# -- the shapes ----------------------------------------------------------------------------------------------------


def warm_up() -> Training:
    """Trains at a learning rate that rises from nothing to one that is high for it, and falls again."""
    model, true, steps = network(), torch.randn(8, 4), 140
    stepper = stepper_for(model, draw(3e-3, 3e-2), clip_norm=1.0)
    (optimizer,) = stepper.optimizers.values()
    top, rise = optimizer.param_groups[0]["lr"], int(draw(20, 80))

    def run() -> Iterator[Step]:
        for step in range(steps):
            share = min((step + 1) / rise, (steps - step) / (steps - rise))
            optimizer.param_groups[0]["lr"] = top * share
            yield regression, sines(16, true), None

    return Training(stepper, run())


def level_change() -> Training:
    """Trains on targets that are several times as large from some step on, and smaller again later."""
    model, true, begin = network(), torch.randn(8, 4), int(draw(40, 70))
    scale, back = draw(2.0, 30.0), begin + int(draw(30, 60))

    def run() -> Iterator[Step]:
        for step in range(150):
            yield regression, sines(16, true, scale if begin <= step < back else 1.0), None

    return Training(stepper_for(model, 3e-3), run(), level_changes=True)


def curriculum() -> Training:
    """Trains on harder and harder classes, and on something altogether different at the end."""
    model, centres, apart = network(out=10, activation=nn.ReLU), torch.randn(10, 8), draw(2.0, 5.0)

    def run() -> Iterator[Step]:
        for step in range(160):
            classes = 2 + 2 * (step // 40)
            y = torch.randint(0, classes, (8,))
            labels = y if step < 120 else 9 - y
            yield _classify, (apart * centres[y] + 0.7 * torch.randn(8, 8), labels), None

    return Training(stepper_for(model, 1e-2), run(), level_changes=True)


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def small_batches() -> Training:
    """Trains on one to four samples at a time, of which a few are rare, far out or wrongly labeled."""
    model, true, size = network(), torch.randn(8, 4), 1 + int(draw(0, 4))
    heavy = torch.distributions.StudentT(draw(3.0, 6.0))

    def run() -> Iterator[Step]:
        for _ in range(160):
            x, y = sines(size, true, noise=0.1)
            yield regression, (x, y + 0.3 * heavy.sample(y.shape)), None

    return Training(stepper_for(model, 3e-3), run())


def term_switched_on() -> Training:
    """Trains with one loss, and from some step on with a second one that is up to a hundred times as large."""
    model, true, begin, weight = network(), torch.randn(8, 4), int(draw(40, 90)), 10.0 ** draw(0.0, 2.0)

    def run() -> Iterator[Step]:
        for step in range(140):
            factor = weight if step >= begin else 0.0

            def both(model: nn.Module, batch: tuple[Tensor, Tensor], factor: float = factor) -> Tensor:
                out = model(batch[0])
                return F.mse_loss(out, batch[1]) + factor * (out.abs().mean() + out.var(0).sum() + 0.5)

            yield both, sines(16, true), None

    return Training(stepper_for(model, 3e-3), run(), level_changes=True)


def four_decades() -> Training:
    """Trains with returns over four decades, as in reinforcement learning: always, or after a quiet beginning."""
    model, true, quiet = network(), torch.randn(8, 4), int(draw(0, 2)) * 60

    def run() -> Iterator[Step]:
        for step in range(150):
            factor = 10.0 ** draw(-3.0, 1.0) if step >= quiet else 1e-3

            def scaled(model: nn.Module, batch: tuple[Tensor, Tensor], factor: float = factor) -> Tensor:
                return factor * regression(model, batch)

            yield scaled, sines(16, true), None

    return Training(stepper_for(model, 1e-3), run(), level_changes=quiet > 0)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
        self.critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def gan() -> Training:
    """Trains a generator and a critic in turns, with losses about zero (Wasserstein) or about one."""
    model, wasserstein = Pair(), bool(draw(0, 2) >= 1)
    rate = draw(1e-4, 1e-3)
    parts = {"d": model.critic, "g": model.generator}
    optimizers = {name: torch.optim.Adam(part.parameters(), rate, (0.5, 0.9)) for name, part in parts.items()}

    def critic(model: Any, real: Tensor) -> dict[str, Tensor]:
        fake = model.generator(torch.randn(len(real), 4)).detach()
        judged = model.critic(fake), model.critic(real)
        if wasserstein:
            return {"d": judged[0].mean() - judged[1].mean()}
        return {"d": F.softplus(judged[0]).mean() + F.softplus(-judged[1]).mean()}

    def generator(model: Any, real: Tensor) -> dict[str, Tensor]:
        judged = model.critic(model.generator(torch.randn(len(real), 4)))
        return {"g": -judged.mean() if wasserstein else F.softplus(-judged).mean()}

    def run() -> Iterator[Step]:
        for _ in range(70):
            angle = 6.2832 * torch.rand(16)
            real = torch.stack([angle.cos(), angle.sin()], 1)
            yield critic, real, "d"
            yield generator, real, "g"

    return Training(Stepper(model, optimizers, precision="fp32", observe=False), run())


def scale_warm_up() -> Training:
    """Trains in fp16 from a loss scale that is too high, and that grows into its ceiling every few steps."""
    model, true, weight = network(wide=12), torch.randn(8, 4), 2.0 ** draw(0.0, 6.0)
    scale = DynamicScale(init_scale=2.0 ** int(draw(18, 25)), growth_interval=int(draw(10, 40)), cap=2.0**25)

    def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return weight * regression(model, batch)

    def run() -> Iterator[Step]:
        for _ in range(100):
            yield weighted, sines(8, true), None

    return Training(stepper_for(model, 3e-3, precision="fp16", loss_scale=scale), run())


Shapes = dict[str, Callable[[], Training]]
SHAPES: Shapes = {
    "warm-up": warm_up,
    "level change": level_change,
    "curriculum": curriculum,
    "small batches": small_batches,
    "term switched on": term_switched_on,
    "four decades": four_decades,
    "gan": gan,
    "fp16 warm-up": scale_warm_up,
}


# -- one run -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    shape: str
    mode: str
    seed: int
    steps: int
    wrong: list[str]
    """What was false in it, in words; nothing in a run that was left alone."""
    levels: int
    """Warnings of a level that did change."""
    stopped: bool


def one(number: int, shapes: Shapes = SHAPES) -> Outcome:
    """Train the run of this number, which says its shape, its mode and its seed."""
    shape, seed = list(shapes)[number % len(shapes)], number // len(shapes)
    mode: Any = "watch" if seed % 2 == 0 else "repair"
    torch.manual_seed(seed)
    training, told, reasons = shapes[shape](), list[GuardEvent](), list[str]()
    guardian, stopped, steps = Guardian(training.stepper, mode=mode, tell=told.append), False, 0
    for loss_fn, batch, only in training.steps:
        steps += 1
        try:
            reasons.append(guardian.step(loss_fn, batch, only=only).reason or "")
        except Diverged as error:
            told.append(GuardEvent("alarm", "error", error.given))
            stopped = True
            break
    wrong = [f"{one.kind}: {one.text}" for one in told if is_false(one, training.level_changes)]
    wrong += [f"refused: {reason}" for reason in reasons if reason.startswith("guard:")]
    return Outcome(shape, mode, seed, steps, wrong, len(told) - len(wrong), stopped)


def is_false(told: GuardEvent, level_changes: bool) -> bool:
    """Whether a person would have been misled by it."""
    if told.kind == "verdict":
        return told.facts.get("cause") != WARM_UP
    return told.level != "info" and not (told.kind == "alarm" and told.level == "warning" and level_changes)


def outcomes(count: int, only: str | None = None, shapes: Shapes = SHAPES) -> Iterator[Outcome]:
    numbers = (n for n in range(count) if only in (None, list(shapes)[n % len(shapes)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            yield one(number, shapes)


def run(count: int, shapes: Shapes = SHAPES) -> tuple[int, int]:
    """Train so many runs, and return how many there were and how many of them had a false alarm."""
    found = list(outcomes(count, shapes=shapes))
    return len(found), sum(bool(outcome.wrong) for outcome in found)


# -- the page ------------------------------------------------------------------------------------------------------


def main() -> None:
    from benchmarks.odd_shapes import ODD

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--odd", action="store_true", help="the odd shapes instead")
    options.add_argument("--runs", type=int, help="how many, over all shapes; 500, or 40 odd ones")
    options.add_argument("--only", metavar="SHAPE", help="only the runs of this shape")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    given = options.parse_args()
    shapes, runs, name = (ODD, 40, "odd_runs") if given.odd else (SHAPES, 500, "healthy_runs")
    if given.only not in (None, *shapes):
        options.error(f"--only {given.only!r} is none of {', '.join(shapes)}")
    logging.disable(logging.WARNING)
    start, found = time.perf_counter(), list[Outcome]()
    for outcome in outcomes(given.runs or runs, given.only, shapes):
        found.append(outcome)
        if outcome.wrong or len(found) % 50 == 0:
            print(
                f"{len(found):3} {outcome.shape}, {outcome.mode}: {outcome.wrong or 'ok'}", file=sys.stderr, flush=True
            )
    command = f"python benchmarks/healthy_runs.py{' --odd' if given.odd else ''}"
    report = {"command": command, "torch": torch.__version__, **summary(found, shapes)}
    report["seconds"] = round(time.perf_counter() - start)
    if given.record:
        Path(__file__).with_name(f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(report, given.json)


def summary(found: list[Outcome], shapes: Shapes) -> dict[str, Any]:
    rows = {shape: [outcome for outcome in found if outcome.shape == shape] for shape in shapes}
    return {
        "healthy": len(found),
        "false": sum(bool(outcome.wrong) for outcome in found),
        "stopped": sum(outcome.stopped for outcome in found),
        "steps": sum(outcome.steps for outcome in found),
        "shapes": {shape: _row(of) for shape, of in rows.items() if of},
        "false_words": [f"{one.shape}, {one.mode}, seed {one.seed}: {words}" for one in found for words in one.wrong],
    }


def _row(of: list[Outcome]) -> dict[str, int]:
    false, told = sum(bool(outcome.wrong) for outcome in of), sum(outcome.levels for outcome in of)
    return {"runs": len(of), "false": false, "steps": sum(outcome.steps for outcome in of), "said": told}


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    for shape, row in report["shapes"].items():
        print(
            f"{shape:18} {row['runs']:4} runs {row['steps']:7} steps  false={row['false']}  said rightly={row['said']}"
        )
    for words in report["false_words"]:
        print(f"false: {words}")
    print(f"{report['steps']} steps in {report['seconds']} s")
    print(f"healthy={report['healthy']} false={report['false']} stopped={report['stopped']}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the odd shapes can be imported by name
    main()
