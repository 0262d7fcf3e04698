"""Repaired samples run to their end on a CPU: a repair may parse, and still raise, as a second `unscale_` would."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.doctor.code import check_code
from halfstep.doctor.located import apply_line_edits

CORPUS = Path(__file__).parent / "corpus_code"
BATCHES = list(torch.randn(8, 2, 4))
PAIRS = [(x, torch.rand(2, 4)) for x in BATCHES]


class Mean(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()  # type: ignore[no-any-return]


class Average:
    def update(self, model: nn.Module) -> None:
        pass


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.1)


def schedule(names: dict[str, Any]) -> None:
    model = Mean()
    optimizer = sgd(model)
    names["train"](model, BATCHES, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), Average())


def clip(names: dict[str, Any]) -> None:
    model, scaler = Mean(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    for batch in BATCHES:
        names["update"](scaler, model(batch), model, optimizer)


def pairs(*more: Any) -> Callable[[dict[str, Any]], None]:
    def run(names: dict[str, Any]) -> None:
        model = nn.Linear(4, 4)
        names["train"](model, PAIRS, sgd(model), *more)

    return run


def gan(names: dict[str, Any]) -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    names["train"](generator, critic, BATCHES, sgd(generator), sgd(critic))


def segment(names: dict[str, Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert names["dice_bce"](torch.rand(2, 1, 4, 4), torch.ones(2, 1, 4, 4)).isfinite()


RUNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "autocast_round_loop/train.py": bool,
    "eps_in_fp16/train.py": bool,
    "fp16_without_scaler/train.py": lambda names: names["main"](),
    "function_without_custom_fwd/ops.py": bool,
    "old_spelling/train.py": bool,
    "scaler_never_updated/train.py": bool,
    "bf16_in_a_main_block/train.py": bool,
    "ema_in_bf16/train.py": bool,
    "half_weights/finetune.py": bool,
    "schedule_every_iteration/train.py": bool,
    "schedule_every_iteration/flow.py": schedule,
    "clip_before_unscale/values.py": clip,
    "backward_in_autocast/train.py": pairs(),
    "unscale_in_every_microbatch/train.py": pairs(2),
    "gan_with_a_step_too_many/train.py": gan,
    "bce_under_autocast/segment.py": segment,
}
"""Samples that a CPU can run, with what is called in them after the file itself."""


def mended(name: str) -> str:
    """The sample with one repair after the other, for a CPU."""
    text = (CORPUS / name).read_text()
    for _ in range(10):
        mendable = [finding for finding in check_code(name, text) if finding.edits]
        text = apply_line_edits(text, mendable[0].edits) if mendable else text
    return text.replace(".cuda()", "").replace('"cuda"', '"cpu"')


@pytest.mark.parametrize("name", sorted(RUNS))
def test_repaired_code_runs(name: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch warns of a schedule that is stepped first, where the first step of fp16 is skipped.
        warnings.simplefilter("ignore")
        exec(compile(mended(name), name, "exec"), names)
        RUNS[name](names)


def test_the_loop_that_was_frozen_learns() -> None:
    """autocast around the loop: the loss of every step is that of the first, until it is repaired."""
    losses = {}
    broken = (CORPUS / "autocast_round_loop" / "train.py").read_text()
    for kind, text in (("broken", broken), ("mended", mended("autocast_round_loop/train.py"))):
        seen: list[float] = []
        torch.manual_seed(0)
        code = text.replace(".cuda()", "").replace('"cuda"', '"cpu"')
        exec(compile(code, kind, "exec"), {"print": seen.append})
        losses[kind] = seen
    assert losses["broken"][-1] == losses["broken"][0]
    assert losses["mended"][-1] < 0.5 * losses["mended"][0]
