"""Whether a change that claims no numeric effect has none: digests of every tiny recipe's run, before and after.

    python benchmarks/same_numbers.py --out before.json      # at the commit before the change
    python benchmarks/same_numbers.py --against before.json  # at the commit after it
    python benchmarks/same_numbers.py --record               # keeps the digests next to this file
    python benchmarks/same_numbers.py --record --against benchmarks/same_numbers.json  # with another version of torch

Every tiny recipe is trained for a few steps in fp32 and in bf16 by the command, each in a process of its own, with
one thread; bf16 is emulated on a device without it. Digests are over values: the losses as the journal has them, the
weights, and all tensors of the last checkpoint, sorted by their bytes, so that a renamed key changes nothing and a
changed number does. Against a record of another version of torch, it also prints how far the losses are apart.
The tokens of text_tiny are the source files of the running Python: another version of it has other digests.
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
SETTINGS = ["train.steps=8", "run.pictures=1", "num_workers=0", "train.seed=3", "train.strict=true"]


def trained(recipe: str, precision: str, folder: Path) -> tuple[dict[str, str], list[float]]:
    """Train a recipe; return the digests of its losses, its weights and its last checkpoint, and the losses."""
    words = [sys.executable, "-m", "halfstep", "train", recipe, *SETTINGS, f"--{precision}", f"run.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{recipe} in {precision}: {done.stderr}")
    checkpoint = sorted((folder / "checkpoints").rglob("rank-00000.safetensors"))[-1]
    losses = _losses(folder / "journal.jsonl")
    digests = {
        "losses": _digest([json.dumps(loss).encode() for loss in losses]),
        "weights": _digest(_values(folder / "last.safetensors")),
        "state": _digest(_values(checkpoint)),
    }
    return digests, losses


def _losses(journal: Path) -> list[float]:
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event and "attempt" in event]


def _compare_losses(before: dict[str, list[float]], now: dict[str, list[float]]) -> dict[str, float]:
    """Return for each run the largest difference of a loss, as a share of that loss."""
    return {
        name: max(abs(new - old) / abs(old) for old, new in zip(before[name], losses, strict=True))
        for name, losses in now.items()
    }


def _layout(kept: dict[str, Any]) -> str:
    """Write it as JSON with each list of losses in one line."""
    text = json.dumps({**kept, "losses": {}}, indent=1)
    lines = [f"  {json.dumps(name)}: {json.dumps(losses)}" for name, losses in kept["losses"].items()]
    return text.replace('"losses": {}', '"losses": {\n' + ",\n".join(lines) + "\n }") + "\n"


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
    before = json.loads(given.against.read_text()) if given.against else None
    digests, losses = {}, {}
    with tempfile.TemporaryDirectory() as root:
        for recipe in RECIPES:
            for precision in ("fp32", "bf16"):
                name = f"{recipe} {precision}"
                digests[name], losses[name] = trained(recipe, precision, Path(root) / f"{recipe}-{precision}")
                print(name, *digests[name].values(), flush=True)
    command = " ".join(["python benchmarks/same_numbers.py", *sys.argv[1:]])
    kept: dict[str, Any] = {"command": command, "torch": torch.__version__, "digests": digests, "losses": losses}
    changed = [name for name, found in digests.items() if before and before["digests"].get(name) != found]
    if before and before["torch"] != torch.__version__:
        apart = _compare_losses(before["losses"], losses)
        kept["against"] = {"torch": before["torch"], "changed": changed, "largest_loss_difference": apart}
        print(
            *(f"{name}: losses within {most:.1e} of torch {before['torch']}" for name, most in apart.items()), sep="\n"
        )
    for place in filter(None, (given.out, HERE if given.record else None)):
        place.write_text(_layout(kept))
    print(f"runs={len(digests)} same={len(digests) - len(changed)} changed={len(changed)}", *changed)
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
