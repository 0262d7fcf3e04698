"""Slots on moving sprites in bf16: how well they divide the things in clips, next to slots that know nothing.

    python benchmarks/slots_sprites.py [--out runs/slots_sprites] [--record]

Needs `python -m benchmarks.sets dsprites` once. The run is `halfstep train benchmarks/recipes/slots_sprites.yaml`; one
that is finished in `--out` is taken as it is. `untrained` is the same model with the weights it began with, `random` a
slot drawn for each pixel by itself. FG-ARI and mBO are over the validation clips. `--record` keeps the result next to
this file, and clips with their slots in docs/slots_masks.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.draw.images import enlarge_picture, join_picture_grid, write_png
from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.runs.finished import FinishedRun, open_finished
from halfstep.train.environment import seed_all
from halfstep.train.evaluation import compute_metric_values, evaluate_model
from halfstep.train.loaders import make_val_loader
from halfstep.train.metrics import Metrics
from halfstep.train.run_folder import RESULT
from halfstep.train.task import ignore_progress

RECORD = Path(__file__).with_suffix(".json")
SHOWN = Path(__file__).parents[1] / "docs" / "slots_masks.png"
CLIPS = 4


def judged(finished: FinishedRun, model: torch.nn.Module) -> dict[str, float]:
    loader = make_val_loader(finished.task, finished.recipe, finished.device)
    return evaluate_model(finished.task, model, loader, precision=finished.choice.precision, device=finished.device)


def drawn_at_random(finished: FinishedRun) -> dict[str, float]:
    """Slots that own pixels by chance."""
    metrics: Metrics = finished.task.metrics()
    torch.manual_seed(0)
    for batch in make_val_loader(finished.task, finished.recipe, finished.device):
        truth = batch.tensors["mask"]
        metrics.update(torch.randint(finished.recipe.model.slots, truth.shape), truth)
    return compute_metric_values(metrics)


def untrained(finished: FinishedRun) -> torch.nn.Module:
    seed_all(finished.recipe.train.seed or 0)
    return finished.task.model().to(finished.device)


def measure(out: Path) -> tuple[dict[str, Any], FinishedRun]:
    if not (out / RESULT).exists():
        halfstep.fit(
            Path(__file__).parent / "recipes" / "slots_sprites.yaml", precision="bf16", settings=[f"run.dir={out}"]
        )
    result = json.loads((out / RESULT).read_text())
    finished = open_finished(out, weights="best", precision=None, own=None)
    return {
        "precision": result["precision"],
        "seconds": result["seconds"],
        "steps": result["steps"],
        "skipped": result["skipped"],
        "trained": judged(finished, finished.model),
        "untrained": judged(finished, untrained(finished)),
        "random": drawn_at_random(finished),
    }, finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/slots_sprites"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} and docs/{SHOWN.name}")
    given = parser.parse_args()
    here = collect_conditions("cpu")
    found, finished = measure(given.out)
    found = {"command": " ".join(["python", "benchmarks/slots_sprites.py", *sys.argv[1:]]), "conditions": here, **found}
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        with finished.choice.precision.inference(finished.device):
            clips = finished.task.sample(finished.model, CLIPS, ignore_progress)
        write_png(SHOWN, join_picture_grid([[enlarge_picture(clip, 192) for clip in clips]]))
    if given.json:
        print(json.dumps(found, indent=1))
        return
    trained, before, chance = found["trained"], found["untrained"], found["random"]
    print(describe_conditions(here))
    print(
        f"slots {found['precision']} fg_ari={trained['fg_ari']:.3f} untrained={before['fg_ari']:.3f} "
        f"random={chance['fg_ari']:.3f} mbo={trained['mbo']:.3f} untrained={before['mbo']:.3f} "
        f"random={chance['mbo']:.3f} steps={found['steps']} minutes={found['seconds'] / 60:.1f}"
    )


if __name__ == "__main__":
    main()
