"""A hundred photographs of one's own: from the first command to a model with its pictures, and what it is worth.

    python benchmarks/own_photographs.py [--out runs/own_photographs] [--seed 0] [--record]

Needs `python -m benchmarks.sets aerial_buildings` once. A hundred of its crops, evenly from nine orthophotos, are put
into a folder as a person would have them; then `halfstep train segment --data_dir FOLDER` is run with no other setting
than its seed. The IoU of buildings is measured on the 118 crops of three orthophotos of which nothing was in the
folder, with `halfstep predict`; next to it stands the IoU of calling every pixel a building. The minutes are those of
the command on the clock, the pictures of its evaluations included; `cpu_minutes` is what it and its processes
computed, on a machine that others may have used at the same time. `--record` keeps the result next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfstep.files import find_cache_folder, read_json
from halfstep.measure.conditions import collect_conditions
from halfstep.recipe.strict_yaml import parse_yaml

RECORD = Path(__file__).with_suffix(".json")
PHOTOGRAPHS = 100
SIZED = ("data.val", "data.max_side", "data.crop", "model.width", "train.batch_size", "train.epochs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/own_photographs"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    source = find_cache_folder() / "data" / "aerial_buildings"
    if not source.is_dir():
        sys.exit(f"there is no {source}; do: python -m benchmarks.sets aerial_buildings")
    report = measured(source, given.out, given.seed)
    if given.record:
        RECORD.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"own_photographs minutes={report['minutes']:.1f} iou={report['iou']:.3f} "
        f"train={report['train']} held_out={report['held_out']}"
    )
    return 0


def measured(source: Path, out: Path, seed: int) -> dict[str, Any]:
    photos, run = out / "photos", out / "run"
    shutil.rmtree(out, ignore_errors=True)
    gathered(source / "train", photos)
    clock, computed = time.monotonic(), cpu_seconds()
    halfstep("train", "segment", "--data_dir", str(photos), f"run.dir={run}", f"train.seed={seed}")
    minutes, cpu = (time.monotonic() - clock) / 60, (cpu_seconds() - computed) / 60
    halfstep("predict", str(run), str(source / "val" / "images"), "--out", str(out / "predicted"))
    truths = sorted((source / "val" / "masks").iterdir())
    answers = [out / "predicted" / "masks" / path.name for path in truths]
    recipe, journal = parse_yaml((run / "recipe.yaml").read_bytes(), "recipe"), run / "journal.jsonl"
    start = next(event for event in map(json.loads, journal.open()) if event["event"] == "start")
    return {
        "command": " ".join(["python", *sys.argv]),
        "conditions": collect_conditions(),
        "minutes": minutes,
        "cpu_minutes": cpu,
        "iou": iou(truths, answers),
        "iou_all_foreground": iou(truths, None),
        "own_validation": (read_json(run / "result.json") or {}).get("best"),
        "train": start["samples"]["train"],
        "held_out": len(truths),
        "settings": {key: recipe[key.split(".")[0]][key.split(".")[1]] for key in SIZED},
        "pictures": len(list((run / "pictures").glob("*"))),
    }


def gathered(source: Path, into: Path) -> None:
    names = sorted(path.name for path in (source / "images").iterdir())
    for kind in ("images", "masks"):
        (into / kind).mkdir(parents=True)
        for name in [names[i * len(names) // PHOTOGRAPHS] for i in range(PHOTOGRAPHS)]:
            shutil.copy(source / kind / name, into / kind / name)


def halfstep(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "halfstep", *words], check=True)


def cpu_seconds() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def iou(truths: list[Path], answers: list[Path] | None) -> float:
    """Over the pixels of all photographs together; without answers, of calling all of them a building."""
    both = either = 0
    for number, path in enumerate(truths):
        truth = np.array(Image.open(path)) > 0
        said = np.ones_like(truth) if answers is None else np.array(Image.open(answers[number])) > 0
        both, either = both + int((truth & said).sum()), either + int((truth | said).sum())
    return both / either


if __name__ == "__main__":
    sys.exit(main())
