"""Whether a change that claims no numeric effect has none: digests of every tiny recipe's run, before and after.

    python benchmarks/same_numbers.py --out before.json      # at the commit before the change
    python benchmarks/same_numbers.py --against before.json  # at the commit after it
    python benchmarks/same_numbers.py --record               # keeps the digests next to this file

Every tiny recipe is trained for a few steps in fp32 and in bf16 by the command, each in a process of its own, with
one thread. Digests are over values: the losses as the journal has them, the weights, and all tensors of the last
checkpoint, sorted by their bytes, so that a renamed key changes nothing and a changed number does. The tokens of
text_tiny are the source files of the running Python: another version of it has other digests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).with_suffix(".json")
RECIPES = ("classification_tiny", "diffusion_tiny", "segmentation_tiny", "slots_tiny", "text_tiny")
SETTINGS = ["train.steps=8", "run.pictures=1", "num_workers=0", "train.seed=3"]


def trained(recipe: str, precision: str, folder: Path) -> dict[str, str]:
    """Train a recipe, and return the digests of its losses, its weights and its last checkpoint."""
    words = [sys.executable, "-m", "halfstep", "train", recipe, *SETTINGS, f"--{precision}", f"run.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{recipe} in {precision}: {done.stderr}")
    checkpoint = sorted((folder / "checkpoints").rglob("rank-00000.safetensors"))[-1]
    return {
        "losses": _digest([json.dumps(loss).encode() for loss in _losses(folder / "journal.jsonl")]),
        "weights": _digest(_values(folder / "last.safetensors")),
        "state": _digest(_values(checkpoint)),
    }


def _losses(journal: Path) -> list[float]:
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event and "attempt" in event]


def _values(file: Path) -> list[bytes]:
    return sorted(_bytes(tensor) for tensor in load_file(file).values())


def _bytes(tensor: torch.Tensor) -> bytes:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + raw).digest()


def _digest(parts: list[bytes]) -> str:
    if not parts:
        raise SystemExit("nothing to compare")
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path)
    asked.add_argument("--against", type=Path)
    asked.add_argument("--record", action="store_true")
    given = asked.parse_args()
    digests: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for recipe in RECIPES:
            for precision in ("fp32", "bf16"):
                digests[f"{recipe} {precision}"] = trained(recipe, precision, Path(root) / f"{recipe}-{precision}")
                print(f"{recipe} {precision}", *digests[f"{recipe} {precision}"].values())
    command = " ".join(["python benchmarks/same_numbers.py", *sys.argv[1:]])
    kept = {"command": command, "torch": torch.__version__, "digests": digests}
    for place in filter(None, (given.out, HERE if given.record else None)):
        place.write_text(json.dumps(kept, indent=1) + "\n")
    before = json.loads(given.against.read_text())["digests"] if given.against else digests
    changed = [name for name, found in digests.items() if before.get(name) != found]
    print(f"runs={len(digests)} same={len(digests) - len(changed)} changed={len(changed)}", *changed)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
