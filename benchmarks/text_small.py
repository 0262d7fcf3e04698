"""A language model of 11 M parameters on the State of the Union addresses: curve, speed, bits per byte, a sample.

    python benchmarks/text_small.py [--updates 400] [--precision bf16] [--out runs/text_small] [--record]
    python benchmarks/text_small.py --parity [--seeds 5] [--record]

Needs `python -m benchmarks.sets sotu` once, and the extra `text`. The tokens are made with a vocabulary of 4,096, every
document whole on one side. The run is `halfstep train text_small`. Its speed over fp32 is measured afterwards, update
by update in turns, on the same model and batch. `--parity` trains 4 layers of 160 for 60 updates in fp32 and in bf16,
and compares the held-out losses. On a CPU without bf16 instructions bf16 is emulated (`train.strict=true`), and the
speed is the emulation's; the record says which.

A document begins with the end token of the document before it, and all its tokens are predicted. Before documents had
beginnings, the first token of each was neither predicted nor counted, though its bytes were: figures of such runs are
over fewer and easier tokens, and cannot be compared with these. A folder of tokens that is there is used again: give
--out another name for new ones.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.clock import compare_paired_times, iterate_interleaved_times
from halfstep.data.layout import resolve_data_path
from halfstep.data.token_files import has_tokens
from halfstep.data.tokenizing import write_tokens
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.measure.parity import compare_paired_metrics, compute_margin, compute_smallest_margin
from halfstep.precision.hardware import describe_device, find_format_support
from halfstep.precision.precision import resolve_precision_name
from halfstep.runs.recipe_case import build_recipe_case

RECORD = Path(__file__).with_suffix(".json")
SMALL = ["model.width=160", "model.layers=4", "model.mlp=432", "train.steps=60", "schedule.warmup_steps=5"]
PROMPT = "The Congress of the United States"


def tokens(out: Path) -> Path:
    folder = out / "tokens"
    if not has_tokens(folder):
        write_tokens([resolve_data_path("cache:sotu")], "train:4096", folder)
    return folder


def native(precision: str) -> bool:
    return find_format_support(describe_device("cpu"), precision).native


def trained(folder: Path, out: Path, updates: int, precision: str) -> dict[str, Any]:
    run = out / precision
    settings = [f"data.path={folder}", f"train.steps={updates}", "train.strict=true", f"run.dir={run}", "num_workers=0"]
    if not (run / "result.json").exists():
        halfstep.fit("text_small", settings=[*settings, f"precision={precision}"])
    events = list(read_events(run / JOURNAL))
    speeds = sorted(event["tokens_per_second"] for event in events if event["event"] == "speed")
    steps = [event for event in events if event["event"] == "step"]
    result = json.loads((run / "result.json").read_text())
    written = halfstep.load(run)
    torch.manual_seed(0)
    return {
        "precision": precision,
        "native": native(precision),
        "parameters": sum(p.numel() for p in written.model.parameters()),
        "updates": updates,
        "seconds": result["seconds"],
        "metrics": result["metrics"],
        "observed": result["observed"],
        "loss_curve": [[event["attempt"], round(event["loss"], 4)] for event in steps[:: max(1, len(steps) // 40)]],
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "sample": {"prompt": PROMPT, "text": written.predict(PROMPT).values["text"]},
    }


def speed(folder: Path, precision: str, turns: int) -> dict[str, Any]:
    """Seconds of an update in this precision and in fp32, in turns."""
    timers = {}
    for name in ("fp32", precision):
        case = build_recipe_case("text_small", [f"data.path={folder}", "num_workers=0"])
        optimizer = torch.optim.AdamW(case.model.parameters(), 1e-3)
        stepper = halfstep.Stepper(case.model, optimizer, precision=resolve_precision_name(name), clip_norm=1.0)
        stepper.step(case.loss_fn, case.batch)

        def timer(stepper: Any = stepper, case: Any = case) -> float:
            begin = time.perf_counter()
            stepper.step(case.loss_fn, case.batch)
            return time.perf_counter() - begin

        timers[name] = timer
    rows = list(iterate_interleaved_times(timers, turns))
    found = compare_paired_times([row["fp32"] for row in rows], [row[precision] for row in rows])
    return {"of": f"fp32 seconds over {precision} seconds", **asdict(found)}


def compared(folder: Path, out: Path, seeds: int) -> dict[str, Any]:
    losses: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for seed in range(seeds):
        for name, found in losses.items():
            run = out / f"parity-{name}-{seed}"
            settings = [*SMALL, f"data.path={folder}", f"train.seed={seed}", "train.strict=true", f"run.dir={run}"]
            if not (run / "result.json").exists():
                halfstep.fit("text_small", settings=[*settings, f"precision={name}", "num_workers=0"], quiet=True)
            found.append(json.loads((run / "result.json").read_text())["metrics"]["loss"])
            print(f"seed {seed} {name}: held-out loss {found[-1]:.4f}", flush=True)
    margin = compute_margin(losses["fp32"], points=compute_smallest_margin(losses["fp32"], higher_is_better=False))
    judged = compare_paired_metrics(losses["fp32"], losses["bf16"], margin, higher_is_better=False)
    return {"seeds": seeds, "updates": 60, "native": native("bf16"), "held_out_loss": losses, "parity": asdict(judged)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--precision", default="bf16" if native("bf16") else "fp32")
    parser.add_argument("--parity", action="store_true", help="compare bf16 with fp32 over several seeds instead")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=10, help="pairs of updates that the speed is measured with")
    parser.add_argument("--out", type=Path, default=Path("runs/text_small"))
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    here = collect_conditions("cpu")
    folder = tokens(given.out)
    if given.parity:
        found = {"parity": compared(folder, given.out, given.seeds)}
    else:
        found = {"run": trained(folder, given.out, given.updates, given.precision)}
        other = given.precision if given.precision != "fp32" else "bf16"
        found["speed"] = {"precision": other, "native": native(other), **speed(folder, other, given.turns)}
    print(json.dumps(found, indent=1))
    print(describe_conditions(here), describe_load_problem(here))
    if given.record:
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps({**before, **found, "conditions": here}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
