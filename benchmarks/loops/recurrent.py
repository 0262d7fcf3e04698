"""Recurrent networks: state that goes from step to step, packed sequences, speech."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import halfstep
from benchmarks.loops.harness import SPOIL, Case, adamw, loop, normal, promise, require, sgd, skips, whole
from benchmarks.loops.language import TOKENS, next_token
from halfstep import Stepper


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(32, 8), getattr(nn, kind)(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0])


def recurrent_case(kind: str) -> Any:
    def build() -> Case:
        model = Recurrent(kind)
        return Case(model, adamw(model), next_token, options={"clip_norm": 0.25})

    return build


@loop
def lstm_fp32() -> str:
    return promise(recurrent_case("LSTM"), TOKENS, SPOIL)


@loop
def gru_fp32() -> str:
    return promise(recurrent_case("GRU"), TOKENS, SPOIL)


@loop
def lstm_in_bf16_is_counted() -> str:
    """An LSTM's work is counted: where it runs in fp32 although bf16 was asked for, the step says so."""
    torch.manual_seed(0)
    model = nn.LSTM(32, 32)
    stepper = Stepper(model, sgd(model), precision="bf16")
    try:
        stepper.step(lambda m, x: m(x)[0].float().square().mean(), normal(6, 4, 32))
    except halfstep.HalfstepError as refusal:
        return f"counted, and refused: {str(refusal).splitlines()[0][:70]}"
    require("no matrix product" not in str(stepper.observed), f"not counted: {stepper.observed}")
    return f"counted: {stepper.observed}"


@loop
def packed_sequences() -> str:
    def loss(m: nn.ModuleDict, batch: Any) -> Tensor:
        x, lengths = batch
        out, _ = m["rnn"](pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return m["head"](pad_packed_sequence(out, batch_first=True)[0]).square().mean()

    def build() -> Case:
        model = nn.ModuleDict({"rnn": nn.GRU(8, 8, batch_first=True), "head": nn.Linear(8, 2)})
        return Case(model, adamw(model), loss)

    return promise(build, [(normal(3, 5, 8, seed=i), torch.tensor([5, 2, 4])) for i in range(3)])


@loop
def truncated_bptt_hidden_as_buffer() -> str:
    """The hidden state goes from step to step as a buffer that forward rebinds: a skip gives the old one back."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 2)
            self.register_buffer("hidden", torch.zeros(1, 3, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            out, hidden = self.rnn(x, self.hidden)
            self.hidden = hidden.detach()
            return self.head(out)

    def build() -> Case:
        model = Stateful()
        return Case(model, adamw(model), lambda m, b: m(b[0]).square().mean())

    return promise(build, [(normal(3, 5, 8, seed=i),) for i in range(4)])


@loop
def truncated_bptt_hidden_in_a_python_variable() -> str:
    """The usual spelling, the state a Python variable of the loop: the loop decides with `report.applied`."""
    torch.manual_seed(0)
    model = nn.GRU(8, 8, batch_first=True)
    case = Case(model, adamw(model), None)  # type: ignore[arg-type]
    stepper = case.start()
    hidden = torch.zeros(1, 3, 8)
    for i in range(4):
        x = normal(3, 5, 8, seed=i) * (math.nan if i == 2 else 1.0)

        def loss(m: nn.Module, x: Tensor, hidden: Tensor = hidden) -> halfstep.Out:
            out, new = m(x, hidden)
            return halfstep.Out(out.square().mean(), aux=new)

        report = stepper.step(loss, x)
        hidden = report.aux if report.applied else hidden
    require(bool(hidden.isfinite().all()) and report.applied, "a bad hidden state went on")
    return "report.aux carries the state, report.applied guards it"


@loop
def ctc_speech() -> str:
    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logits = m(x)[0].float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, y, torch.full((4,), 10), torch.full((4,), 3))

    def build() -> Case:
        model = nn.LSTM(8, 6, batch_first=True)
        return Case(model, adamw(model), loss)

    return promise(build, [(normal(4, 10, 8, seed=i), 1 + whole(5, 4, 3, seed=i)) for i in range(3)])


@loop
def ctc_impossible_alignment_is_skipped() -> str:
    """A label longer than its audio: torch's loss is inf, and zero_infinity was not set."""
    torch.manual_seed(0)
    model = nn.Linear(8, 6)

    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logits = m(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, y, torch.full((4,), x.shape[1]), torch.full((4,), y.shape[1]))

    case = Case(model, adamw(model), loss)
    case.start()
    report = skips(case, (normal(4, 3, 8), 1 + whole(5, 4, 9)), ("loss_not_finite",))
    return f"skipped with loss {report.loss}"
