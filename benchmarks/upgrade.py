"""Whether a run of an earlier halfstep goes on with this one: to the bit on its own torch; on another, it loads.

    python benchmarks/upgrade.py --old ../halfstep-0.1.0 --old-python ../halfstep-0.1.0/.venv/bin/python [--record]

`--old` is a checkout of the earlier version; `--old-python` is a Python with the torch that its runs were made with.
Each tiny recipe is trained by the earlier version, whole, and once more with SIGKILL after half of its steps. A copy
of the killed run goes on with this version on the earlier torch: its last weights and losses are compared with those
of the whole run by digest. Another copy goes on with this version on the torch of the running Python: it must end, and
its losses are compared with those of the whole run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
RECIPES = ("classification_tiny", "diffusion_tiny", "segmentation_tiny", "slots_tiny", "text_tiny")
STEPS = 8
SETTINGS = [f"train.steps={STEPS}", "run.pictures=1", "num_workers=0", "train.seed=3", "train.strict=true"]
SETTINGS += ["checkpoint.every_steps=2", "checkpoint.keep=10"]
TIMEOUT = 900


@dataclass(frozen=True)
class Continued:
    """A killed run of the earlier version, continued by this one."""

    resumed_at: int
    same_bits: bool
    """On the torch that wrote the checkpoint: last weights and losses as in the run without a kill."""
    largest_loss_difference: float
    """On the torch of the running Python, as a share of the loss."""


class Version:
    """A checkout with the Python that runs it."""

    def __init__(self, checkout: Path, python: str) -> None:
        self.checkout, self.python = checkout.resolve(), python

    def train(self, recipe: str, precision: str, run: Path) -> subprocess.Popen[str]:
        """Start a training run, or continue the one in the folder."""
        words = [self.python, "-m", "halfstep", "train", recipe, *SETTINGS, f"--{precision}", f"run.dir={run}"]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.checkout / "src")}
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def read_torch_version(self) -> str:
        """Return the version of torch of this Python."""
        asked = [self.python, "-c", "import torch; print(torch.__version__)"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def finish(process: subprocess.Popen[str], what: str) -> None:
    """Wait for a run; stop with its output if it failed."""
    said, _ = process.communicate(timeout=TIMEOUT)
    if process.returncode:
        raise SystemExit(f"{what} ended with {process.returncode}:\n{said[-3000:]}")


def read_losses(run: Path) -> dict[int, float]:
    """Return the loss of each attempt; of one that was run twice, the later one."""
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:  # the line that SIGKILL interrupted
            continue
    return {event["attempt"]: event["loss"] for event in events if event.get("event") == "step"}


def kill_at_half(process: subprocess.Popen[str], run: Path) -> None:
    """Send SIGKILL once a checkpoint of half of the steps is there."""
    until = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < until:
        if len(read_losses(run)) > STEPS // 2:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    process.communicate()
    if (run / "result.json").exists():
        raise SystemExit(f"{run.name} ended before it was killed; run it again")


def digest(run: Path) -> str:
    """Return a digest of the last weights and of all losses."""
    whole = hashlib.sha256((run / "last.safetensors").read_bytes())
    whole.update(json.dumps(sorted(read_losses(run).items())).encode())
    return whole.hexdigest()[:16]


def continue_run(old: Version, new: Version, here: Version, recipe: str, precision: str, folder: Path) -> Continued:
    """Train, kill and continue one recipe."""
    whole, killed = folder / "whole", folder / "killed"
    finish(old.train(recipe, precision, whole), f"{recipe} {precision} by the earlier version")
    kill_at_half(old.train(recipe, precision, killed), killed)
    resumed_at = max(int(re.findall(r"\d+", path.name)[0]) for path in (killed / "checkpoints").iterdir())
    ends = {}
    for name, version in (("same torch", new), ("other torch", here)):
        run = folder / name.replace(" ", "-")
        shutil.copytree(killed, run)
        finish(version.train(recipe, precision, run), f"{recipe} {precision} continued on the {name}")
        ends[name] = run
    before, after = read_losses(whole), read_losses(ends["other torch"])
    largest = max(abs(after[attempt] - loss) / abs(loss) for attempt, loss in before.items())
    return Continued(resumed_at, digest(whole) == digest(ends["same torch"]), largest)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--old", type=Path, required=True, help="a checkout of the earlier version")
    asked.add_argument("--old-python", required=True, help="a Python with the torch of its runs")
    asked.add_argument("--recipes", nargs="+", default=list(RECIPES))
    asked.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    asked.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = asked.parse_args()
    old, new = Version(given.old, given.old_python), Version(ROOT, given.old_python)
    here = Version(ROOT, sys.executable)
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for recipe in given.recipes:
            for precision in given.precisions:
                name = f"{recipe} {precision}"
                folder = Path(root) / name.replace(" ", "-")
                found[name] = continue_run(old, new, here, recipe, precision, folder)
                one, bits = found[name], "same" if found[name].same_bits else "OTHER"
                apart = f"losses within {one.largest_loss_difference:.1e}"
                print(f"{name}: resumed at step {one.resumed_at}; same torch: {bits} bits; other: {apart}", flush=True)
    torches = {"old": new.read_torch_version(), "new": here.read_torch_version()}
    if given.record:
        # Of the recipes that were left out, the record stays.
        before = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else {}
        kept = {
            "command": "python benchmarks/upgrade.py --old 0.1.0 --old-python PYTHON_OF_0.1.0 --record",
            "torch": torches,
            "runs": {**before, **{name: asdict(one) for name, one in found.items()}},
        }
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    same = sum(one.same_bits for one in found.values())
    print(f"upgrade runs={len(found)} same_bits={same} loaded={len(found)} torch={torches['old']}->{torches['new']}")
    return int(same < len(found))


if __name__ == "__main__":
    sys.exit(main())
