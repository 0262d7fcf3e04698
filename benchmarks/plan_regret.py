"""How far a plan's choice is from the best that a sweep of everything finds.

    python benchmarks/plan_regret.py [resnet50] [unet] [resnet18_stock_stem_32] [--seconds 240] [--pairs 30] [--json]

Run it from the root of the repository, on an idle machine. For each subject: `halfstep plan` within its time; then a
sweep of every cell at the same global batch (strict fp32 and each precision that is native here, both layouts, eager in
one micro-batch or two, compiled in one), each in a process of its own; then the sweep's winner and the plan's choice
in turns, next to strict fp32. `speedup` is the choice over strict fp32, `of_best` the winner's time over the choice's,
each the median over pairs; `aa` is the choice against a second process of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import clock
from halfstep.errors import HalfstepError
from halfstep.measure.conditions import describe_conditions
from halfstep.measure.local_candidate import needs_observation
from halfstep.measure.plan.page import Plan
from halfstep.measure.plan.plan import plan
from halfstep.measure.plan.search import collect_device_abilities
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import CandidateFailed, CandidateProcess, CandidateTooSlow
from halfstep.precision.hardware import describe_device

SUBJECTS = ("resnet50", "unet", "resnet18_stock_stem_32")
RECORD = Path(__file__).with_suffix(".json")
FIRST_STEP = 120.0
"""Seconds for the first step of a cell of the sweep, in which compilers work; those that take longer are left out."""
WARM, TIMED = 2, 3
Case = tuple[nn.Module, Any, Any]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def resnet50() -> Case:
    import timm

    model = timm.create_model("resnet50", num_classes=100)
    return model, classify, (torch.randn(16, 3, 224, 224), torch.randint(0, 100, (16,)))


def unet() -> Case:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet34", encoder_weights=None, classes=4)
    return model, classify, (torch.randn(4, 3, 256, 256), torch.randint(0, 4, (4, 256, 256)))


def resnet18_stock_stem_32() -> Case:
    import timm

    model = timm.create_model("resnet18", num_classes=10)
    return model, classify, (torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", help=f"some of {', '.join(SUBJECTS)}; all if left out")
    parser.add_argument("--seconds", type=float, default=240.0, help="for each plan")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}, next to this file")
    given = parser.parse_args()
    wanted = given.subjects or list(SUBJECTS)
    if not set(wanted) <= set(SUBJECTS):
        parser.error(f"no such subject; there are {', '.join(SUBJECTS)}")
    if not Path("benchmarks", Path(__file__).name).exists():
        parser.error("run it from the root of the repository, where `benchmarks` can be imported")
    results = {}
    for name in wanted:
        results[name] = measured(name, given.seconds, given.pairs)
        if given.record:
            keep(name, results[name])
    if given.json:
        print(json.dumps(results, indent=1))
        return
    named = [name for name in SUBJECTS[:2] if name in results]
    print(" ".join(f"{n} speedup={results[n]['speedup']:.2f} of_best={results[n]['of_best']:.2f}" for n in named))


def keep(name: str, result: dict[str, Any]) -> None:
    """Subject by subject: the whole takes half an hour."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    command = " ".join(["python", "benchmarks/plan_regret.py", *sys.argv[1:]])
    RECORD.write_text(json.dumps({**before, name: {"command": command, **result}}, indent=1) + "\n")


def measured(name: str, seconds: float, pairs: int) -> dict[str, Any]:
    subject = Subject(f"benchmarks.plan_regret:{name}")
    begin = time.perf_counter()
    found = plan(subject, seconds=seconds)
    say(f"{name}: {describe_conditions(found.conditions)}")
    say(f"  plan, {found.seconds:.0f} s: {found.choice.setting}, stay={found.stay}; {found.reasons['precision']}")
    swept = sweep(subject, found)
    winner = min(swept, key=lambda setting: swept[setting])
    say(f"  sweep: {winner} is the fastest of {len(swept)}, {swept[winner]:.3f} s an update")
    final = head_to_head(subject, found, winner, pairs)
    say(
        f"  head to head, {final['pairs']} pairs: speedup={final['speedup']:.3f} of_best={final['of_best']:.3f} "
        f"aa={final['aa']:.3f}, {time.perf_counter() - begin:.0f} s in all"
    )
    sweep_seconds = {label(setting): seconds for setting, seconds in swept.items()}
    return {**final, "winner": label(winner), "sweep": sweep_seconds, "plan": found.as_dict()}


def cells(found: Plan) -> Iterator[StepSetting]:
    """Every cell at the plan's global batch."""
    native = [name for name, can in collect_device_abilities(describe_device(found.device.place)).items() if can.native]
    batch = found.now.batch or 1
    ways = [(False, batch, 1), (False, batch // 2, 2), (True, batch, 1)]
    for precision, last, (compiled, size, pieces) in itertools.product(native, (False, True), ways):
        yield StepSetting(precision, last, compiled, size, pieces)


def sweep(subject: Subject, found: Plan) -> dict[StepSetting, float]:
    """Seconds of one update of every cell that runs."""
    times: dict[StepSetting, float] = {}
    for setting in cells(found):
        try:
            with CandidateProcess(subject, setting, observe=needs_observation(setting)) as arm:
                arm.open()
                first = arm.seconds(1, FIRST_STEP)
                arm.seconds(WARM)
                times[setting] = statistics.median(arm.seconds() for _ in range(TIMED))
            say(f"  {label(setting):40} {times[setting]:.3f} s an update, first {first:.1f} s")
        except (CandidateFailed, CandidateTooSlow, HalfstepError) as error:
            say(f"  {label(setting):40} {type(error).__name__}: {error}")
    return times


def head_to_head(subject: Subject, found: Plan, winner: StepSetting, pairs: int) -> dict[str, Any]:
    choice = found.choice.setting
    settings = {"fp32": found.baseline, "choice": choice, "again": choice, "winner": winner}
    with contextlib.ExitStack() as opened:
        arms = {}
        for name, setting in settings.items():
            arms[name] = opened.enter_context(CandidateProcess(subject, setting, observe=needs_observation(setting)))
            arms[name].open()
            arms[name].seconds(1 + WARM)
        rounds = list(clock.iterate_interleaved_times({name: arm.seconds for name, arm in arms.items()}, pairs))

    def ratio(one: str, other: str) -> float:
        return statistics.median(times[one] / times[other] for times in rounds)

    return {
        "choice": label(choice),
        "stay": found.stay,
        "speedup": ratio("fp32", "choice"),
        # The same setting is as fast as itself; what two processes of it differ by is `aa`.
        "of_best": 1.0 if winner == choice else ratio("winner", "choice"),
        "aa": ratio("again", "choice"),
        "pairs": len(rounds),
        "seconds": {name: statistics.median(times[name] for times in rounds) for name in arms},
    }


def label(setting: StepSetting) -> str:
    return f"{setting}" if setting.microbatches > 1 else f"{setting}, 1 × {setting.batch}"


def say(line: str) -> None:
    print(line, file=sys.stderr if "--json" in sys.argv else sys.stdout, flush=True)


if __name__ == "__main__":
    main()
