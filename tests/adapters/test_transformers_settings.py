"""Settings of transformers' Trainer that change an update: each gives the Trainer's own, or is refused by name.

The Trainer has no setting that clips by value. Its nearest way is a `_clip_grad_norm` of a subclass, or a callback at
`on_pre_optimizer_step`, with `clip_grad_value_`: both edit gradients that still carry the loss scale, and are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from halfstep.errors import UnknownName, WrongUse
from tests.adapters.test_transformers import InOrder, Ours
from tests.adapters.test_transformers_situations import TWO, language_model, tuned
from tests.support.foreign_loops import same

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 0.02
"""Small enough for every gradient of these runs to be clipped."""


def left(trainer: Any) -> dict[str, Any]:
    trainer.train()
    return {"model": dict(trainer.model.state_dict()), "optimizer": trainer.optimizer.optimizer.state_dict()}


SETTINGS: dict[str, dict[str, Any]] = {
    "norm": {"max_grad_norm": LIMIT},
    "none": {"max_grad_norm": 0.0},
    "below zero": {"max_grad_norm": -1.0},
    "an integer": {"max_grad_norm": 1},
    "infinite": {"max_grad_norm": float("inf")},
    "norm, accumulated": {"max_grad_norm": LIMIT, "case": TWO},
    "none, accumulated": {"max_grad_norm": 0.0, "case": TWO},
    "short end of the data": {"max_grad_norm": LIMIT, "gradient_accumulation_steps": 4, "max_steps": -1}
    | {"num_train_epochs": 2},
    "adafactor": {"max_grad_norm": LIMIT, "optim": "adafactor"},
    "sgd": {"max_grad_norm": LIMIT, "optim": "sgd"},
    "fused": {"max_grad_norm": LIMIT, "optim": "adamw_torch_fused"},
    "rmsprop": {"max_grad_norm": LIMIT, "optim": "rmsprop"},
    "tokens of one device": {"max_grad_norm": LIMIT, "case": TWO, "average_tokens_across_devices": False},
    "warm-up": {"max_grad_norm": LIMIT, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "decay": {"max_grad_norm": LIMIT, "weight_decay": 0.1},
}


IN_CI = ("norm", "none", "norm, accumulated", "adafactor")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[] if name in IN_CI else pytest.mark.full)
        for name, settings in SETTINGS.items()
    ],
)
def test_the_update_is_the_trainers_own_to_the_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    alone, ours = (left(tuned(tmp_path, kind, bad=0, **dict(settings))) for kind in (InOrder, Ours))
    assert same(alone, ours)


def test_clipping_makes_a_difference_here(tmp_path: Path) -> None:
    """Otherwise the test above could not tell the settings apart."""
    norm, none = (left(tuned(tmp_path, Ours, bad=0, **SETTINGS[name])) for name in ("norm", "none"))
    assert not same(norm, none)


@pytest.mark.wording
def test_a_limit_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    trainer = tuned(tmp_path, bad=0)
    trainer.args.max_grad_norm = "1.0"
    with pytest.raises(WrongUse, match=r"max_grad_norm='1\.0'"):
        trainer.train()


@pytest.mark.wording
def test_an_option_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="option 'clip_norm'"):
        Ours(language_model(), halfstep={"clip_norm": 1.0})  # type: ignore[typeddict-unknown-key]


@pytest.mark.wording
def test_a_limit_that_changes_during_training_is_refused_by_name(tmp_path: Path) -> None:
    class Tightens(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_grad_norm = 1.0 if state.global_step < 2 else 0.5

    with pytest.raises(WrongUse, match=r"max_norm=0\.5.*HalfstepMixin"):
        tuned(tmp_path, bad=0, callbacks=[Tightens()]).train()


class ByValue(Ours):
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        return torch.zeros(())


class ByAnotherNorm(Ours):
    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm, norm_type=1)


class ByAcceleratesValue(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), LIMIT)


class StepsInside(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        optimizer.optimizer.step()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("kind", "callbacks", "words"),
    [
        (ByValue, [], "between backward"),
        (ByAnotherNorm, [], "norm_type=1"),
        (Ours, [ByAcceleratesValue], "between backward"),
        (Ours, [StepsInside], "inside an open window of the Stepper"),
    ],
)
def test_other_ways_of_clipping_and_stepping_are_refused_by_name(
    tmp_path: Path, kind: type, callbacks: list[Any], words: str
) -> None:
    trainer = tuned(tmp_path, kind, bad=0, callbacks=[callback() for callback in callbacks])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(WrongUse, match=words):
        trainer.train()
    assert same(dict(trainer.model.state_dict()), before)


@pytest.mark.wording
def test_an_optimizer_that_updates_during_backward_is_refused_by_name(tmp_path: Path) -> None:
    trainer = tuned(tmp_path, bad=0)
    trainer.optimizer = LayerWiseDummyOptimizer(optimizer_dict={}, lr=0.1)
    with pytest.raises(WrongUse, match="during backward"):
        trainer.train()


@pytest.mark.wording
@pytest.mark.parametrize("limit", [LIMIT, 0.0])
def test_an_optimizer_of_some_parameters_only(tmp_path: Path, limit: float) -> None:
    """The Trainer's norm is over all gradients of the model, those that no optimizer has too."""

    def head_only(kind: type) -> Any:
        model = language_model()
        trainer = tuned(tmp_path, kind, bad=0, model=model, max_grad_norm=limit)
        trainer.optimizer = torch.optim.AdamW(model.transformer.h.parameters(), 0.01)
        return trainer

    if limit:
        with pytest.raises(WrongUse, match="trainable parameters that the optimizer does not have"):
            head_only(Ours).train()
        return
    assert same(left(head_only(InOrder)), left(head_only(Ours)))


def test_the_norm_in_the_log_is_the_trainers_own(tmp_path: Path) -> None:
    logs = []
    for kind in (InOrder, Ours):
        trainer = tuned(tmp_path, kind, bad=0, max_grad_norm=LIMIT)
        trainer.train()
        logs.append([line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line])
    assert len(logs[0]) == 6
    assert logs[0] == pytest.approx(logs[1], rel=1e-6)
