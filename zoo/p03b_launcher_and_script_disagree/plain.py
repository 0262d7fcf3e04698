"""transformers' Trainer with mixed precision left off in the script, under a launcher that says bf16."""

from __future__ import annotations

import os
import tempfile
import warnings
from unittest import mock

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

LAUNCHER = {"ACCELERATE_MIXED_PRECISION": "bf16"}
SCRIPT = {"bf16": False, "fp16": False}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.ran: set[torch.dtype] = set()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layer(x)
        self.ran.add(out.dtype)
        return {"loss": nn.functional.cross_entropy(out.float(), labels)}


def run() -> Outcome:
    data = [{"x": torch.ones(4), "labels": number % 2} for number in range(4)]
    model = Model()
    with mock.patch.dict(os.environ, LAUNCHER), tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _train(model, data, folder)
    ran = ", ".join(map(str, model.ran))
    return Outcome(
        good=ran == "torch.float32",
        seen=f"the script says bf16={SCRIPT['bf16']} and fp16={SCRIPT['fp16']}, the launcher "
        f"{LAUNCHER['ACCELERATE_MIXED_PRECISION']}; the layer computed in {ran}",
        word="the launcher, in silence",
    )


def _train(model: nn.Module, data: list[dict[str, object]], folder: str) -> None:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    AcceleratorState._reset_state(True)
    silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(folder, use_cpu=True, max_steps=1, **silent, **SCRIPT)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
