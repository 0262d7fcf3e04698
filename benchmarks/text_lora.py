"""LoRA on SmolLM2-135M: perplexity, the base to the bit, memory, checkpoint, a kill and the merge; bf16, int8 and nf4.

    python benchmarks/text_lora.py [--updates 60] [--formats bf16,int8,nf4] [--out runs/text_lora] [--record]

Needs `python -m benchmarks.sets sotu` and `python -m benchmarks.sets smollm2` once, and the extra `text`. The run is
`halfstep train text_lora` in bf16, emulated where the CPU has none; int8 and nf4 take a third of the updates. Every
base is compared with itself before the run, bit by bit. The peak of a real second update, by the allocator's events, is
compared with the ledger of `halfstep estimate`. A run of `--killed` updates gets SIGKILL after half of them and is
started again; its weights are compared with those of the same run without a kill. Runs that are there are not repeated.
The perplexity counts the first token of each document, which begins with SmolLM2's end token: figures of runs before
documents had beginnings are over fewer tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.data.layout import resolve_data_path
from halfstep.data.token_files import has_tokens
from halfstep.data.tokenizing import write_tokens
from halfstep.errors import HalfstepError
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.measure.candidate import Candidate, measure_update_peak
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.runs.finished import load_saved_task
from halfstep.runs.recipe_case import build_recipe_case
from halfstep.tasks.text import Text

RECORD = Path(__file__).with_suffix(".json")
FIT = "import sys, halfstep; halfstep.fit('text_lora', settings=sys.argv[1:], quiet=True)"


def digest_of_base(model: Any) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            total.update(name.encode())
            total.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def settings(base: Path, folder: Path, base_format: str, updates: int) -> list[str]:
    return [
        *(f"model.base={base}", f"model.base_format={base_format}", f"data.path={folder}", f"train.steps={updates}"),
        *("train.strict=true", "precision=bf16", "num_workers=0", f"schedule.warmup_steps={min(5, updates // 2)}"),
    ]


def trained(given: list[str], run: Path, base_format: str, updates: int) -> dict[str, Any]:
    if not (run / "result.json").exists():
        halfstep.fit("text_lora", settings=[*given, f"run.dir={run}"])
    task = load_saved_task(run, None)
    assert isinstance(task, Text)
    before = digest_of_base(task.model())
    loaded = halfstep.load(run)
    many = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    checkpoint = max((run / "checkpoints").iterdir())
    merge = merged(run, run.with_name(f"{base_format}-merged"))
    return {
        "base_format": base_format,
        "updates": updates,
        "base_untouched": digest_of_base(loaded.model) == before,
        "trained_parameters": many,
        "trained_share": many / 134_515_008,
        "perplexity_before": math.exp(merge["loss"]["base"]),
        "perplexity_after": math.exp(merge["loss"]["adapter"]),
        "falls_by": 1.0 - math.exp(merge["loss"]["adapter"] - merge["loss"]["base"]),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
        "seconds": json.loads((run / "result.json").read_text())["seconds"],
        "merge": merge,
    }


def memory(given: list[str]) -> dict[str, Any]:
    """The peak of a real second update, and what the ledger of the same says."""
    predicted = halfstep.estimate("text_lora", settings=given)
    case = build_recipe_case("text_lora", given)
    candidate = Candidate(case, case.setting, "cpu", observe=False)
    # The scales of a quantized base are attributes of its parameters.
    scales = [getattr(p, "quant_state", None) or getattr(p, "SCB", None) for p in candidate.model.parameters()]
    held = [scale if isinstance(scale, torch.Tensor) else scale.absmax for scale in scales if scale is not None]
    measured = measure_update_peak(candidate) + sum(scale.nbytes for scale in held)
    return {"predicted": predicted.peak, "measured": measured, "error": predicted.peak / measured - 1.0}


def killed(given: list[str], out: Path) -> dict[str, Any]:
    """A run that gets SIGKILL in the middle and goes on, next to the same one without."""
    whole, broken = out / "whole", out / "broken"
    steps = int(next(word for word in given if word.startswith("train.steps=")).partition("=")[2])
    for run in (whole, broken):
        command = [sys.executable, "-c", FIT, *given, f"run.dir={run}", "checkpoint.every_steps=2"]
        if run is broken and not (run / "result.json").exists():
            process = subprocess.Popen(command)
            while process.poll() is None and applied(run) < steps // 2:
                time.sleep(0.2)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if not (run / "result.json").exists():
            subprocess.run(command, check=True)
    at = [event["attempt"] for event in read_events(broken / JOURNAL) if event["event"] == "step"]
    same = (whole / "last.safetensors").read_bytes() == (broken / "last.safetensors").read_bytes()
    return {"updates": steps, "steps_in_the_journal": len(at), "same_weights": same}


def applied(run: Path) -> int:
    journal = run / JOURNAL
    return sum(event["event"] == "step" for event in read_events(journal)) if journal.exists() else 0


def merged(run: Path, out: Path) -> dict[str, Any]:
    """Merge, or be refused; the held-out losses as `halfstep export --merge` prints them."""
    record = out.with_suffix(".json")
    if not record.exists():
        try:
            said, refused = " ".join(halfstep.export(run, out, merge=True).lines), False
        except HalfstepError as error:
            said, refused = error.given, True
        losses = re.findall(r"\d+\.\d+", said[said.index("held-out loss:") :])
        loss = dict(zip(("base", "adapter", "merged"), map(float, losses), strict=True))
        changed = math.exp(loss["merged"] - loss["adapter"]) - 1.0
        record.write_text(
            json.dumps({"said": said, "refused": refused, "loss": loss, "perplexity_changes_by": changed})
        )
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--formats", default="bf16,int8,nf4")
    parser.add_argument("--killed", type=int, default=8, help="updates of the run that is killed; 0: no such run")
    parser.add_argument("--out", type=Path, default=Path("runs/text_lora"))
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    here = collect_conditions("cpu")
    base, folder = resolve_data_path("cache:smollm2"), given.out / "tokens"
    if not has_tokens(folder):
        # One address is held out: an evaluation takes minutes where bf16 is emulated.
        write_tokens([resolve_data_path("cache:sotu")], str(base), folder, val=0.005)
    found = {}
    for name in given.formats.split(","):
        updates = given.updates if name == "bf16" else max(1, given.updates // 3)
        long, short = (settings(base, folder, name, many) for many in (updates, given.killed))
        found[name] = {
            **trained(long, given.out / name, name, updates),
            "memory": memory(long),
            **({"killed": killed(short, given.out / f"{name}-killed")} if given.killed else {}),
        }
        print(json.dumps(found[name], indent=1), flush=True)
    print(describe_conditions(here), describe_load_problem(here))
    if given.record:
        before = json.loads(RECORD.read_text())["formats"] if RECORD.exists() else {}
        report = {"command": f"python benchmarks/{RECORD.stem}.py --record", "formats": {**before, **found}}
        RECORD.write_text(json.dumps({**report, "conditions": here}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
