"""What can be known to be wrong before the first step, said then and by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.formats import is_narrow


def check(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Finding]:
    """Refuse what would train nothing, or train it wrongly in silence; find what probably will."""
    names = {id(p): name for name, p in model.named_parameters()}
    for lane, optimizer in optimizers.items():
        _check_closure(lane, optimizer)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        _check_belongs(lane, trained, names)
        _check_wide(trained, names)
    _check_distinct(optimizers, names)
    return _stale(model, optimizers)


def _check_closure(lane: str, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise WrongUse(
            f"optimizer {lane!r} is LBFGS, which evaluates the loss several times an update",
            allowed="optimizers that step once from given gradients",
            do="use AdamW, SGD or another first-order optimizer",
        )


def _check_belongs(lane: str, trained: list[torch.Tensor], names: Mapping[int, str]) -> None:
    if not any(id(p) in names for p in trained):
        raise WrongUse(
            f"optimizer {lane!r} holds {len(trained)} trainable parameters, none of them of this model",
            allowed="an optimizer over parameters of the model that require a gradient",
            do="build the optimizer after the model is final: optim.AdamW(model.parameters())",
        )


def _check_wide(trained: list[torch.Tensor], names: Mapping[int, str]) -> None:
    narrow = [names.get(id(p), "(not of the model)") for p in trained if is_narrow(p.dtype)]
    if narrow:
        more = f" and {len(narrow) - 5} more" if len(narrow) > 5 else ""
        raise WrongUse(
            f"trainable weights stored in 16 bits: {', '.join(narrow[:5])}{more}",
            allowed="16-bit storage for frozen weights only; small updates to trained ones would round away",
            do="model.float() before building the optimizer, or load with dtype=torch.float32",
        )


def _stale(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Finding]:
    """Parameters of another model in an optimizer, while some of this one's are in none: a part was replaced."""
    held = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
    own = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    left_out = [name for key, name in own.items() if key not in held]
    foreign = len(held - {id(p) for p in model.parameters()})
    if not (left_out and foreign):
        return []
    evidence = f"the optimizer holds {foreign} parameters of another model and leaves out {', '.join(left_out[:5])}"
    return [Finding("optimizer.stale", "warning", evidence, "build the optimizer after the model is final")]


def _check_distinct(optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    owner: dict[int, str] = {}
    for lane, optimizer in optimizers.items():
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if owner.setdefault(id(p), lane) != lane:
                raise WrongUse(
                    f"{names.get(id(p), 'a parameter')} belongs to optimizers {owner[id(p)]!r} and {lane!r}",
                    allowed="each parameter in one optimizer",
                    do="split the parameters",
                )
