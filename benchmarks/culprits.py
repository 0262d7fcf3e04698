"""Faults planted in small models, and healthy warm-ups of the loss scale: are the ones named, and only those?

    python benchmarks/culprits.py [--only NAME] [--warm-ups 200] [--json] [--record]

What is expected of each fault is written next to it in benchmarks/plants/, whose docstring says how to add one. A fault
is named where class, operation, module, direction and line are those that were planted. A warm-up is named right where
every step that was skipped is called one. `--record` keeps the result in benchmarks/culprits.json. There is a line for
each class, and the last line is `named=N/M false=K`: K of the warm-ups got another word.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from halfstep import Stepper
from halfstep.errors import Diverged
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.guardian import Guardian
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import WARM_UP, Cause, GuardEvent, Verdict
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.loss import DynamicScale, LossScale

if TYPE_CHECKING:
    from benchmarks.plants.plant import Expected, Plant, Scene

SEED = 7
HELD = 12
"""Skipped steps in a row after which a scale that should fall has had its time."""


def verdict_on(plant: Plant) -> Verdict | None:
    """Train under a guardian until a step fails for another reason than a warm-up; None where none does."""
    torch.manual_seed(SEED)
    scene = plant.make()
    found: list[Verdict] = []
    guardian = _guarded(scene, plant.precision, found)
    for step in range(scene.steps + HELD):
        scene.before(step)
        try:
            batch = scene.batch if scene.batch_at is None else scene.batch_at(step)
            report = guardian.step(scene.loss_fn, batch)
        except Diverged:
            break
        if (found and found[-1].cause != WARM_UP) or (report.applied and step + 1 >= scene.steps):
            break
    return found[-1] if found else None


def _guarded(scene: Scene, precision: str, found: list[Verdict]) -> Guardian:
    """A guardian that adds what it says to `found`, and never ends a run by itself."""
    scale: LossScale | None = DynamicScale(init_scale=scene.scale) if precision == "fp16" else None
    optimizer = scene.optimizer(scene.model, scene.rate)
    named = resolve_precision_name(precision)
    stepper = Stepper(scene.model, optimizer, precision=named, loss_scale=scale, observe=False, **scene.options)

    def on_event(told: GuardEvent) -> None:
        if told.kind == "verdict":
            found.append(Verdict.from_dict(told.facts))

    guardian = Guardian(stepper, limits=Limits(skips_in_a_row=1000, skip_share=1.0, spikes="off"), tell=on_event)
    if scene.checkpoint:
        guardian.taken_up_from(scene.checkpoint)
    return guardian


def misses(expected: Expected, verdict: Verdict | None) -> list[str]:
    """In what a verdict differs from what was planted; nothing where it names it."""
    from benchmarks.plants.plant import line_of

    if verdict is None:
        return ["no step failed"]
    wrong = [] if verdict.cause == expected.cause else [f"cause {verdict.cause}"]
    wrong += [f"not said: {words}" for words in expected.words if words not in verdict.sentence]
    culprit = verdict.culprit
    if expected.operation is None and expected.outside is None:
        return wrong
    if culprit is None:
        return [*wrong, "no culprit"]
    pairs = [("outside", expected.outside, culprit.outside)]
    if expected.operation is not None:
        pairs += [("operation", expected.operation, culprit.operation), ("module", expected.module, culprit.module)]
        pairs += [("backward", str(expected.backward), str(culprit.backward))]
    wrong += [f"{what} {found}" for what, planted, found in pairs if planted != found]
    if expected.mark is not None and not (culprit.line or "").endswith(line_of(expected.mark)):
        wrong.append(f"line {culprit.line}, not {line_of(expected.mark)}")
    return wrong


# -- warm-ups ------------------------------------------------------------------------------------------------------


def healthy(seed: int) -> tuple[nn.Module, Any, Any, float]:
    """A small model, its loss, a batch, and a scale that is too high for it."""
    from benchmarks.plants.models import Transformer, Vae, batch_for, squares, vae_loss

    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    width, depth, kind = (int(torch.randint(*span, (1,), generator=draw)) for span in ((4, 24), (1, 4), (0, 4)))
    exponent = int(torch.randint(16, 25, (1,), generator=draw))
    weight = 2.0 ** int(torch.randint(2, 10, (1,), generator=draw))
    model: nn.Module
    loss_fn: Any = squares
    if kind == 0:
        model = Transformer()
    elif kind == 1:
        model, loss_fn = Vae(), vae_loss
    else:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), _bend(kind, width))]
        model = nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 4))
    return model, lambda model, batch: weight * loss_fn(model, batch), batch_for(model), 2.0**exponent


def _bend(kind: int, width: int) -> nn.Module:
    return nn.Tanh() if kind == 2 else nn.Sequential(nn.LayerNorm(width), nn.GELU())


def false_verdicts(seed: int) -> tuple[int, list[str]]:
    """How many steps were skipped until the scale fitted, and what was said of them if not that."""
    model, loss_fn, batch, scale = healthy(seed)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    stepper = Stepper(
        model,
        optimizer,
        precision=resolve_precision_name("fp16"),
        loss_scale=DynamicScale(init_scale=scale),
        observe=False,
    )
    skipped, wrong = 0, []
    while not (report := stepper.step(loss_fn, batch)).applied:
        assert stepper.attempt is not None
        assert report.reason is not None
        verdict = diagnose_attempt(model, stepper.attempt, precision=stepper.precision, reason=report.reason)
        skipped += 1
        if verdict.cause != WARM_UP:
            wrong.append(verdict.sentence)
        if skipped > 40:
            wrong.append("the scale never fitted")
            break
    return skipped, wrong


# -- the page ------------------------------------------------------------------------------------------------------


def main() -> None:
    from benchmarks.plants.catalogue import all_plants

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", metavar="NAME", help="only the faults of this name, and no warm-ups")
    options.add_argument("--warm-ups", type=int, default=200)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    given = options.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    chosen = [plant for plant in all_plants() if given.only in (None, plant.name)]
    # Before any plant is compiled: once Dynamo is loaded, every operation that is looked at costs twice as much.
    seen, wrong = _warm_ups(0 if given.only else given.warm_ups)
    rows = [_examined(number, len(chosen), plant) for number, plant in enumerate(chosen, 1)]
    report = {
        "command": "python benchmarks/culprits.py",
        "torch": torch.__version__,
        "named": sum(not row["misses"] for row in rows),
        "of": len(rows),
        "classes": _by_class(rows),
        "warm_ups": 0 if given.only else given.warm_ups,
        "skipped_steps": seen,
        "false": len(wrong),
        "false_sentences": wrong,
        "seconds": round(time.perf_counter() - start),
        "rows": rows,
    }
    if given.record:
        Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(report, given.json, only=given.only is not None)


def _examined(number: int, of: int, plant: Plant) -> dict[str, Any]:
    verdict = verdict_on(plant)
    wrong = misses(plant.expected, verdict)
    said = verdict.sentence if verdict else ""
    row = {"plant": plant.title, "class": plant.expected.cause, "misses": wrong, "sentence": said}
    print(f"{number:3}/{of} {plant.title:34} {'; '.join(wrong) or 'ok'}", file=sys.stderr, flush=True)
    return row


def _by_class(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """How many of each class were named, and how many there are."""
    classes = dict.fromkeys([cause for cause in get_args(Cause) if any(row["class"] == cause for row in rows)])
    its = {cause: [row for row in rows if row["class"] == cause] for cause in classes}
    return {cause: [sum(not row["misses"] for row in found), len(found)] for cause, found in its.items()}


def _warm_ups(many: int) -> tuple[int, list[str]]:
    seen, wrong, begun = 0, [], time.perf_counter()
    for seed in range(many):
        skipped, said = false_verdicts(seed)
        seen, wrong = seen + skipped, wrong + said
        if seed % 20 == 19:
            left = (time.perf_counter() - begun) / (seed + 1) * (many - seed - 1)
            told = f"{seed + 1:3}/{many} warm-ups, {seen} skipped steps, {len(wrong)} false, {left:.0f} s left"
            print(told, file=sys.stderr, flush=True)
    return seen, wrong


def _show(report: dict[str, Any], as_json: bool, *, only: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=1))
        return
    for row in report["rows"]:
        if row["misses"] or only:
            print(f"{row['plant']}: {'; '.join(row['misses']) or 'ok'}\n    {row['sentence']}")
    for sentence in report["false_sentences"]:
        print(f"false: {sentence}")
    for cause, (named, of) in report["classes"].items():
        print(f"{cause:10} {named}/{of}")
    print(f"warm-ups={report['warm_ups']} skipped steps={report['skipped_steps']} in {report['seconds']} s")
    print(f"named={report['named']}/{report['of']} false={report['false']}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plants can be imported by name
    main()
