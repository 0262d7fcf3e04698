"""Perplexity of SmolLM2-135M on 100 documents next to transformers' own, and what its exports keep of its tokenizer.

    python benchmarks/text_base.py [--documents 100] [--out runs/text_base] [--record]

Needs `python -m benchmarks.sets sotu` and `python -m benchmarks.sets smollm2` once, and the extra `text`. Documents are
the first words of the addresses. Those of a split are in one window of the task; transformers' own loss is taken of one
document after the other: the end token, which begins it, its tokens and its end token. The exports are those of a run
of two updates with an adapter: the adapter, and the merged model. Runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import halfstep
from halfstep.data.layout import resolve_data_path
from halfstep.data.token_files import TOKENIZER, has_tokens, read_token_index
from halfstep.data.tokenizing import write_tokens
from halfstep.measure.conditions import collect_conditions, describe_conditions, describe_load_problem
from halfstep.runs.registry import find_task_class
from halfstep.tasks.models.text.tokenizer_files import read_base_files
from halfstep.tasks.text import Text

RECORD = Path(__file__).with_suffix(".json")
WORDS = 30
CLOSE = 1e-5
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who wrote the Federalist Papers?"}]


def read_texts(count: int) -> list[str]:
    """Return the beginnings of addresses, and further parts of them where there are not enough."""
    paths = sorted(path for path in resolve_data_path("cache:sotu").rglob("*.txt"))
    words = [path.read_text(encoding="utf-8").split() for path in paths]
    parts = (words[n % len(words)][WORDS * (n // len(words)) :][:WORDS] for n in range(count))
    return [" ".join(part) for part in parts]


def write_texts(place: Path, texts: list[str]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return place


def build_task(base: Path, tokens: Path, length: int) -> Text:
    kind = find_task_class("text")
    data = {"name": "tokens", "path": str(tokens), "length": length}
    task = kind(kind.schema.model_validate({"task": "text", "model": {"base": str(base)}, "data": data, "loss": {}}))
    assert isinstance(task, Text)
    return task


@torch.no_grad()
def perplexity(base: Path, texts: list[str], out: Path) -> dict[str, Any]:
    """Of the base, by the task on windows of packed documents, and by transformers on each document."""
    tokens = out / "documents"
    if not has_tokens(tokens):
        write_tokens([write_texts(out / "documents.jsonl", texts)], str(base), tokens, val=0.5)
    index = read_token_index(tokens)
    task = build_task(base, tokens, max(index.train.tokens, index.val.tokens))
    model = task.model().eval()
    total, count = 0.0, 0
    for split in ("train", "val"):
        source = task.source(split)
        for number in range(len(source)):
            batch = task.collate(split, [task.transform(split, source.read(number))])
            loss = task.loss(model, batch)
            total, count = total + float(loss.sum), count + int(loss.count)
    del model
    own = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(base)
    theirs, predicted = 0.0, 0
    for text in texts:
        row = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids, tokenizer.eos_token_id]])
        theirs += float(own(input_ids=row, labels=row).loss) * (row.shape[1] - 1)
        predicted += row.shape[1] - 1
    ours, reference = math.exp(total / count), math.exp(theirs / predicted)
    return {
        "documents": len(texts),
        "tokens": count,
        "tokens_by_transformers": predicted,
        "begins_with": [tokenizer.convert_ids_to_tokens(token) for token in index.begin or ()],
        "perplexity": ours,
        "perplexity_by_transformers": reference,
        "relative_difference": abs(ours / reference - 1.0),
    }


def exported(base: Path, texts: list[str], out: Path) -> dict[str, Any]:
    """What the exports of a run have of the base's tokenizer."""
    tokens, run = out / "few", out / "run"
    if not has_tokens(tokens):
        write_tokens([write_texts(out / "few.jsonl", texts[:20])], str(base), tokens, val=0.2)
    if not (run / "result.json").exists():
        settings = [f"model.base={base}", "model.base_format=fp32", "precision=fp32", f"data.path={tokens}"]
        settings += ["train.steps=2", "schedule.warmup_steps=1", "num_workers=0", f"run.dir={run}"]
        halfstep.fit("text_lora", settings=settings, quiet=True)
    before = AutoTokenizer.from_pretrained(base)
    own = {**read_base_files(base), TOKENIZER: (base / TOKENIZER).read_bytes()}
    found: dict[str, Any] = {}
    for name in ("adapter", "merged"):
        folder = out / name
        if not folder.exists():
            done = halfstep.export(run, folder, merge=name == "merged")
            (out / f"{name}.txt").write_text("\n".join(done.lines))
        after = AutoTokenizer.from_pretrained(folder)
        found[name] = {
            "said": (out / f"{name}.txt").read_text().replace(str(base), "BASE").splitlines(),
            "files_equal": {one: (folder / one).read_bytes() == content for one, content in own.items()},
            "ids": {
                one: [getattr(t, f"{one}_token_id") for t in (before, after)] for one in ("bos", "eos", "pad", "unk")
            },
            "text_equal": all(before(text).input_ids == after(text).input_ids for text in texts),
            "template_equal": before.chat_template == after.chat_template is not None,
            "chat_equal": before.apply_chat_template(CHAT) == after.apply_chat_template(CHAT),
            "chat": after.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/text_base"))
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    here = collect_conditions("cpu")
    base, texts = resolve_data_path("cache:smollm2"), read_texts(given.documents)
    report: dict[str, Any] = {"perplexity": perplexity(base, texts, given.out)}
    print(json.dumps(report["perplexity"], indent=1), flush=True)
    report["exports"] = exported(base, texts, given.out)
    print(json.dumps(report["exports"], indent=1), flush=True)
    print(describe_conditions(here), describe_load_problem(here))
    exports = report["exports"].values()
    kept = all(
        one["text_equal"] and one["template_equal"] and one["chat_equal"] and all(one["files_equal"].values())
        for one in exports
    ) and all(first == second for one in exports for first, second in one["ids"].values())
    good = report["perplexity"]["relative_difference"] <= CLOSE and kept
    print(f"good={good}")
    if given.record:
        command = f"python benchmarks/{RECORD.stem}.py --record"
        RECORD.write_text(json.dumps({"command": command, **report, "conditions": here}, indent=1) + "\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
