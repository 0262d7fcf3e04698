"""Twelve dtype mistakes of real scripts with adapters: each is refused, reported or fixed by name on every way in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("peft")

import peft
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Trainer, TrainingArguments

from halfstep.adapters.transformers import HalfstepMixin
from halfstep.errors import HalfstepError, PrecisionNotObserved
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.stepper import Stepper
from halfstep.step.storage.stored_formats import BASE, HEAD, TABLES, TRAINED, WIDENED
from halfstep.tasks.models.text.model import LanguageModel
from halfstep.tasks.text import Text
from halfstep.train.setup import build_training_parts
from tests.tasks.made import made

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
FIXED = "fixed"


def config(tied: bool = False) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaConfig(vocab_size=64, tie_word_embeddings=tied, use_cache=False, **sizes, **ends)


def base(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(tied), dtype=dtype)


def lora(model: Any, wide: bool = True, **settings: Any) -> Any:
    targets = ["q_proj", "v_proj"]
    adapter = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(model, adapter, autocast_adapter_dtype=wide)


def quantized(folder: Path) -> Any:
    pytest.importorskip("bitsandbytes")
    base(torch.float32).save_pretrained(folder)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=how)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On CPUs with AVX512-BF16, bitsandbytes packs frozen weights in place in eval(), and whole blocks only.
            module.support_avx512bf16_for_cpu = False
    return model


def prepared(folder: Path) -> Any:
    """peft's preparation of a quantized base, which widens head, embedding and norms."""
    return lora(peft.prepare_model_for_kbit_training(quantized(folder), use_gradient_checkpointing=False))


def cast_by_trl(folder: Path) -> Any:
    model = lora(quantized(folder))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def head_cast(_: Path) -> Any:
    model = base(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().float())
    return lora(model)


Made = Callable[[Path], Any]
# name: (the model, its precision, and what comes of it in a Stepper, in the mixin and in a run)
MISTAKES: dict[str, tuple[Made, str, tuple[str, str, str]]] = {
    "adapters in the base's fp16": (lambda _: lora(base(torch.float16), False), "fp16", (TRAINED, FIXED, TRAINED)),
    "adapters in the base's bf16": (lambda _: lora(base(), False), "bf16", (TRAINED, FIXED, TRAINED)),
    "modules_to_save in bf16": (lambda _: lora(base(), modules_to_save=["lm_head"]), "bf16", (TRAINED, FIXED, TRAINED)),
    "embedding and head to save": (
        lambda _: lora(base(), modules_to_save=["embed_tokens", "lm_head"]), "bf16", (TRAINED, FIXED, TRAINED),
    ),
    "half() after the adapter": (lambda _: lora(base(torch.float32)).half(), "fp16", (TRAINED, TABLES, TRAINED)),
    "all weights in the file's bf16": (lambda _: base(), "bf16", (TRAINED, TRAINED, TRAINED)),
    "fp16 base in a bf16 run": (lambda _: lora(base(torch.float16)), "bf16", (BASE, BASE, BASE)),
    "bf16 base in an fp16 run": (lambda _: lora(base()), "fp16", (BASE, BASE, BASE)),
    "bf16 base in an fp32 run": (
        lambda _: lora(base()), "fp32", (PrecisionNotObserved.id, PrecisionNotObserved.id, FIXED),
    ),
    "k-bit preparation": (prepared, "bf16", (WIDENED, WIDENED, WIDENED)),
    "adapters cast by TRL": (cast_by_trl, "bf16", (TRAINED, FIXED, TRAINED)),
    "rotary tables cast": (lambda _: lora(base(torch.float32).to(torch.bfloat16)), "bf16", (TABLES, TABLES, TABLES)),
    "tied head cast alone": (head_cast, "bf16", (HEAD, HEAD, HEAD)),
}  # fmt: skip


def next_token(model: Any, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=rows, labels=rows).loss
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def by_stepper(model: Any, precision: str, _: Path) -> list[str]:
    stepper = Stepper(model, optimizer_of(model), precision=resolve_precision_name(precision))
    assert stepper.step(next_token, ROWS).applied
    return [finding.id for finding in stepper.findings]


class Ours(HalfstepMixin, Trainer):
    """The Trainer of transformers, with halfstep."""


def arguments(folder: Path, precision: str, **more: Any) -> dict[str, Any]:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_steps": 2}
    formats = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    return {"output_dir": str(folder / "out"), "per_device_train_batch_size": 2, **quiet, **formats, **more}


def by_mixin(model: Any, precision: str, folder: Path) -> list[str]:
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = Ours(model, TrainingArguments(**arguments(folder, precision)), train_dataset=rows)
    trainer.train()
    assert trainer.hosted is not None
    assert trainer.hosted.stepper.counts.attempted == 2
    return [finding.id for finding in trainer.hosted.stepper.findings]


def by_run(model: Any, precision: str, _: Path) -> list[str]:
    class Own(Text):
        def model(self) -> nn.Module:
            return LanguageModel(model)

    task = made("text", data={"vocabulary": 512})
    own = Own(task.recipe.model_copy(update={"precision": precision}))
    own._vocabulary, own._end = 60, 0
    strict = own.recipe.train.model_copy(update={"strict": True, "check": False})
    recipe = own.recipe.model_copy(update={"train": strict})
    parts = build_training_parts(own, recipe, torch.device("cpu"), total=1, per_epoch=1)
    tokens = own.collate("train", [own.transform("train", {"tokens": row}) for row in ROWS])
    assert parts.stepper.step(own.loss, tokens).finite is not None
    return [finding.id for finding in parts.stepper.findings]


WAYS = (by_stepper, by_mixin, by_run)


SHORT = ("modules_to_save in bf16", "fp16 base in a bf16 run", "bf16 base in an fp32 run")
CASES = [
    pytest.param(name, way, marks=() if way == 0 or name in SHORT else pytest.mark.full, id=f"{name}-{ways}")
    for name in MISTAKES
    for way, ways in enumerate(("stepper", "mixin", "run"))
]


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.wording
def test_a_mistake_is_refused_reported_or_fixed_by_name(name: str, way: int, tmp_path: Path) -> None:
    make, precision, expected = MISTAKES[name]
    model = make(tmp_path)
    narrow = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4]
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    refused, found = None, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = WAYS[way](model, precision, tmp_path)
        except HalfstepError as error:
            refused = error
    if refused is not None:
        assert refused.id == expected[way], refused
        assert not narrow or narrow[0] in str(refused)
        assert "model.float()" not in refused.do or refused.id != TRAINED or not frozen
        return
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32}
    if expected[way] == FIXED:
        assert not set(found) & {TRAINED, TABLES, BASE, WIDENED, HEAD}
        assert not narrow or any(TRAINED in str(one.message) and narrow[0] in str(one.message) for one in said)
    else:
        assert expected[way] in found
    if precision != "fp32":
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


HEALTHY: dict[str, tuple[Made, str]] = {
    "lora on bf16": (lambda _: lora(base()), "bf16"),
    "lora on fp16": (lambda _: lora(base(torch.float16)), "fp16"),
    "lora on fp32": (lambda _: lora(base(torch.float32)), "bf16"),
    "lora on fp32 in fp32": (lambda _: lora(base(torch.float32, tied=True)), "fp32"),
    "lora on nf4": (lambda folder: lora(quantized(folder)), "bf16"),
    "all weights": (lambda _: base(torch.float32, tied=True), "bf16"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_finding(name: str, tmp_path: Path) -> None:
    make, precision = HEALTHY[name]
    assert not {one for one in by_stepper(make(tmp_path), precision, tmp_path) if one.startswith("stored.")}


def test_a_frozen_encoder_next_to_a_trained_head_is_healthy() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "head": nn.Linear(8, 2)})
    model["encoder"].half().requires_grad_(False)
    stepper = Stepper(model, optimizer_of(model), precision=resolve_precision_name("bf16"))
    stepper.step(lambda m, x: m["head"](m["encoder"](x)).float().square().mean(), torch.randn(4, 8))
    assert not [one for one in stepper.findings if one.id.startswith("stored.")]


# -- other libraries --------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_accelerate_refuses_by_name() -> None:
    import halfstep
    from zoo.real_accelerate import fresh_accelerator

    accelerator = fresh_accelerator("bf16")
    model = lora(base(), modules_to_save=["lm_head"])
    optimizer = optimizer_of(model)
    with pytest.raises(HalfstepError, match=r"lm_head\.modules_to_save") as refused:
        halfstep.from_accelerate(accelerator, *accelerator.prepare(model, optimizer))
    assert refused.value.id == TRAINED
    exec(refused.value.do.partition(" before ")[0], {"model": model})
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    stepper = halfstep.from_accelerate(accelerator, model, optimizer)
    assert stepper.step(next_token, ROWS).applied
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.wording
def test_lightning_refuses_by_name() -> None:
    lightning = pytest.importorskip("lightning")
    from halfstep.adapters.lightning import HalfstepPrecision

    class Tuned(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
            return next_token(self.model, rows)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    def fit(model: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        plugin = HalfstepPrecision("bf16")
        trainer = lightning.Trainer(
            max_steps=2, accelerator="cpu", plugins=[plugin], callbacks=[plugin.callback], **quiet
        )
        trainer.fit(Tuned(model), torch.utils.data.DataLoader(ROWS, batch_size=2))
        return plugin

    with pytest.raises(HalfstepError, match=r"lm_head\.modules_to_save") as refused:
        fit(lora(base(), modules_to_save=["lm_head"]))
    assert refused.value.id == TRAINED
    assert fit(lora(base())).hosted.stepper.counts.applied == 2


def test_sft_in_five_lines(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class SafeSFTTrainer(HalfstepMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        """TRL's trainer, with halfstep."""

    rows = datasets.Dataset.from_dict({"input_ids": ROWS.tolist(), "labels": ROWS.tolist()})
    given = trl.SFTConfig(**arguments(tmp_path, "bf16", gradient_checkpointing=False, dataset_num_proc=None))
    model = quantized(tmp_path / "base")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SafeSFTTrainer(model, args=given, train_dataset=rows, peft_config=adapter, processing_class=tokenizer())
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    assert trainer.hosted.stepper.counts.applied == 2


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(64)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", bos_token="w0")
