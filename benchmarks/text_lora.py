"""LoRA on SmolLM2-135M: perplexity, the base to the bit, bytes, checkpoint, and the merge, for bf16, int8 and nf4.

    python benchmarks/text_lora.py [--updates 60] [--formats bf16,int8,nf4] [--out runs/text_lora] [--record]

Needs `python -m benchmarks.sets sotu` and `python -m benchmarks.sets smollm2` once, and the extra `text`. The run is
`halfstep train text_lora` in bf16, emulated where the CPU has none; int8 and nf4 take a third of the updates. Every
base is compared with itself before the run, bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.data.layout import data_place
from halfstep.data.token_files import has_tokens
from halfstep.data.tokenizing import write_tokens
from halfstep.errors import HalfstepError
from halfstep.measure.conditions import busy, conditions, in_words
from halfstep.runs.finished import task_of
from halfstep.tasks.text import Text

RECORD = Path(__file__).with_suffix(".json")


def digest_of_base(model: Any) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            total.update(name.encode())
            total.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def trained(base: Path, folder: Path, out: Path, base_format: str, updates: int) -> dict[str, Any]:
    run = out / base_format
    settings = [
        *(f"model.base={base}", f"model.base_format={base_format}", f"data.path={folder}", f"train.steps={updates}"),
        *("train.strict=true", "precision=bf16", "num_workers=0", f"run.dir={run}"),
    ]
    if not (run / "result.json").exists():
        halfstep.fit("text_lora", settings=settings)
    task = task_of(run, None)
    assert isinstance(task, Text)
    fresh = task.model()
    before = digest_of_base(fresh)
    held_out = task._held_out_loss(fresh)
    loaded = halfstep.load(run)
    found = task._held_out_loss(loaded.model)
    trained_share = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    checkpoint = max((run / "checkpoints").iterdir())
    return {
        "base_format": base_format,
        "updates": updates,
        "base_untouched": digest_of_base(loaded.model) == before,
        "trained_parameters": trained_share,
        "trained_share": trained_share / 134_515_008,
        "perplexity_before": math.exp(held_out),
        "perplexity_after": math.exp(found),
        "falls_by": 1.0 - math.exp(found - held_out),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
        "seconds": json.loads((run / "result.json").read_text())["seconds"],
        "merge": merge(run, out / f"{base_format}-merged"),
    }


def merge(run: Path, out: Path) -> dict[str, Any]:
    if out.exists():
        return {"folder": str(out)}
    try:
        return {"lines": halfstep.export(run, out, merge=True).lines}
    except HalfstepError as refused:
        return {"refused": refused.given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--formats", default="bf16,int8,nf4")
    parser.add_argument("--out", type=Path, default=Path("runs/text_lora"))
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    here = conditions("cpu")
    base, folder = data_place("cache:smollm2"), given.out / "tokens"
    if not has_tokens(folder):
        write_tokens([data_place("cache:sotu")], str(base), folder)
    found = {}
    for name in given.formats.split(","):
        updates = given.updates if name == "bf16" else max(1, given.updates // 3)
        found[name] = trained(base, folder, given.out, name, updates)
        print(json.dumps(found[name], indent=1), flush=True)
    print(in_words(here), busy(here))
    if given.record:
        RECORD.write_text(json.dumps({"formats": found, "conditions": here}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
