"""Language and sequence models: masks, tied weights, adapters, recurrence, experts, outputs with `.loss`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    SPOIL,
    Case,
    Counted,
    adamw,
    generator,
    loop,
    mlp,
    normal,
    promise,
    require,
    require_close,
    same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Ema, Window, island

TOKENS = [whole(32, 4, 12, seed=i) for i in range(4)]


class Block(nn.Module):
    def __init__(self, dim: int, length: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down, self.drop = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(length, length, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (part.view(n, t, 2, d // 2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d // 2)).masked_fill(~self.mask[:t, :t], -INFTY)
        x = x + self.drop(self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


INFTY = 1e4


class Gpt(nn.Module):
    """Tied weights, learned positions, a causal mask as a buffer of every block."""

    def __init__(self, dim: int = 16, depth: int = 2, dropout: float = 0.1, length: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, length, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def gpt_case(**options: Any) -> Case:
    model = Gpt()
    return Case(model, adamw(model, 1e-3), next_token, options={"clip_norm": 1.0, **options})


@loop
def gpt_tied_dropout() -> str:
    return promise(gpt_case, TOKENS, SPOIL)


@loop
def gpt_bf16() -> str:
    return promise(gpt_case, TOKENS, SPOIL, precision="bf16")


@loop
def gpt_fp16_as_grad_scaler() -> str:
    return promise(gpt_case, TOKENS, SPOIL, precision="fp16")


@loop
def gpt_windows_of_two() -> str:
    return promise(gpt_case, [Window(TOKENS[:2]), Window(TOKENS[2:])], SPOIL)


@loop
def gpt_tied_ema() -> str:
    """A tied weight is averaged once, and worn by both."""
    torch.manual_seed(0)
    model = Gpt()
    case = Case(model, adamw(model), next_token, options={"ema": Ema(model, 0.5)})
    stepper = case.start()
    trains(case, TOKENS)
    own = model.head.weight.detach().clone()
    with stepper.evaluating(ema=True) as worn:
        require(same(worn.head.weight, worn.tokens.weight), "the tie came apart")
        require(not same(worn.head.weight, own), "the average is not worn")
    require(same(model.head.weight, own) and model.head.weight is model.tokens.weight, "not as before evaluating")
    return "tied under the average, and own weights back after it"


@loop
def tokens_counted_over_unequal_micro_batches() -> str:
    """`ignore_index=-100` and padding: the update is that of one large batch."""

    def counted(model: nn.Module, batch: Any) -> Counted:
        x, y = batch
        loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
        return Counted(loss, (y != -100).sum())

    x, y = normal(12, 16), whole(4, 12)
    y[3:7] = -100
    torch.manual_seed(0)
    hand = mlp()
    torch.manual_seed(0)
    model = mlp()
    optimizer = sgd(hand)
    F.cross_entropy(hand(x), y, ignore_index=-100).backward()
    optimizer.step()
    case = Case(model, sgd(model), counted)
    report = case.start().step(counted, Window([(x[:4], y[:4]), (x[4:9], y[4:9]), (x[9:], y[9:])]))
    require(report.applied, str(report))
    require_close(hand, model, "compared with one large batch")
    return "3 micro-batches with 3, 2 and 3 counted rows equal one of 8"


@dataclass
class CausalOutput:
    loss: Tensor
    logits: Tensor


@loop
def own_dataclass_with_loss() -> str:
    def loss(model: nn.Module, ids: Tensor) -> CausalOutput:
        logits = model(ids[:, :-1])
        return CausalOutput(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), logits)

    def build() -> Case:
        model = Gpt()
        return Case(model, adamw(model, 1e-3), loss)

    return promise(build, TOKENS, SPOIL)


def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))


@loop
def hugging_face_gpt2() -> str:
    def build() -> Case:
        model = hf_gpt2().train()
        return Case(model, adamw(model, 1e-3), lambda m, ids: m(input_ids=ids, labels=ids), options={"clip_norm": 1.0})

    return promise(build, TOKENS, SPOIL)


@loop
def hugging_face_bert_classifier_bf16() -> str:
    from transformers import BertConfig, BertForSequenceClassification

    def build() -> Case:
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=3, **small)).train()
        return Case(model, adamw(model), lambda m, b: m(**b))

    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": whole(3, 4, seed=i)}
        for i, ids in enumerate(TOKENS)
    ]
    return promise(build, batches, SPOIL, precision="bf16")


@loop
def peft_lora() -> str:
    from peft import LoraConfig, get_peft_model

    def build() -> Case:
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = get_peft_model(hf_gpt2().train(), config)
        return Case(model, adamw(model), lambda m, ids: m(input_ids=ids, labels=ids).loss)

    return promise(build, TOKENS, SPOIL)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@loop
def lora_by_hand() -> str:
    """Only adapters are given to the optimizer; the rest is frozen."""

    def build() -> Case:
        model = Gpt().requires_grad_(False)
        for block in model.blocks:
            block.qkv, block.out = Lora(block.qkv), Lora(block.out)
        return Case(model, adamw(model), next_token)

    return promise(build, TOKENS, SPOIL)


@loop
def lora_over_a_base_stored_in_bf16() -> str:
    """Frozen weights may be stored in 16 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(16, 16)), nn.ReLU(), Lora(nn.Linear(16, 4)))
    for part in (model[0], model[2]):
        part.base.to(torch.bfloat16)
    case = Case(model, adamw(model), lambda m, b: m(b[0]).float().square().mean())
    case.start(precision="bf16")
    trains(case, [(normal(8, 16, seed=i),) for i in range(3)])
    skips(case, (normal(8, 16) * math.nan,))
    require(model[0].base.weight.dtype == torch.bfloat16, "the frozen base changed its dtype")
    return "adapters train over a frozen bf16 base"


@loop
def embedding_max_norm() -> str:
    """`nn.Embedding(max_norm=1)` writes its weight in forward."""

    def build() -> Case:
        model = nn.Sequential(nn.Embedding(32, 8, max_norm=0.5), nn.Flatten(), nn.Linear(96, 4))
        return Case(model, sgd(model), lambda m, ids: m(ids).square().mean())

    return promise(build, TOKENS, SPOIL)


@loop
def sparse_embedding_sparse_adam() -> str:
    """Two optimizers: SparseAdam for the table, AdamW for the rest."""

    def build() -> Case:
        model = nn.Sequential(nn.Embedding(32, 8, sparse=True), nn.Flatten(), nn.Linear(96, 4))
        both = {"sparse": torch.optim.SparseAdam(model[0].parameters(), lr=1e-2), "dense": adamw(model[2])}
        return Case(model, both, lambda m, ids: m(ids).square().mean())

    return promise(build, TOKENS, SPOIL)


@loop
def sparse_embedding_bag_sgd() -> str:
    def build() -> Case:
        model = nn.Sequential(nn.EmbeddingBag(32, 8, sparse=True), nn.Linear(8, 4))
        return Case(model, sgd(model), lambda m, ids: m(ids).square().mean())

    return promise(build, TOKENS, SPOIL)


class Experts(nn.Module):
    """Mixture of experts: a router kept in fp32, the load of each expert a buffer."""

    def __init__(self, dim: int = 64, many: int = 4) -> None:
        super().__init__()
        self.router = island(nn.Linear(dim, many))
        self.experts = nn.ModuleList(mlp(dim, 2 * dim, dim) for _ in range(many))
        self.register_buffer("load", torch.zeros(many))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).float().softmax(-1).topk(2, dim=-1)
        self.load += F.one_hot(chosen, len(self.experts)).sum((0, 1))
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * weight[rows, place, None]).to(out.dtype))
        return out


def experts_case() -> Case:
    model = Experts()
    return Case(model, adamw(model, 1e-3), lambda m, b: (m(b[0]) - b[0]).float().square().mean())


@loop
def mixture_of_experts_fp32() -> str:
    return promise(experts_case, [(normal(16, 64, seed=i),) for i in range(3)])


@loop
def mixture_of_experts_bf16_router_island() -> str:
    torch.manual_seed(0)
    case = experts_case()
    seen: list[torch.dtype] = []
    case.model.router.register_forward_hook(lambda m, a, out: seen.append(a[0].dtype))
    case.start(precision="bf16")
    trains(case, [(normal(16, 64, seed=i),) for i in range(3)])
    skips(case, (normal(16, 64) * math.nan,))
    require(set(seen) == {torch.float32}, f"the router ran in {set(seen)}")
    return f"router in fp32, {case.stepper.observed}"


@loop
def experts_that_no_token_chose() -> str:
    """Parameters without a gradient in some steps: AdamW leaves them, and so does the Stepper."""

    def build() -> Case:
        model = nn.ModuleList(mlp(16, 4) for _ in range(3))
        return Case(model, adamw(model), lambda m, b: m[b[1]](b[0]).square().mean())

    return promise(build, [(normal(4, 16, seed=i), i) for i in range(3)])


@loop
def transformer_encoder_layer_padding_mask() -> str:
    def build() -> Case:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
        return Case(model, adamw(model), lambda m, b: m(b[0], src_key_padding_mask=b[1]).square().mean())

    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:, 4:] = True
    return promise(build, [(normal(4, 6, 16, seed=i), mask) for i in range(3)])


@loop
def adaptive_softmax_from_a_loss_module() -> str:
    """The loss module has trained parameters of its own, inside the model."""

    def build() -> Case:
        model = nn.ModuleDict({"body": mlp(16, 16), "loss": nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])})
        return Case(model, adamw(model), lambda m, b: m["loss"](m["body"](b[0]), b[1]))

    return promise(build, [(normal(8, 16, seed=i), whole(20, 8, seed=i)) for i in range(3)])


@loop
def dropout_drawn_as_by_hand() -> str:
    """halfstep draws no random numbers of its own: 5 steps of dropout with one seed."""
    states = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        case = Case(model, sgd(model), lambda m, x: m(x).square().mean())
        case.start()
        drawn = generator(1)
        for _ in range(5):
            x = torch.randn(8, 16, generator=drawn)
            if ours:
                case.stepper.step(case.loss_fn, x)
            else:
                case.optimizer.zero_grad()
                case.loss_fn(model, x).backward()
                case.optimizer.step()
        states.append([*model.parameters()])
    require(all(same(a, b) for a, b in zip(*states, strict=True)), "other masks were drawn")
    return "5 steps bitwise as by hand under one seed"
