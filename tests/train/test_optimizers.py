"""Optimizers by name: each is torch's own, trains, and takes what a recipe says of it."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import BadRecipe
from halfstep.recipe.schema import OptimizerOptions
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.optimizers import count_optimizer_moments, describe_optimizer_split, make_optimizer

NAMES = get_args(OptimizerOptions.model_fields["name"].annotation)
REFUSED = {"lbfgs", "sparseadam"}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_in_bf16(name: str, fused: bool) -> None:
    assert len(NAMES) >= 10
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    options = OptimizerOptions(name=name, lr=0.01, weight_decay=0.1, momentum=0.8, fused=fused)  # type: ignore[arg-type]
    optimizer = make_optimizer(options, model)
    assert type(optimizer).__name__.lower() == {"muon": "muonwithadamw"}.get(name, name)
    if name != "rprop":  # the only one without a decay
        matrices = [0.1, 0.1] if name == "muon" else [0.1]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [*matrices, 0.0]
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    group = optimizer.param_groups[0]
    assert group["betas"][0] == 0.8 if "betas" in group else group.get("momentum", 0.8) == 0.8
    stepper = halfstep.Stepper(model, optimizer, precision="bf16")
    x = torch.randn(16, 8)
    losses = [stepper.step(lambda model, x: (model(x) - 1).float().square().mean(), x).loss for _ in range(20)]
    assert losses[-1] < losses[0]


def test_every_optimizer_of_torch_has_a_name_or_a_reason() -> None:
    kinds = {
        kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }
    assert {kind.__name__.lower() for kind in kinds} == {*NAMES, *REFUSED}


@pytest.mark.wording
@pytest.mark.parametrize("name", ["lbfgs", "LBFGS", "sparseadam", "SparseAdam"])
def test_what_cannot_train_here_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        resolve_run_recipe(read_recipe("segmentation_tiny"), {"optimizer.name": name})
    assert "gradients" in caught.value.given or "several times" in caught.value.given
    assert "adamw" in caught.value.do


def test_the_names_of_torchs_classes_are_understood() -> None:
    assert resolve_run_recipe(read_recipe("segmentation_tiny"), ["--optim", "AdamW"]).recipe.optimizer.name == "adamw"
    assert resolve_run_recipe(read_recipe("segmentation_tiny"), ["optimizer.name=Muon"]).recipe.optimizer.name == "muon"


# -- muon -------------------------------------------------------------------------------------------------------------


def _words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))


def _options(name: str = "muon") -> OptimizerOptions:
    return OptimizerOptions(name=name, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]


def _update(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    (model(torch.randint(0, 11, (16,))) - 1).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest_as_two_optimizers_would() -> None:
    one, two = _words(), _words()
    both = make_optimizer(_options(), one)
    embedding, first, bias, last = two.parameters()
    muon = torch.optim.Muon([first], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [embedding, last]}, {"params": [bias], "weight_decay": 0.0}], lr=0.01, weight_decay=0.1, fused=True
    )
    for _ in range(3):
        _update(one, both)
        _update(two, muon, adamw)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert count_optimizer_moments(_options()) == 2


def test_muon_goes_on_from_its_saved_state_bit_for_bit() -> None:
    model, other = _words(), _words()
    optimizer = make_optimizer(_options(), model)
    _update(model, optimizer)
    again = make_optimizer(_options(), other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    for group in (*optimizer.param_groups, *again.param_groups):
        group["lr"] = 0.005  # as a schedule sets it
    _update(model, optimizer)
    _update(other, again)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(
        next(iter(again.state.values()))["momentum_buffer"], optimizer.state[model[1].weight]["momentum_buffer"]
    )


def test_a_skipped_step_leaves_muon_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    stepper = halfstep.Stepper(model, make_optimizer(_options(), model), precision="fp32")
    before = [p.clone() for p in model.parameters()]
    report = stepper.step(lambda model, x: model(x).mean() * float("nan"), torch.randn(4, 8))
    assert not report.applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(optimizer.state for optimizer in stepper.optimizers.values())


def test_without_other_parameters_muon_is_torchs_own() -> None:
    class Hidden(nn.Sequential):
        def get_classifier(self) -> nn.Module:
            return nn.Identity()

    model = Hidden(nn.Linear(4, 4, bias=False))
    assert type(make_optimizer(_options(), model)) is torch.optim.Muon
    assert describe_optimizer_split(_options(), model) == ["Muon: 1 matrix of hidden layers; AdamW: none"]
    assert not describe_optimizer_split(_options("adamw"), model)
