"""A language model: its loss is transformers' own, documents stay apart, and what it writes can be read elsewhere."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import halfstep
from halfstep.cli.main import build
from halfstep.errors import BadData, BadRecipe, WrongUse
from halfstep.precision.island import island
from halfstep.precision.precision import resolve_precision_name
from halfstep.runs.evaluate_run import evaluate
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.loss import Counted
from halfstep.step.stepper import Stepper
from halfstep.tasks.models.text.model import (
    IGNORED,
    LanguageModel,
    build_attention_mask,
    check_document_separation,
    compare_logits,
    compute_summed_loss,
)
from halfstep.tasks.text import Text, TextMetric
from tests.tasks.made import batch_of, made

TYPES = {
    "llama": {},
    "shared keys": {"kv_heads": 1},
    "untied": {"tied": False},
    "qwen3": {"type": "qwen3"},
    "gpt2": {"type": "gpt2"},
}


def text(**model: Any) -> Text:
    task = made("text", model=model)
    assert isinstance(task, Text)
    return task


def batch_from(tokens: list[list[int]], task: Text) -> dict[str, Tensor]:
    return task.collate("train", [task.transform("train", {"tokens": torch.tensor(one)}) for one in tokens])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", TYPES)
def test_the_loss_and_its_gradients_are_those_of_transformers(kind: str) -> None:
    task = text(**TYPES[kind])
    model, batch = task.model(), batch_from(torch.randint(1, 500, (3, 32)).tolist(), task)
    ours = task.loss(model, batch)
    assert isinstance(ours, Counted)
    assert int(ours.count) == 3 * 31
    mine = gradients(model, ours.sum / ours.count)
    # Whole rows: transformers shifts the labels by itself, once.
    rows = torch.cat([batch["tokens"], batch["targets"][:, -1:]], 1)
    theirs = model.language(input_ids=rows, labels=rows).loss
    assert (ours.sum / ours.count).item() == pytest.approx(theirs.item(), rel=1e-6)
    for name, gradient in gradients(model, theirs).items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_chunks_change_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 50, bias=False), torch.randn(3, 7, 16, requires_grad=True)
    targets = torch.randint(0, 50, (3, 7))
    targets[1] = IGNORED
    found = []
    for most in (10**9, 50 * 4, 50, 1):
        loss = compute_summed_loss(hidden, targets, head, 50, most)
        found.append((loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight])))
    for other in found[1:]:
        for mine, whole in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, whole)


def test_logits_do_not_decide_the_peak() -> None:
    """Of 64 chunks, the logits of one are kept at a time: the saved tensors have none of them."""
    head, hidden = nn.Linear(8, 1024, bias=False), torch.randn(1, 256, 8, requires_grad=True)
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    for most, bound in ((1024 * 256, 1024 * 256), (1024 * 4, 1024 * 8)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            compute_summed_loss(hidden, torch.zeros(1, 256, dtype=torch.int64), head, 1024, most)
        assert (max(saved) >= bound) == (most >= 1024 * 256)


def test_the_loss_is_in_fp32_under_autocast() -> None:
    task = text()
    model, batch = task.model(), batch_of(task, "train")
    with resolve_precision_name("bf16").autocast(torch.device("cpu")):
        loss = task.loss(model, batch)
    assert loss.sum.dtype is torch.float32


def test_norms_head_and_embedding_can_be_islands() -> None:
    task = text()
    model = task.model()
    island(model, "language.model.norm", "language.lm_head", "language.model.embed_tokens")
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision=resolve_precision_name("bf16"))
    batch = batch_of(task, "train")
    losses = [stepper.step(task.loss, batch).loss for _ in range(3)]
    assert losses[-1] < losses[0]
    assert stepper.observed is not None
    assert stepper.observed.island_flops >= 2 * batch["tokens"].numel() * 32 * 512
    assert not stepper.observed.idle_islands


def test_a_mask_keeps_documents_apart() -> None:
    mask = build_attention_mask(torch.tensor([[0, 1, 0, 1]]))[0, 0]
    assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


SLIDING = {
    "mistral": {},  # all layers
    "gemma2": {"head_dim": 8},  # some layers, and attention that adds its mask
    "gemma3_text": {"head_dim": 8},
}


@pytest.mark.parametrize("kind", SLIDING)
def test_a_window_longer_than_the_reach_of_attention_is_computed_as_transformers_does(kind: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(
        kind, vocab_size=128, num_key_value_heads=2, sliding_window=4, **sizes, **ends, **SLIDING[kind]
    )
    language = AutoModelForCausalLM.from_config(config).eval()
    model = LanguageModel(language)
    check_document_separation(model, 128, 0)
    rows = torch.randint(1, 128, (2, 25))
    ours = model(rows[:, :-1], rows[:, 1:], torch.arange(24).expand(2, -1))
    theirs = language(input_ids=rows, labels=rows, use_cache=False).loss
    assert (ours / 48).item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_a_document_is_computed_as_if_it_were_alone(kind: str) -> None:
    task = text(**TYPES[kind])
    model = task.model().eval()
    first, second = torch.randint(1, 500, (14,)).tolist(), torch.randint(1, 500, (17,)).tolist()
    together = batch_from([[0, *first, 0, *second, 0]], task)
    loss = task.loss(model, together)
    alone = [model.language(input_ids=r, labels=r).loss * (r.shape[1] - 1)
             for r in (torch.tensor([[0, *first, 0]]), torch.tensor([[0, *second, 0]]))]  # fmt: skip
    assert int(loss.count) == len(first) + len(second) + 2
    assert loss.sum.item() == pytest.approx(sum(alone).item(), rel=1e-5)
    # Nothing that the first document says reaches the second, not even in backward.
    embedded = model.inner.get_input_embeddings()
    seen: list[Tensor] = []
    handle = embedded.register_forward_hook(lambda _m, _i, out: seen.append(out.requires_grad_(True)))
    hidden = model.hidden(together["tokens"], together["positions"])
    handle.remove()
    [reached] = torch.autograd.grad(hidden[0, 15:].sum(), seen)
    assert reached[0, :15].abs().max() == 0
    assert reached[0, 15:].abs().max() > 0


class Leaky(LanguageModel):
    """A model whose attention takes no mask, as one that reads position ids alone would."""

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self.inner.base_model(input_ids=tokens, position_ids=None, use_cache=False)[0]
        return found


def test_a_planted_leak_between_documents_is_refused_before_the_first_step() -> None:
    task = text()
    model = task.model()
    assert check_document_separation(model, 512, 0) == []
    with pytest.raises(WrongUse) as refused:
        check_document_separation(Leaky(model.language), 512, 0)
    assert refused.value.id == "documents-attend"


def test_a_model_without_a_mask_of_attention_is_refused() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=1, vocab_size=128, state_size=4)
    with pytest.raises(WrongUse) as refused:
        check_document_separation(LanguageModel(AutoModelForCausalLM.from_config(config)), 128, 0)
    assert refused.value.id == "documents-attend"


def test_a_model_that_changes_its_logits_after_the_head_takes_them_whole() -> None:
    task = text()
    model = task.model()
    forward = model.language.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        found.logits = 0.1 * torch.tanh(found.logits)
        return found

    model.language.forward = capped
    [note] = task.ready(model, resolve_precision_name("fp32"))
    assert "logits" in note
    batch = batch_of(task, "train")
    loss = task.loss(model, batch)
    assert (loss.sum / loss.count).item() == pytest.approx(math.log(512), rel=0.05)
    whole = task.model()
    task.ready(whole, resolve_precision_name("fp32"))
    assert whole.plain_head


def test_recomputed_activations_give_the_same_gradients() -> None:
    task = text(layers=3)
    model, batch = task.model(), batch_of(task, "train")
    before = gradients(model, task.loss(model, batch).sum)
    assert checkpoint_activations(model) == 3
    for name, gradient in gradients(model, task.loss(model, batch).sum).items():
        assert torch.equal(gradient, before[name]), name


def test_perplexity_is_of_the_mean_loss_and_not_a_mean_over_batches() -> None:
    metric = TextMetric()
    for loss, tokens in ((10.0, 2), (6.0, 6)):
        metric.update(torch.tensor(loss), torch.tensor(tokens), 0.25)
    found = metric.compute()
    assert float(found["perplexity"]) == pytest.approx(math.exp(2.0))
    assert float(found["bits_per_byte"]) == pytest.approx(16.0 / math.log(2) / (8 / 0.25))


def test_text_is_greedy_or_sampled_by_the_seed() -> None:
    task = text(temperature=0)
    model, prompt = task.model().eval(), task.prompt("import ")

    def written(seed: int) -> str:
        torch.manual_seed(seed)
        return str(task.predict(model, prompt).values["text"])

    assert written(0) == written(1)
    logits = model.logits(prompt[None], torch.arange(len(prompt))[None])[0, -1]
    assert written(0).startswith(task._tokenizer.decode([int(logits.argmax())]))
    task.recipe.model.__dict__["temperature"] = 1.0
    assert written(0) == written(0)
    assert len({written(seed) for seed in range(4)}) > 1
    assert task.prompt("").tolist() == [0]


def test_the_space_before_new_text_is_kept() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    task = text()
    task._tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    assert task._decode_text([0, 1], [2, 0]) == " c a"
    assert task._decode_text([], [2, 0]) == "c a"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_reads_all_of_a_prompt_and_the_text_ends_where_its_context_does(kind: str) -> None:
    """The window of 32 tokens is the context of a new model, however many new tokens are requested."""
    task = text(type=kind, new_tokens=100, temperature=0)
    model = task.model().eval()
    model.inner.config.eos_token_id = model.inner.generation_config.eos_token_id = None
    read: list[int] = []
    handle = model.inner.get_input_embeddings().register_forward_pre_hook(
        lambda _m, args: read.extend(args[0][0].tolist())
    )
    task._end = 511  # no token ends a text, or none that is likely
    for length in (1, 10, 31):
        read.clear()
        prompt = torch.randint(1, 500, (length,))
        found = task.predict(model, prompt).values
        assert read[:length] == prompt.tolist()
        assert found["tokens"] == 32 - length
        assert found["left_out"] == 100 - (32 - length)
    handle.remove()
    with pytest.raises(BadData) as refused:
        task.predict(model, torch.randint(1, 500, (40,)))
    assert "9 more" in refused.value.given


def test_the_context_of_a_base_is_the_limit_and_not_the_window(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    task = text(base=str(base), new_tokens=128, temperature=0)
    model, prompt = task.model().eval(), torch.randint(1, 500, (100,))
    read: list[int] = []
    model.inner.get_input_embeddings().register_forward_pre_hook(lambda _m, args: read.extend(args[0][0].tolist()))
    found = task.predict(model, prompt).values
    assert read[:100] == prompt.tolist()
    assert found["left_out"] == 0
    assert found["ended"] or found["tokens"] == 128


def test_tokens_of_another_tokenizer_are_not_the_runs() -> None:
    task, other = text(), made("text", data={"vocabulary": 400})
    same = text()
    for one in (same, other):
        one.remember(task.facts())
    assert len(same.source("val")) > 0
    with pytest.raises(BadData):
        other.source("val")


# -- a base -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    task = text(width=48)
    task.write_folder(task.model(), tmp_path / "base")
    return tmp_path / "base"


def test_a_base_is_loaded_with_its_weights(base: Path) -> None:
    task = text(base=str(base))
    model = task.model()
    same = AutoModelForCausalLM.from_pretrained(base)
    assert compare_logits(model, LanguageModel(same), 512).startswith("checked")
    assert all(p.dtype is torch.float32 for p in model.parameters())
    again = text(base=str(base))
    again.remember(task.facts())
    (base / "model.safetensors").unlink()
    # A finished run has its own weights: it needs no base.
    assert sum(p.numel() for p in again.model().parameters()) == sum(p.numel() for p in model.parameters())
    with pytest.raises(BadData):
        task.model()


DAMAGES: dict[str, tuple[str, bytes | None]] = {
    "truncated weights": ("model.safetensors", None),
    "no weights in the file": ("model.safetensors", b""),
    "a pointer of git lfs": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    "a truncated config": ("config.json", None),
    "a config that is a list": ("config.json", b"[]"),
    "sizes that are texts": ("config.json", b'{"model_type": "llama", "hidden_size": "many"}'),
    "an index of missing files": ("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "b"}}'),
}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_base_that_cannot_be_loaded_is_named(damage: str, adapter: str, base: Path) -> None:
    if adapter == "lora":
        pytest.importorskip("peft")
    name, content = DAMAGES[damage]
    before = (base / name).read_bytes() if (base / name).exists() else b""
    (base / name).write_bytes(before[: len(before) // 2] if content is None else content)
    if name.endswith("index.json"):
        (base / "model.safetensors").unlink()
    with pytest.raises(BadData) as refused:
        text(base=str(base), adapter={"kind": adapter}).model()
    assert str(base) in refused.value.given


MULTIMODAL = {
    "gemma3": {"head_dim": 8, "sliding_window": 16},
    "mistral3": {"model_type": "mistral"},
}


@pytest.mark.wording
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_a_base_with_other_inputs_is_refused_and_its_language_part_is_a_base(kind: str, base: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    language = {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes, **MULTIMODAL[kind]}
    config = AutoConfig.for_model(
        kind, text_config=language, vision_config={**seen, "image_size": 28, "patch_size": 14}
    )
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(base)
    with pytest.raises(BadData, match="other inputs than text") as refused:
        text(base=str(base)).model()
    [*_, code] = shlex.split(refused.value.do)
    exec(code, {})
    part = text(base=f"{base}-text").model().eval()
    rows = torch.randint(1, 500, (1, 12))
    with torch.no_grad():
        expected = whole(input_ids=rows).logits
        torch.testing.assert_close(part.logits(rows, torch.arange(12)[None]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.wording
def test_tokens_of_another_tokenizer_or_a_longer_window_are_refused(base: Path) -> None:
    with pytest.raises(BadData, match="--tokenizer"):
        made("text", model={"base": str(base)}, data={"vocabulary": 400}).model()
    with pytest.raises(BadData, match=r"data\.length=32"):
        made("text", model={"base": str(base)}, data={"length": 64}).model()


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"base": "HuggingFaceTB/SmolLM2-135M"}, "--download"),
        ({"base": "model.gguf"}, "halfstep data base model.gguf"),
        ({"weights": "pretrained"}, "model.base"),
        ({"width": 33}, "model.width="),
        ({"heads": 4, "kv_heads": 3}, "model.kv_heads"),
    ],
)
@pytest.mark.wording
def test_settings_that_cannot_work_name_what_to_type(model: dict[str, Any], line: str) -> None:
    with pytest.raises(BadRecipe) as refused:
        text(**model)
    assert line in refused.value.do


# -- a whole run ------------------------------------------------------------------------------------------------------


SHORT = ["train.steps=12", "data.samples=6", "data.vocabulary=400", "data.length=64", "model.width=32", "num_workers=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "run"
    halfstep.fit("text_tiny", settings=[*SHORT, "--fp32", f"run.dir={folder}"], quiet=True)
    return folder


def command(*words: object) -> str:
    done = CliRunner().invoke(build(), [str(word) for word in words], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_evaluates_predicts_and_exports(run: Path, tmp_path: Path) -> None:
    result = halfstep.load(run)
    assert result.predict("import ").values["text"]
    assert {"loss", "perplexity", "bits_per_byte"} <= set(evaluate(run).metrics)
    out = tmp_path / "written"
    said = command("predict", run, "--prompt", "import os", "--out", out, "--temperature", "0", "--new_tokens", "5")
    assert "greedy" in said
    assert (out / "texts" / "prompt-1.txt").read_text().startswith("import os")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.txt").write_text("class ")
    command("predict", run, tmp_path / "prompts", "--out", tmp_path / "more", "--seed", "3")
    assert (tmp_path / "more" / "texts" / "a.txt.txt").read_text().startswith("class ")
    said = command("export", run, "--out", tmp_path / "folder")
    assert "logits at most" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    rows = tokenizer("def read(self):\n    return self", return_tensors="pt").input_ids
    assert rows[0].tolist() == result.task.prompt("def read(self):\n    return self").tolist()
    with torch.no_grad():
        ours = result.model.logits(rows, torch.arange(rows.shape[1])[None])
        torch.testing.assert_close(model(rows).logits, ours, rtol=1e-4, atol=1e-4)


def test_prompts_that_do_not_fit_are_named_or_refused(run: Path, tmp_path: Path) -> None:
    long = "import os " * 200
    done = CliRunner().invoke(build(), ["predict", str(run), "--prompt", long, "--out", str(tmp_path / "none")])
    assert isinstance(done.exception, BadData) or done.exit_code == BadData("", allowed="", do="").exit_code
    assert not (tmp_path / "none" / "texts").exists()
    said = command(
        "predict", run, "--prompt", long, "--prompt", "class ", "--new_tokens", "100", "--out", tmp_path / "a"
    )
    assert "left out prompt-1" in said
    assert [path.name for path in (tmp_path / "a" / "texts").iterdir()] == ["prompt-2.txt"]
    words = ["--prompt", "import os " * 8, "--new_tokens", "100", "--out", str(tmp_path / "b"), "--json"]
    [written] = json.loads(command("predict", run, *words))["texts"]
    assert written["ended"] or 0 < written["left_out"] < 100


def test_samples_without_a_prompt_differ_and_repeat_with_the_seed(run: Path, tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        command("predict", run, "--samples", "2", "--out", tmp_path / name, "--new_tokens", "12", "--seed", "5")
        texts.append([(tmp_path / name / "texts" / f"sample-{n}.txt").read_text() for n in (1, 2)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_throughput_is_reported_in_tokens(run: Path) -> None:
    from halfstep.journal.jsonl import read_events

    [epoch] = [event for event in read_events(run / "journal.jsonl") if event["event"] == "epoch"]
    assert epoch["tokens_per_second"] == pytest.approx(64 * epoch["samples_per_second"])


def test_an_interrupted_run_goes_on_exactly(run: Path, tmp_path: Path) -> None:
    settings = [*SHORT, "--fp32", f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=4"]
    from halfstep.errors import Stopped
    from halfstep.step.stepper import Stepper

    step, taken = Stepper.step, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        if len(taken) == 7:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", interrupted)
        with pytest.raises((KeyboardInterrupt, Stopped)):
            halfstep.fit("text_tiny", settings=settings, quiet=True)
    halfstep.fit("text_tiny", settings=settings, quiet=True)
    first, second = ((folder / "last.safetensors").read_bytes() for folder in (run, tmp_path / "run"))
    assert first == second
