"""Whether a change that claims to keep all outputs does: the output of 80 commands, before and after.

    python benchmarks/same_outputs.py --out before.json      # at the commit before the change
    python benchmarks/same_outputs.py --against before.json  # at the commit after it

Each command runs in a process of its own, as a page or with --json, in a temporary folder with four small runs, a case
and a project. Standard output, standard error and the exit code are compared byte for byte, after the folder, dates,
durations and digests are replaced; lines of progress, which appear on a busy machine, are left out. Of commands that
measure, numbers and the padding of tables are replaced too. Two recordings of the same commit list the commands whose
output depends on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from pathlib import Path

CASES = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.stem(x))).mean((2, 3)))

def net():
    batch = (torch.randn(8, 3, 32, 32), torch.arange(8) % 4)
    return Net(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch

def large():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    return model, lambda model, batch: (model(batch) * 1e6).exp().mean(), torch.randn(4, 8)

def frozen():
    model = nn.Linear(2, 2).requires_grad_(False)
    return model, lambda model, batch: model(batch).mean(), torch.randn(2, 2)

def no_case():
    return nn.Linear(2, 2)
"""
SCRIPT = """
import torch
scaler = torch.cuda.amp.GradScaler()
for batch, target in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch, target) / 4
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\ndistributed_type: 'NO'\n"
DEEPSPEED = '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4}'
RECIPE = "task: classification\nprecision: bf16\ntrain:\n  epochs: 1\n"
RUNS = {
    "masks": "segmentation_tiny",
    "classes": "classification_tiny",
    "text": "text_tiny",
    "broken": "segmentation_tiny --lr 1e30",
}
COMMON = "train.steps=8 run.pictures=1 num_workers=0 train.seed=3 --fp32"
EXACT = """
--help
--version
recipes
recipes --json
recipes explain unet
recipes explain unet --json
recipes explain text_tiny
recipes schema segmentation
train segmentation_tiny --show
train unet train.seed=1 --show --json
train unett
train segmentation_tiny --batch_sise 4
train unet train.epochs=x
doctor --formats
doctor --formats --json
doctor --gpus
doctor --known-bad
doctor recipe.yaml --accelerate accelerate.yaml
doctor recipe.yaml --accelerate accelerate.yaml --json
doctor recipe.yaml --deepspeed deepspeed.json
doctor recipe.yaml --accelerate accelerate.yaml --fix fp16
doctor project
doctor project --json
doctor project --settings
doctor project --write written.yaml
doctor unett
audit cases:net --precision bf16
audit cases:net --precision bf16 --all --json
audit cases:net --precision fp16
audit cases:large --precision fp16 --json
audit segmentation_tiny --precision bf16
audit cases:frozen
audit cases:no_case
audit cases:missing
audit cases:net train.batch_size=4
estimate cases:net --device a100-80gb --precision fp32,bf16
estimate cases:net --device a100-80gb --precision fp32,bf16 --json
estimate cases:net --device t4 --recompute on
estimate cases:net --device a100-80gb --survive fp16
estimate segmentation_tiny --device t4 --no-search
estimate unet --device a100-80gb --no-search --json
estimate segmentation_tiny --device a100-80gb --world 16 --no-search
estimate unett
estimate cases:net --device no-such
bench cases:net --arm "two: train.batch_size=2"
bench segmentation_tiny train.seed=4
bench cases:no_case
plan unett
profile cases:net train.batch_size=4
profile cases:missing
replay broken --list
replay broken --list --json
replay broken
replay broken --json
replay masks
verify masks
verify broken
export masks --format no
data check project --task classification
data check project --task classification --json
report nothing
status nothing
selftest --list
"""
MEASURED = """
doctor
doctor --json
verify masks --json
evaluate masks
evaluate classes --json
export masks
export classes --format safetensors --json --out classes.st
predict masks --samples 2 --out predicted --json
report masks broken --format md --output report.md
report masks --json
bench cases:net --precisions fp32,bf16 --seeds 1
bench classification_tiny train.steps=6 num_workers=0 --precisions fp32,bf16 --seeds 1 --out benched --json
bench classification_tiny train.steps=6 num_workers=0 --configs --seeds 1 --out configs
profile cases:net --precision bf16 --seconds 8
profile classification_tiny num_workers=0 --precision bf16 --seconds 8 --json
plan cases:net --seconds 15 --json
plan classification_tiny num_workers=0 --seconds 20 --write planned.yaml --yes
selftest --only transaction
"""
FIRST = """
runs .
runs . --json
status masks
status masks --json
"""
EXCHANGED = (
    (re.compile(r"\b[0-9a-f]{64}\b|\b[0-9a-f]{40}\b|\b[0-9a-f]{16}\b|\b[0-9a-f]{12}\b"), "DIGEST"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?"), "DATE"),
    (re.compile(r"\b\d[\d,]*(\.\d+)? (ms|s|min|h)\b|\bnow\b(?= *│?$)", re.MULTILINE), "DURATION"),
    (re.compile(r"^\w+: \d+ of \d+ .* left\n", re.MULTILINE), ""),
    (re.compile(r"(limited by |limited_by\": \")[a-z ]+"), r"\1CAUSE"),
)
MEASUREMENTS = (
    (re.compile(r"-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"), "#"),
    (re.compile(r"[█▏▎▍▌▋▊▉▇▆▅▄▃▂▁─━╸╺┃│┄·]+"), "-"),
    (re.compile(r"(#[ ,x-]*){2,}"), "# "),
    (re.compile(r"\s+"), " "),
)


def prepare(folder: Path, environment: dict[str, str], workers: ThreadPoolExecutor) -> None:
    """Write the case, the project and the runs that the commands are given."""
    (folder / "cases.py").write_text(CASES)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    (folder / "deepspeed.json").write_text(DEEPSPEED)
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text(SCRIPT)
    (folder / "project" / "accelerate.yaml").write_text(ACCELERATE)
    trainings = [f"train {words} {COMMON} run.dir={name}" for name, words in RUNS.items()]
    list(workers.map(lambda line: run(line, folder, environment), trainings))


def run(line: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Return the exit code and the output of a command."""
    words = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line)]
    command = [sys.executable, "-m", "halfstep", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout, done.stderr


def exchange(text: str, folder: Path, measured: bool) -> str:
    """Return the text without what differs between two recordings of one commit."""
    for place in (str(folder.resolve()), str(folder)):
        text = text.replace(place, "FOLDER")
    for pattern, word in EXCHANGED + (MEASUREMENTS if measured else ()):
        text = pattern.sub(word, text)
    return text


def record(out: Path | None, only: str, jobs: int) -> dict[str, list[str]]:
    """Run all commands; return for each its exit code and the lines of its output."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="outputs-") as root:
        folder = Path(root)
        paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": paths}
        first, exact, measured = (
            [line for line in text.splitlines() if line and only in line] for text in (FIRST, EXACT, MEASURED)
        )

        def show(line: str) -> None:
            began = time.monotonic()
            code, out_text, errors = run(line, folder, environment)
            found[line] = [f"exit code {code}"]
            for name, text in (("output", out_text), ("errors", errors)):
                found[line] += [f"--- {name}", *exchange(text, folder, line not in exact).splitlines()]
            print(f"{time.monotonic() - began:6.1f} s  halfstep {line}", flush=True)
            if out:
                out.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")

        with ThreadPoolExecutor(jobs) as workers:
            prepare(folder, environment, workers)
            for line in first:  # they list the folder, in which others write
                show(line)
            list(workers.map(show, [*exact, *measured]))
    return found


def main() -> int:
    """Record, compare, or both."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path)
    asked.add_argument("--against", type=Path)
    asked.add_argument("--only", default="", metavar="TEXT", help="commands that contain this text")
    asked.add_argument("--jobs", type=int, default=2, help="commands that run at the same time")
    given = asked.parse_args()
    found = record(given.out, given.only, given.jobs)
    before = json.loads(given.against.read_text()) if given.against else found
    changed = [line for line, lines in found.items() if before.get(line) != lines]
    for line in changed:
        print(f"=== halfstep {line}")
        print(*unified_diff(before.get(line, []), found[line], "before", "now", lineterm="", n=1), sep="\n")
    print(f"commands={len(found)} same={len(found) - len(changed)} changed={len(changed)}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
