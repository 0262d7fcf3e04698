"""A run with a policy by module, from a recipe: what it converts, what it saves, and what it refuses on resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import halfstep
from halfstep.errors import PrecisionRefused, StateMismatch, Stopped
from halfstep.train.run import Run
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

pytest.importorskip("torchao")

POLICY = '{default: bf16, "2": fp8, "4": fp32}'


class Wider(Tiny):
    stop_at = 0
    batches = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
        self.batches += 1
        if self.batches == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class Stopping(Wider):
    stop_at = 7


def fit(folder: Path, policy: str = POLICY, task: Any = Wider, **settings: Any) -> Run:
    folder.mkdir(exist_ok=True)
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.replace("precision: fp32", f"precision: {policy}"))
    changed = {"run.dir": str(folder / "run"), "train.strict": True, "train.check": False, **settings}
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True)


def test_a_policy_is_converted_saved_plain_and_resumed_to_the_bit(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = fit(whole)
    (start,) = events(run.dir, "start")
    assert start["precision"]["converted"] == {"2": "fp8"}
    assert start["precision"]["chosen"] == "bf16; 2=fp8; 4=fp32"
    seen, *_ = events(run.dir, "precision_check")
    assert "in fp8" in seen["text"]
    with pytest.raises(Stopped):
        fit(cut, task=Stopping)
    resumed = fit(cut)
    one, other = (load_file(folder.dir / "last.safetensors") for folder in (run, resumed))
    assert set(one) == set(Wider.model(None).state_dict())  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_conversion_is_refused_on_resume(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        fit(tmp_path, task=Stopping)
    with pytest.raises(StateMismatch):
        fit(tmp_path, '{default: bf16, "2": fp8-rowwise, "4": fp32}')


def test_a_precision_on_the_line_replaces_the_default(tmp_path: Path) -> None:
    narrow, wide = fit(tmp_path / "narrow", bf16=True), fit(tmp_path / "wide", precision="fp32")
    chosen = [events(run.dir, "start")[0]["precision"] for run in (narrow, wide)]
    assert [each["chosen"] for each in chosen] == ["bf16; 2=fp8; 4=fp32", "fp32; 2=fp8; 4=default"]
    assert [each["converted"] for each in chosen] == [{"2": "fp8"}] * 2


@pytest.mark.wording
def test_a_pattern_that_matches_nothing_stops_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(PrecisionRefused, match="output"):
        fit(tmp_path, "{default: bf16, output: fp8}")
