"""Build the optimizer that a recipe names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from halfstep.errors import WrongUse
from halfstep.recipe.schema import OptimizerOptions
from halfstep.train.hidden_matrices import divide_parameters

if TYPE_CHECKING:
    from halfstep.step.small_optimizers import ParameterGroup

_KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "sgd": optim.SGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adafactor": optim.Adafactor,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
}
_WITH_BETAS = ("adamw", "adam", "nadam", "radam", "adamax")
# Those of torch that accept `fused`.
_WITH_FUSED = ("adamw", "adam", "sgd", "adagrad")


def make_optimizer(options: OptimizerOptions, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer, with fused kernels where requested and available.

    Raises `WrongUse` for muon and a model without a trainable matrix in a hidden layer.
    """
    if options.name == "muon" and options.state == "fp32":
        return _make_muon(options, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if options.state != "fp32":
        from halfstep.step.small_optimizers import (  # not loaded by other runs
            build_low_bit_adam,
            group_low_bit_parameters,
        )

        arguments = {"lr": options.lr, "weight_decay": options.weight_decay, "betas": (options.momentum, 0.999)}
        return build_low_bit_adam(options.name, options.state, group_low_bit_parameters(model, trained), **arguments)
    return _make_grouped_optimizer(options, _group_by_decay(trained))


def _make_grouped_optimizer(options: OptimizerOptions, groups: list[ParameterGroup]) -> optim.Optimizer:
    arguments: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name == "sgd":
        arguments |= {"momentum": options.momentum, "nesterov": options.momentum > 0}
    elif options.name == "rmsprop":
        arguments["momentum"] = options.momentum
    elif options.name == "rprop":
        del arguments["weight_decay"]
        groups = [{"params": [p for group in groups for p in group["params"]]}]
    elif options.name in _WITH_BETAS:
        # The recipe has one momentum for all optimizers; beta2 stays at torch's default.
        arguments["betas"] = (options.momentum, 0.999)
    if options.fused and options.name in _WITH_FUSED:
        try:
            return _KINDS[options.name](groups, fused=True, **arguments)
        except RuntimeError:  # raised by torch where the device has no fused kernel
            pass
    return _KINDS[options.name](groups, **arguments)


class MuonWithAdamW(optim.Optimizer):
    """Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

    Both work on this optimizer's own groups and state, so that it is saved, restored and scheduled as any other is.
    """

    def __init__(self, muon: optim.Muon, adamw: optim.Optimizer) -> None:
        self.parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore groups and state; torch replaces both objects."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        muon, adamw = self.parts
        muon.param_groups = [group for group in self.param_groups if "ns_steps" in group]
        adamw.param_groups = [group for group in self.param_groups if "betas" in group]
        muon.state = adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def _make_muon(options: OptimizerOptions, model: nn.Module) -> optim.Optimizer:
    found = divide_parameters(model)
    if not found.hidden:
        raise WrongUse(
            f"optimizer.name=muon for {type(model).__name__}, which has no trainable matrix in a hidden layer: "
            f"{', '.join(found.names) or 'all of its parameters are frozen'}",
            allowed="a model with linear, attention or recurrent layers before its output layer",
            do="write optimizer.name=adamw",
            id="no-hidden-matrix",
        )
    return _build_muon_with_adamw(options, found.hidden, found.others)


def _build_muon_with_adamw(
    options: OptimizerOptions, hidden: list[nn.Parameter], others: list[nn.Parameter]
) -> optim.Optimizer:
    # match_rms_adamw: updates as large as AdamW's, so that one learning rate and one decay serve both.
    muon = optim.Muon(
        [{"params": hidden}],
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        nesterov=options.momentum > 0,
        adjust_lr_fn="match_rms_adamw",
    )
    if not others:
        return muon
    adamw = options.model_copy(update={"name": "adamw"})
    return MuonWithAdamW(muon, _make_grouped_optimizer(adamw, _group_by_decay(others)))


def describe_optimizer_split(options: OptimizerOptions, model: nn.Module) -> list[str]:
    """Return a line about the division of the weights between two optimizers; nothing for a single one."""
    return [str(divide_parameters(model))] if options.name == "muon" else []


def count_optimizer_moments(options: OptimizerOptions) -> float:
    """Return how many fp32 numbers the optimizer keeps for each element of a weight, from a step with tiny ones."""
    if options.state != "fp32":
        return 2 / 4
    # Zeros, not a layer with random weights: a run's generators stay as they are.
    tiny = nn.ParameterList([torch.zeros(5, 3), torch.zeros(5, 3, 1)])
    for weight in tiny:
        weight.grad = torch.zeros_like(weight)
    if options.name == "muon":
        optimizer = _build_muon_with_adamw(options, [tiny[0]], [tiny[1]])
    else:
        optimizer = make_optimizer(options, tiny)
    optimizer.step()
    kept = ([v.shape for v in optimizer.state[weight].values() if torch.is_tensor(v)] for weight in tiny)
    # The most of any: muon keeps fewer for a matrix than AdamW does for the rest.
    return max(shapes.count(weight.shape) for weight, shapes in zip(tiny, kept, strict=True))


def _group_by_decay(trained: list[nn.Parameter]) -> list[ParameterGroup]:
    """Return parameter groups without weight decay for vectors, such as biases and scales of normalization."""
    groups: list[ParameterGroup] = [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
