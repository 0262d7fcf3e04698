"""Memory and time of bf16 next to fp32 for the four tasks, in one table.

    python benchmarks/four_tasks.py [segmentation classification diffusion slots] [--pairs 60] [--json] [--record]

Each task is a recipe with drawn data, both arms in channels_last, each in a process of its own. `predicted` is what
`halfstep estimate` says from fake tensors, `counted` the highest sum of the allocator's own events over the second
update; neither holds an average of the weights. The speed-up is the median of paired, interleaved updates with its 95 %
interval; `aa` is fp32 next to itself. `--record` keeps the result in benchmarks/four_tasks.json, and the table in
benchmarks/four_tasks.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.measure.memory.estimate import estimate_ledger
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.timing import race_candidates, warm_up_candidate
from halfstep.measure.worker_process import CandidateProcess
from halfstep.terminal import display_progress

RECORD = Path(__file__).with_suffix(".json")
TABLE = RECORD.with_suffix(".md")
SUBJECTS = {
    "segmentation": Subject("unet", ("data.name=shapes", "data.size=128", "data.crop=128", "train.batch_size=4")),
    "classification": Subject("imagenet100", ("data.name=shapes", "data.size=224", "train.batch_size=8")),
    "diffusion": Subject("radiomap", ("data.size=64", "train.batch_size=8")),
    "slots": Subject("benchmarks/recipes/slots_sprites.yaml", ("data.name=shapes", "train.batch_size=4")),
}
ARMS = {"fp32": "fp32", "aa": "fp32", "bf16": "bf16"}


def memory(subject: Subject, setting: StepSetting) -> dict[str, int]:
    with CandidateProcess(subject, setting, "cpu") as arm:
        arm.open()
        counted = arm.memory()
    ledger = estimate_ledger(subject.open, setting)
    return {"predicted": ledger.peak - ledger.at_peak["average"], "counted": counted}


def speed(subject: Subject, settings: dict[str, StepSetting], pairs: int, name: str) -> dict[str, Any]:
    with ExitStack() as stack:
        arms = {
            arm: stack.enter_context(CandidateProcess(subject, settings[precision], "cpu"))
            for arm, precision in ARMS.items()
        }
        for arm in arms.values():
            arm.open()
            warm_up_candidate(arm)
        found = race_candidates(
            arms, baseline="fp32", pairs=pairs, progress=stack.enter_context(display_progress(name, "pairs"))
        )
    return {arm: found.speeds[arm].as_dict() for arm in ARMS}


def measure(name: str, pairs: int) -> dict[str, Any]:
    subject = SUBJECTS[name]
    case = subject.open()
    settings = {p: StepSetting(p, channels_last=True, batch=case.setting.batch) for p in ("fp32", "bf16")}
    return {
        "recipe": " ".join([subject.text, *subject.settings]),
        "parameters": sum(parameter.numel() for parameter in case.model.parameters()),
        "memory": {precision: memory(subject, setting) for precision, setting in settings.items()},
        "speed": speed(subject, settings, pairs, name),
    }


def table(tasks: dict[str, Any]) -> str:
    lines = [
        "| task | recipe | fp32, MB predicted / counted | bf16, MB predicted / counted | memory "
        "| fp32 step | bf16 step | speed-up (95 %) | aa |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in tasks.items():
        sizes, speeds = found["memory"], found["speed"]
        both = [f"{sizes[p]['predicted'] / 1e6:.0f} / {sizes[p]['counted'] / 1e6:.0f}" for p in ("fp32", "bf16")]
        share = sizes["bf16"]["counted"] / sizes["fp32"]["counted"]
        bf16, fp32, aa = speeds["bf16"], speeds["fp32"], speeds["aa"]
        lines.append(
            f"| {name} | `{found['recipe']}` | {both[0]} | {both[1]} | {share:.2f} | {1e3 * fp32['seconds']:.0f} ms "
            f"| {1e3 * bf16['seconds']:.0f} ms | **{bf16['speedup']:.2f}x** ({bf16['low']:.2f} to {bf16['high']:.2f}) "
            f"| {aa['speedup']:.2f} |"
        )
    return "\n".join(lines)


def last_line(tasks: dict[str, Any]) -> str:
    words = []
    for name, found in tasks.items():
        counted = {precision: sizes["counted"] for precision, sizes in found["memory"].items()}
        words.append(
            f"{name} speedup={found['speed']['bf16']['speedup']:.2f} memory={counted['bf16'] / counted['fp32']:.2f}"
        )
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=", ".join(SUBJECTS))
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and {TABLE.name}")
    given = parser.parse_args()
    unknown = sorted(set(given.tasks) - set(SUBJECTS))
    if unknown:
        parser.error(f"no task {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    here = collect_conditions("cpu")
    tasks = {name: measure(name, given.pairs) for name in given.tasks or SUBJECTS}
    command = " ".join(["python", "benchmarks/four_tasks.py", *sys.argv[1:]])
    found = {"command": command, "conditions": here, "tasks": tasks}
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        TABLE.write_text(f"Made by `{command}` on {describe_conditions(here)}.\n\n{table(tasks)}\n")
    if given.json:
        print(json.dumps(found, indent=1))
        return
    print(describe_conditions(here))
    if describe_load_problem(here):
        print("the machine was busy: take these figures with care")
    print(f"{table(tasks)}\n{last_line(tasks)}")


if __name__ == "__main__":
    main()
