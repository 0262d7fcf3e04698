"""A frozen base with an adapter: what is trained is fp32, the base stays as it is, a run holds the adapter alone."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("peft")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import halfstep
from halfstep.cli.main import build
from halfstep.errors import BadData, BadRecipe, StateMismatch, Stopped, WrongUse
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.stepper import Stepper
from halfstep.tasks.models.text import adapters
from halfstep.tasks.models.text.adapters import MergeLosses
from halfstep.tasks.models.text.model import LanguageModel
from halfstep.tasks.text import Text
from tests.tasks.made import batch_of, made

FORMATS = ["fp32", "bf16", *(["int8", "nf4"] if find_spec("bitsandbytes") else [])]


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.tasks.text.COMPARED", 8)


DATA = {"name": "python", "samples": 4, "vocabulary": 512, "length": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base that has learned something: adapters gain little on random weights."""
    folder = tmp_path_factory.mktemp("base") / "base"
    task = made("text", model={"width": 64, "heads": 2, "layers": 2}, data=DATA)
    torch.manual_seed(0)
    model = task.model()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 3e-3), precision="fp32")
    for number in range(20):
        source = task.source("train")
        rows = [task.transform("train", source.read((7 * number + n) % len(source))) for n in range(4)]
        stepper.step(task.loss, task.collate("train", rows))
    task.write_folder(model, folder)
    return folder


def adapted(base: Path, base_format: str = "bf16", **adapter: Any) -> Text:
    options = {"kind": "lora", "rank": 4, **adapter}
    task = made("text", model={"base": str(base), "base_format": base_format, "adapter": options}, data=DATA)
    assert isinstance(task, Text)
    return task


def raw(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("base_format", FORMATS)
def test_the_base_is_untouched_and_the_adapter_learns(
    base: Path, base_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = adapted(base, base_format)
    model = task.model()
    precision = resolve_precision_name("fp32" if base_format == "fp32" else "bf16")
    lines = task.ready(model, precision)
    assert lines[0].split() == ["part", "trained", "stored", "computed", "bytes"]
    stored = {(row.part, row.trained): row.stored for row in adapters.list_model_parts(model, precision)}
    assert stored["adapter", True] == "fp32"
    assert base_format in {row.stored for row in adapters.list_model_parts(model, precision) if row.part == "base"}
    before = raw(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = Stepper(model, torch.optim.AdamW(trained, 1e-2), precision=precision, clip_norm=1.0)
    batch = batch_of(task, "train")
    losses = [float(stepper.step(task.loss, batch).loss) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in raw(model).items())
    held = [p.detach().clone() for p in trained]
    spoiled = stepper.step(lambda m, b: task.loss(m, b).sum * float("nan"), batch)
    assert not spoiled.applied
    assert all(torch.equal(a, b) for a, b in zip(held, trained, strict=True))
    with adapters.use_inference_precision(model), torch.no_grad():
        task.loss(model.eval(), batch)
    assert "MatMul8bitLt" not in caplog.text


def test_layers_that_are_trained_whole_are_fp32_whatever_peft_left(base: Path) -> None:
    model = adapted(base, also_train=["lm_head"]).model()
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in name for name in trained)
    assert set(trained.values()) == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_run_in_fp32_widens_a_bf16_base_and_refuses_a_quantized_one(base: Path) -> None:
    task = adapted(base)
    model = task.model()
    assert "fp32" in task.ready(model, resolve_precision_name("fp32"))[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if "nf4" in FORMATS:
        task = adapted(base, "nf4")
        with pytest.raises(BadRecipe):
            task.ready(task.model(), resolve_precision_name("fp32"))


@pytest.mark.parametrize("base_format", FORMATS)
def test_rotary_tables_are_in_fp32_whatever_the_base_is_stored_in(base: Path, base_format: str) -> None:
    model = adapted(base, base_format).model()
    fresh = made("text", model={"base_format": "bf16", "adapter": {"kind": "lora"}}, data=DATA).model()
    for one in (model, adapters.build_merged_model(model, model.inner.config), fresh):
        tables = {name: buffer.dtype for name, buffer in one.named_buffers() if "inv_freq" in name}
        assert tables
        assert set(tables.values()) == {torch.float32}


@pytest.mark.parametrize("base_format", [name for name in FORMATS if name != "fp32"])
def test_the_ledger_counts_the_base_as_it_is_stored(base: Path, base_format: str) -> None:
    given = [word for word in settings(base, Path("run")) if not word.startswith("run.dir")]
    ledger = halfstep.estimate("text_lora", settings=[*given, f"model.base_format={base_format}", "precision=bf16"])
    model = adapted(base, base_format, rank=8).model()
    stored = sum(p.nbytes for p in model.parameters())
    # fp32 scales: nf4 has one for each 64 weights, of which two are in a byte; int8 has one for each row.
    blocks = {"Params4bit": lambda p: p.numel() // 32, "Int8Params": len}
    scales = sum(4 * blocks[type(p).__name__](p) for p in model.parameters() if type(p).__name__ in blocks)
    assert ledger.at_peak["weights"] == pytest.approx(stored + scales, rel=0.02)


@pytest.mark.parametrize(
    "adapter", [{"targets": ["q_projj"]}, {"targets": ["q_proj", "nope"]}, {"also_train": ["nope"]}, {"targets": []}]
)
def test_names_that_match_nothing_are_refused(base: Path, adapter: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe) as refused:
        adapted(base, **adapter).model()
    assert "base_layer" not in str(refused.value)  # the base's names, not peft's


def test_all_linear_is_every_matrix_but_the_head(base: Path) -> None:
    model = adapted(base, targets=["all-linear"]).model()
    names = {path.rpartition(".")[2] for path, part in model.named_modules() if hasattr(part, "lora_A")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.wording
def test_the_layers_of_gpt2_are_named(tmp_path: Path) -> None:
    task = made("text", model={"type": "gpt2"}, data=DATA)
    task.write_folder(task.model(), tmp_path / "gpt2")
    with pytest.raises(BadRecipe, match="c_attn") as refused:
        adapted(tmp_path / "gpt2").model()
    assert refused.value.do.startswith("write model.adapter.targets=[c_attn, ")
    model = adapted(tmp_path / "gpt2", targets=["c_attn"]).model().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    whole = adapters.build_merged_model(model, model.inner.config)
    rows = torch.randint(1, 500, (1, 16))
    with adapters.use_inference_precision(model), torch.no_grad():
        found, expected = (one.logits(rows, torch.arange(16)[None]).float() for one in (whole, model))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_base_that_transformers_has_downloaded(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--someone--small" / "snapshots" / "0123"
    shutil.copytree(base, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = settings(base, tmp_path / "run", "model.base=someone/small", "train.steps=2", "schedule.warmup_steps=1")
    halfstep.fit("text_lora", settings=[*given, "model.download=true"], quiet=True)
    assert json.loads((tmp_path / "run" / "task.json").read_text())["base"] == adapters.compute_base_fingerprint(
        str(base)
    )
    assert halfstep.load(tmp_path / "run").predict("def ").values["text"] is not None
    content = bytearray((snapshot / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (snapshot / "model.safetensors").write_bytes(content)
    with pytest.raises(BadData):
        halfstep.load(tmp_path / "run")


@pytest.mark.wording
def test_without_bitsandbytes_the_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halfstep.errors, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    with pytest.raises(halfstep.errors.MissingExtra, match="text"):
        adapted(base, "int8").model()


# -- a run ------------------------------------------------------------------------------------------------------------


def settings(base: Path, folder: Path, *more: str) -> list[str]:
    return [
        *(
            "data.name=python",
            "data.samples=4",
            "data.vocabulary=512",
            "data.length=32",
            "train.batch_size=16",
            f"model.base={base}",
        ),
        *("train.steps=8", "schedule.warmup_steps=2", "checkpoint.every_steps=3", "train.strict=true", "num_workers=0"),
        *("optimizer.lr=1e-2", f"run.dir={folder}", *more),
    ]


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    halfstep.fit("text_lora", settings=settings(base, folder), quiet=True)
    return folder


def command(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(build(), [str(word) for word in words], env={"COLUMNS": "80"})
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


def test_a_run_holds_the_adapter_alone(run: Path, base: Path) -> None:
    assert all("lora_" in name for name in load_file(run / "best.safetensors"))
    size = sum(path.stat().st_size for path in next(iter((run / "checkpoints").iterdir())).rglob("*"))
    assert size < (base / "model.safetensors").stat().st_size
    loaded = halfstep.load(run)
    saved = load_file(run / "best.safetensors")
    own = dict(loaded.model.named_parameters())
    assert all(torch.equal(own[name].cpu(), tensor) for name, tensor in saved.items())
    assert loaded.predict("def ").values["text"] is not None


def test_an_interrupted_run_goes_on_exactly(run: Path, base: Path, tmp_path: Path) -> None:
    step, taken = Stepper.step, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(1)
        if len(taken) == 6:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", interrupted)
        with pytest.raises((KeyboardInterrupt, Stopped)):
            halfstep.fit("text_lora", settings=settings(base, tmp_path / "run"), quiet=True)
    halfstep.fit("text_lora", settings=settings(base, tmp_path / "run"), quiet=True)
    assert (run / "last.safetensors").read_bytes() == (tmp_path / "run" / "last.safetensors").read_bytes()


@pytest.mark.wording
def test_another_base_is_refused(run: Path, base: Path, tmp_path: Path) -> None:
    content = (base / "model.safetensors").read_bytes()
    changed = bytearray(content)
    changed[-1] ^= 1
    (base / "model.safetensors").write_bytes(changed)
    try:
        with pytest.raises(BadData, match="changed"):
            halfstep.load(run)
        with pytest.raises(StateMismatch):
            halfstep.fit("text_lora", settings=settings(base, run, "train.steps=9"), extend=True, quiet=True)
    finally:
        (base / "model.safetensors").write_bytes(content)
    halfstep.load(run)


def test_the_adapter_is_what_peft_loads(run: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    code, said = command("export", run, "--out", tmp_path / "adapter")
    assert code == 0, said
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    ours = halfstep.load(run, precision="fp32").model
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    rows = torch.randint(1, 500, (1, 16))
    with torch.no_grad():
        expected = theirs(rows).logits
        found = ours.logits(rows, torch.arange(16)[None])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_merge_is_compared_and_a_bad_one_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = command("export", run, "--merge", "--out", tmp_path / "merged")
    assert code == 0, said
    assert "merged" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in model.named_parameters())
    whole = adapters.build_merged_model

    def spoiled(*given: Any) -> LanguageModel:
        model = whole(*given)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        return model

    monkeypatch.setattr(adapters, "build_merged_model", spoiled)
    code, said = command("export", run, "--merge", "--out", tmp_path / "bad")
    assert code != 0
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("base_format", FORMATS)
def test_merged_and_unmerged_compute_the_same(base: Path, base_format: str) -> None:
    task = adapted(base, base_format, also_train=["lm_head"] if base_format == "bf16" else [])
    model = task.model().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    whole = adapters.build_merged_model(model, model.inner.config)
    losses = [task._measure_held_out_loss(one) for one in (model, whole)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    with model.language.disable_adapter():
        assert task._measure_held_out_loss(model) != pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_merge_unties_a_head_with_an_adapter(base: Path, target: str) -> None:
    task = adapted(base, "fp32", targets=[target])
    model = task.model().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    whole = adapters.build_merged_model(model, model.inner.config)
    assert task._measure_held_out_loss(whole) == pytest.approx(task._measure_held_out_loss(model), rel=1e-5)


def test_the_rule_of_a_merge() -> None:
    MergeLosses(3.0, 2.0, 2.5).refuse_worse()
    MergeLosses(3.0, 2.0, 1.9).refuse_worse()
    MergeLosses(3.0, 3.1, 3.1002).refuse_worse()
    for worse in (MergeLosses(3.0, 2.0, 3.1), MergeLosses(3.0, 3.1, 3.2), MergeLosses(3.0, 2.0, float("nan"))):
        with pytest.raises(WrongUse) as refused:
            worse.refuse_worse()
        assert refused.value.id == "merge-loses"
