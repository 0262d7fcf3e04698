"""`optimizer.name=muon`: matrices of hidden layers are Muon's, all other parameters AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from faults.wrong_pairs import Kind, loop_of, saved_by
from halfstep.errors import StateMismatch, WrongUse
from halfstep.journal.jsonl import read_events
from halfstep.recipe.schema import OptimizerOptions
from halfstep.train.optimizers import MuonWithAdamW, describe_optimizer_split, make_optimizer
from halfstep.train.resume import find_checkpoint, resume_from

MUON = OptimizerOptions(name="muon", lr=0.01)


def by_muon(model: nn.Module) -> set[str]:
    """The names of the parameters that Muon trains; AdamW trains all others that are not frozen."""
    optimizer = make_optimizer(MUON, model)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    parts = optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)
    found = [{names[id(p)] for group in part.param_groups for p in group["params"]} for part in parts]
    assert set.union(*found) == set(names.values())
    assert sum(map(len, found)) == len(names)
    return found[0]


def describe(model: nn.Module) -> str:
    [line] = describe_optimizer_split(MUON, model)
    return line


def linear(layers: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(layers)]


# -- output layers ----------------------------------------------------------------------------------------------------


def test_the_last_linear_layer_is_the_output_layer() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), *linear(2), nn.LayerNorm(8), nn.Linear(8, 3))
    assert by_muon(model) == {"1.weight", "2.weight"}
    assert describe(model) == ("Muon: 2 matrices of hidden layers; AdamW: 7 others (4, embeddings, norms and biases)")


class Named(nn.Module):
    """A model whose output layers were registered first."""

    def __init__(self, answer: Callable[[Any], object] | None) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(8, 3), nn.Linear(8, 2)
        self.body = nn.Sequential(*linear(2))
        self.answer = answer

    def get_classifier(self) -> object:
        if self.answer is None:
            raise NotImplementedError
        return self.answer(self)


BODY = {"body.0.weight", "body.1.weight"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda self: self.head, BODY | {"other.weight"}),
        (lambda self: (self.head, self.other), BODY),
        (lambda self: [self.head, None, self.other], BODY),
        (lambda self: {"a": self.head, "b": self.other}, BODY),
        (lambda self: nn.ModuleList([self.head, self.other]), BODY | {"head.weight", "other.weight"}),
        (lambda self: nn.Identity(), BODY | {"head.weight", "other.weight"}),
        (lambda self: None, {"head.weight", "other.weight", "body.0.weight"}),
        (None, {"head.weight", "other.weight", "body.0.weight"}),
    ],
)
def test_a_model_can_name_its_output_layers(answer: Any, expected: set[str]) -> None:
    assert by_muon(Named(answer)) == expected


def test_a_model_inside_names_its_own_output_layer() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module, *after: nn.Module) -> None:
            super().__init__()
            self.inner, self.after = inner, nn.Sequential(*after)

    heads = (lambda self: (self.head, self.other),)
    assert by_muon(Wrapper(Named(heads[0]), nn.Linear(2, 4), nn.Linear(4, 1))) == {
        "after.0.weight",
        *(f"inner.{name}" for name in BODY),
    }
    # A backbone without a head, and one's own head after it.
    assert by_muon(Wrapper(Named(lambda self: nn.Identity()), nn.Linear(2, 1))) == {
        f"inner.{name}" for name in BODY | {"head.weight", "other.weight"}
    }


def test_a_head_that_is_tied_to_the_embedding_is_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.Linear(8, 11, bias=False)
            self.body, self.table = nn.Sequential(*linear(2)), nn.Embedding(11, 8)
            self.table.weight = self.lm_head.weight

    assert by_muon(Tied()) == {"body.0.weight"}
    assert describe(Tied()) == "Muon: 1 matrix of hidden layers; AdamW: 4 others (body.1, embeddings, norms and biases)"


# -- layers and tensors -----------------------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.mixed = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
        self.recurrent, self.cell = nn.LSTM(8, 8), nn.GRUCell(8, 8)
        self.pointwise, self.kernel = nn.Conv2d(8, 8, 1), nn.Conv1d(8, 8, 3)
        self.norm, self.wide_norm = nn.LayerNorm(8), nn.LayerNorm((4, 8))
        self.bag = nn.EmbeddingBag(9, 8)
        self.positions = nn.Parameter(torch.zeros(16, 8))
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.lengths = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
        self.head = nn.Linear(8, 3)


def test_the_kind_of_a_layer_decides_and_not_the_shape() -> None:
    assert by_muon(Parts()) == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        *(f"mixed.{name}_proj_weight" for name in "qkv"),
        "mixed.out_proj.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "cell.weight_ih",
        "cell.weight_hh",
    }
    assert describe(Parts()).endswith("(head, embeddings, convolutions, norms and biases, other tensors)")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: nn.Conv2d(3, 4, 3), "Conv2d, which has no trainable matrix in a hidden layer: convolutions"),
        (lambda: nn.Linear(4, 4), "Linear, which has no trainable matrix in a hidden layer"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 2)), "hidden layer: 2, convolutions"),
        (lambda: nn.Sequential(*linear(3)).requires_grad_(False), "all of its parameters are frozen"),
        (lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), "hidden layer: 1, embeddings"),
    ],
)
def test_a_model_without_hidden_matrices_is_refused(build: Callable[[], nn.Module], named: str) -> None:
    with pytest.raises(WrongUse) as caught:
        make_optimizer(MUON, build())
    assert caught.value.id == "no-hidden-matrix"
    assert named in caught.value.given
    assert caught.value.allowed == "a model with linear, attention or recurrent layers before its output layer"
    assert caught.value.do == "write optimizer.name=adamw"


# -- models of other libraries ----------------------------------------------------------------------------------------


def timm_model(name: str, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model(name, **options)
    return model


def test_resnets_of_timm_are_refused_and_vits_keep_their_heads() -> None:
    with pytest.raises(WrongUse):
        make_optimizer(MUON, timm_model("test_resnet", num_classes=4))
    vit = timm_model("test_vit", num_classes=4)
    found = by_muon(vit)
    assert len(found) == 4 * len(vit.blocks)  # type: ignore[arg-type]
    assert all(name.startswith("blocks.") for name in found)
    assert "head" in describe(vit)


def test_a_vit_without_a_classifier_has_no_output_layer() -> None:
    vit = timm_model("test_vit", num_classes=0)
    assert len(by_muon(vit)) == 4 * len(vit.blocks)  # type: ignore[arg-type]


def test_both_heads_of_a_distilled_model_are_output_layers() -> None:
    model = timm_model(
        "deit_tiny_distilled_patch16_224", num_classes=4, img_size=32, depth=1, embed_dim=16, num_heads=2
    )
    assert {name.partition(".")[0] for name in by_muon(model)} == {"blocks"}
    assert "(head, head_dist, " in describe(model)


def test_tables_of_relative_positions_are_no_matrices() -> None:
    model = timm_model(
        "swin_tiny_patch4_window7_224", num_classes=4, img_size=32, window_size=4, embed_dim=8, depths=(1, 1),
        num_heads=(2, 2),
    )  # fmt: skip
    assert any("relative_position_bias_table" in name for name, p in model.named_parameters() if p.ndim == 2)
    assert not any("table" in name or "head" in name for name in by_muon(model))


LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def language_model(kind: str = "llama", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2} if kind == "gpt2" else LLAMA
    config = transformers.AutoConfig.for_model(kind, **sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_language_model_is_never_muons(tied: bool) -> None:
    model = language_model(tie_word_embeddings=tied)
    from halfstep.tasks.models.text.model import LanguageModel

    assert len(by_muon(model)) == 14
    assert all(name.startswith("model.layers.") for name in by_muon(model))
    assert ("(embeddings, " if tied else "(lm_head, embeddings, ") in describe(model)
    assert by_muon(LanguageModel(model)) == {f"language.{name}" for name in by_muon(model)}


@pytest.mark.parametrize("tied", [True, False])
def test_linear_layers_of_gpt2_are_matrices(tied: bool) -> None:
    found = by_muon(language_model("gpt2", tie_word_embeddings=tied))
    assert found == {
        f"transformer.h.{layer}.{name}.weight"
        for layer in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_the_classifier_of_transformers_is_the_last_linear_layer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("llama", **LLAMA, num_labels=3, pad_token_id=0)
    found = by_muon(transformers.AutoModelForSequenceClassification.from_config(config))
    assert len(found) == 14
    assert "score.weight" not in found


def test_adapters_of_hidden_layers_are_muons_and_those_of_the_head_are_not() -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "lm_head", "embed_tokens"]
    model = peft.get_peft_model(
        language_model(tie_word_embeddings=False), peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    )
    found = by_muon(model)
    assert len(found) == 4  # A and B of two layers; the base is frozen
    assert all(".q_proj.lora_" in name for name in found)
    # The first gradient of A is zero, as B is: its update must stay finite.
    optimizer = make_optimizer(MUON, model)
    for _ in range(2):
        model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(model.get_parameter(name).any() for name in found)


def test_an_adapted_last_layer_is_one_output_layer() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.Sequential(*linear(3)), peft.LoraConfig(r=2, target_modules=["0", "1", "2"]))
    assert {name.rpartition(".lora_")[0] for name in by_muon(model)} == {
        f"base_model.model.{number}" for number in (0, 1)
    }


def test_a_head_that_an_adapter_trains_whole_is_the_output_layer() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        language_model(tie_word_embeddings=False),
        peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    )
    assert all(".q_proj.lora_" in name for name in by_muon(model))
    assert "lm_head, " not in describe(model).partition("(")[0]
    assert "lm_head" in describe(model)


# -- runs -------------------------------------------------------------------------------------------------------------

TRAINS = {"text_tiny": ["data.length=32", "data.vocabulary=320", "data.samples=4", "model.tied=false"]}
TRAINS["slots_tiny"] = TRAINS["diffusion_tiny"] = ["data.size=16", "data.samples=16"]
SMALL = ["optimizer.name=muon", "train.steps=3", "train.batch_size=2", "run.pictures=0", "num_workers=0"]


@pytest.mark.parametrize("name", TRAINS)
def test_recipes_train_with_muon_and_print_the_division(name: str, tmp_path: Path) -> None:
    if name == "text_tiny":
        pytest.importorskip("transformers")
    run = halfstep.fit(name, settings=[*SMALL, "--fp32", *TRAINS[name], f"run.dir={tmp_path / 'run'}"], quiet=True)
    assert run.steps == 3
    [start] = [event for event in read_events(run.dir / "journal.jsonl") if event["event"] == "start"]
    [line] = [note for note in start["notes"] if note.startswith("Muon: ")]
    assert ("language.lm_head, " in line) == (name == "text_tiny")


@pytest.mark.parametrize("name", ["segmentation_tiny", "classification_tiny"])
def test_recipes_with_convolutions_alone_are_refused(name: str, tmp_path: Path) -> None:
    if name == "classification_tiny":
        pytest.importorskip("timm")
    with pytest.raises(WrongUse) as caught:
        halfstep.fit(name, settings=[*SMALL, "--fp32", "data.samples=16", f"run.dir={tmp_path / 'run'}"], quiet=True)
    assert caught.value.id == "no-hidden-matrix"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(2, 16), nn.Parameter(torch.ones(1)), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out * self.scale


class AllHidden(Net):
    """The division of earlier versions, in which Muon trained the output layer too."""

    def get_classifier(self) -> nn.Module:
        return nn.Identity()


@pytest.mark.parametrize("accepted", [(), ("accept_recipe_change",)])
def test_moments_of_another_division_are_never_resumed(accepted: tuple[str, ...], tmp_path: Path) -> None:
    settings = {"optimizer.name": "muon"}
    saved_by(Kind(AllHidden, settings), tmp_path)
    loop, found = loop_of(Kind(Net, settings), tmp_path), find_checkpoint(tmp_path)
    assert found is not None
    before = {name: p.clone() for name, p in loop.model.named_parameters()}
    with pytest.raises(StateMismatch):
        resume_from(loop, found, tmp_path, accepted)
    assert not loop.parts.optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in loop.model.named_parameters())
    # Without a change of the division, the run continues.
    same = loop_of(Kind(AllHidden, settings), tmp_path)
    resume_from(same, found, tmp_path, accepted)
    assert same.parts.optimizer.state


@pytest.mark.wording
def test_a_parameter_in_another_group_is_refused_by_its_name(tmp_path: Path) -> None:
    settings = {"optimizer.name": "muon"}
    saved_by(Kind(AllHidden, settings), tmp_path)
    found = find_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(StateMismatch) as caught:
        resume_from(loop_of(Kind(Net, settings), tmp_path), found, tmp_path, ())
    assert caught.value.given == (
        "the checkpoint does not fit the optimizer:\n"
        "    optimizer had last.weight in group 0, and has it in 1\n"
        "    optimizer had scale in group 1, and has it in 2\n"
        "    optimizer had first.bias in group 1, and has it in 2\n"
        "    optimizer had last.bias in group 1, and has it in 2"
    )
    assert "restore the optimizer" in caught.value.do
