"""Losses of packed documents in many architectures of transformers, next to transformers' own loss.

    python benchmarks/text_architectures.py [--only NAME] [--record]

Each architecture is built with tiny random weights, saved, and loaded as a base. An accepted one has the loss of
transformers for a document alone and packed behind another one, and what the other one says does not reach it: its
gradient there is exactly 0. Others are refused by an error of halfstep with a reason. The exit code is 1 if an
accepted loss is more than 1e-6 (relative) from transformers' own, if anything leaks, or for any other error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from halfstep.errors import HalfstepError
from halfstep.runs.registry import find_task_class
from halfstep.tasks.models.text import building
from halfstep.tasks.models.text.model import IGNORED, LanguageModel, check_document_separation
from halfstep.tasks.models.text.tokenizer_files import pack_file
from halfstep.tasks.text import Text

RECORD = Path(__file__).with_suffix(".json")
CLOSE = 1e-6
VOCABULARY, END, LENGTH = 1024, 2, 48
ENDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": END}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**ENDS, **SIZES, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512}
GPT2 = {**ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
NEAR, HEAD, EXPERTS = {"sliding_window": 16}, {"head_dim": 8}, {"moe_intermediate_size": 16}
LINEAR = {
    **{f"linear_num_{one}_heads": 2 for one in ("key", "value")},
    **{f"linear_{one}_head_dim": 8 for one in ("key", "value")},
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16, **EXPERTS}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: LLAMA for name in ("llama", "qwen2", "phi", "gpt_neox", "olmo2", "stablelm", "cohere", "granite")},
    **{name: {**LLAMA, **NEAR} for name in ("mistral", "starcoder2")},
    **{name: {**LLAMA, **NEAR, **HEAD} for name in ("gemma2", "gemma3_text")},
    **{name: {**LLAMA, **HEAD} for name in ("gemma", "qwen3")},
    "phi3": {**LLAMA, **NEAR, "pad_token_id": 0},
    "smollm3": {**LLAMA, "pad_token_id": 0},
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "gpt_oss": {**LLAMA, **NEAR, **HEAD, "num_local_experts": 4},
    "qwen2_moe": {**LLAMA, **SHARED},
    "deepseek_v3": {
        **LLAMA, "num_key_value_heads": 4, **LATENT, **EXPERTS, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "opt": {**ENDS, **SIZES, "ffn_dim": 64, "max_position_embeddings": 512, "word_embed_proj_dim": 32},
    "gpt_neo": {
        **ENDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 512, "window_size": 16,
    },
    "mpt": {**ENDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "falcon": {**ENDS, **SIZES, "max_position_embeddings": 512},
    "bloom": {**ENDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {**ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        **ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1
    },
    "rwkv": {**ENDS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    "recurrent_gemma": {
        **ENDS, **SIZES, **HEAD, "num_hidden_layers": 3, "intermediate_size": 64, "lru_width": 32,
        "attention_window_size": 16,
    },
    "falcon_h1": {**LLAMA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "lfm2": {**LLAMA, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**LLAMA, **HEAD, **SHARED, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        **LLAMA, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "gemma3": {
        "text_config": {**LLAMA, **NEAR, **HEAD}, "vision_config": {**VISION, "image_size": 28, "patch_size": 14}
    },
}  # fmt: skip


@dataclass
class Outcome:
    """What became of an architecture: relative differences of the losses, and the gradient across documents."""

    outcome: str
    reason: str = ""
    alone: float = 0.0
    packed: float = 0.0
    leak: float = 0.0


def save(name: str, folder: Path) -> None:
    """Save a model of this architecture with random weights that make large differences."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **CONFIGS[name])
    multimodal = config.get_text_config() is not config
    model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    model.save_pretrained(folder)


def build_task() -> Text:
    """Return a task in which a document begins with the end token of the document before it."""
    kind = find_task_class("text")
    task = kind(kind.schema.model_validate({"task": "text", **kind.tiny}))
    assert isinstance(task, Text)
    tokenizer = pack_file(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode())
    facts = {"config": {}, "tokenizer": tokenizer, "tokens_per_byte": {}}
    task.remember({**facts, "begin": [END], "end": END, "vocabulary": VOCABULARY})
    return task


def transform(task: Text, rows: Tensor) -> dict[str, Tensor]:
    return task.collate("train", [task.transform("train", {"tokens": row}) for row in rows])


def examine(folder: Path, task: Text) -> Outcome:
    try:
        language = building.load_base(str(folder), False, dtype=torch.float32)
        language.config.use_cache = False
        model = LanguageModel(language)
        check_document_separation(model, VOCABULARY, END)
    except HalfstepError as error:
        return Outcome("refused", error.given.replace(f"{folder}", folder.name))
    model.eval()
    draw = torch.Generator().manual_seed(1)
    first, second = (torch.randint(3, VOCABULARY, (1, LENGTH), generator=draw) for _ in range(2))
    end = torch.full((1, 1), END)
    alone, packed = torch.cat([end, second, end], 1), torch.cat([end, first, end, second, end], 1)
    with torch.no_grad():
        own = language(input_ids=alone, labels=alone, use_cache=False).loss * (LENGTH + 1)
        mine = task.loss(model, transform(task, alone)).sum
        batch = transform(task, packed)
        batch["targets"][:, : LENGTH + 1] = IGNORED
        behind = task.loss(model, batch).sum
    seen: list[Tensor] = []
    hook = model.inner.get_input_embeddings().register_forward_hook(lambda _m, _i, out: _keep(seen, out))
    hidden = model.hidden(batch["tokens"], batch["positions"])
    hook.remove()
    [reached] = torch.autograd.grad(hidden[0, LENGTH + 1 :].float().sum(), seen)
    apart = [abs(float(loss / own) - 1.0) for loss in (mine, behind)]
    return Outcome("accepted", "", *apart, float(reached[0, : LENGTH + 1].abs().max()))


def _keep(seen: list[Tensor], out: Tensor) -> Tensor:
    out = out.detach().requires_grad_(True)
    seen.append(out)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONFIGS)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task, found = build_task(), dict[str, Outcome]()
    with tempfile.TemporaryDirectory() as root:
        for name in [given.only] if given.only else sorted(CONFIGS):
            save(name, Path(root) / name)
            try:
                found[name] = examine(Path(root) / name, task)
            except Exception as error:  # what this benchmark looks for
                found[name] = Outcome("failed", f"{type(error).__name__}: {error}")
            one = found[name]
            numbers = f"alone {one.alone:.1e} packed {one.packed:.1e} leak {one.leak:g}"
            print(f"{name:16} {one.outcome:9}", one.reason[:160] or numbers, flush=True)
    accepted = [one for one in found.values() if one.outcome == "accepted"]
    farthest = max((one for each in accepted for one in (each.alone, each.packed)), default=0.0)
    counts = {word: sum(one.outcome == word for one in found.values()) for word in ("accepted", "refused", "failed")}
    good = farthest <= CLOSE and not counts["failed"] and all(one.leak == 0 for one in accepted)
    print(*(f"{word}={count}" for word, count in counts.items()), f"farthest={farthest:.1e} good={good}")
    if given.record:
        report = {"command": f"python benchmarks/{RECORD.stem}.py --record", "transformers": transformers.__version__}
        outcomes = {name: asdict(one) for name, one in found.items()}
        report |= {"torch": torch.__version__, **counts, "farthest": farthest, "architectures": outcomes}
        RECORD.write_text(json.dumps(report, indent=1) + "\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
