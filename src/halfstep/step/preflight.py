"""What can be known to be wrong before a step, said then and by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from halfstep import world
from halfstep.errors import TornUpdate, WrongUse
from halfstep.finding import Finding
from halfstep.formats import is_narrow
from halfstep.step.roster import owned_by


def check(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[Finding]:
    """Refuse what would train nothing, or train it wrongly in silence; find what probably will."""
    names = {id(p): name for name, p in model.named_parameters()}
    for lane, optimizer in optimizers.items():
        _check_closure(lane, optimizer)
        trained = [p for p in owned_by(optimizer) if p.requires_grad]
        _check_belongs(lane, trained, names)
        _check_there(trained, names)
        _check_wide(trained, names)
    _check_distinct(optimizers, names)
    return _stale(model, optimizers)


def idle_island(path: str) -> Finding:
    evidence = f"nothing ran in the island {path!r}: its weights are used elsewhere, in the precision of the run"
    return Finding("island.idle", "warning", evidence, "make the module that uses them an island")


def check_surroundings(device: torch.device) -> None:
    """Refuse a step where nothing would be learned, whatever it computes."""
    if torch.is_autocast_enabled(device.type):
        raise WrongUse(
            "a step inside torch.autocast, which keeps using the weights that it cast first",
            allowed="autocast round the forward pass only, which halfstep opens by itself",
            do="take the loop out of `with torch.autocast(...)`",
        )
    if not torch.is_grad_enabled():
        raise WrongUse(
            "a step under torch.no_grad() or inference_mode()",
            allowed="a step where gradients are recorded",
            do="take the training loop out of it",
        )


def check_window(*, torn: bool, in_one: bool, empty: bool) -> None:
    """Refuse to begin a window, or to change what it would run in, where that cannot be."""
    if torn:
        raise TornUpdate(
            "an optimizer, schedule or average raised during the last update: the weights are neither old nor new",
            do="load the last checkpoint into a new Stepper",
        )
    if in_one or empty:
        raise WrongUse(
            "step() in the middle of an open window" if in_one else "a Window without micro-batches",
            allowed="one window at a time, of one micro-batch or more",
            do="stepper.apply() or stepper.discard() first" if in_one else "skip empty windows",
        )


def _check_closure(lane: str, optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    if needed or isinstance(optimizer, torch.optim.LBFGS):
        raise WrongUse(
            f"optimizer {lane!r} is {type(optimizer).__name__}, which evaluates the loss several times an update",
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


def _check_there(trained: list[torch.Tensor], names: Mapping[int, str]) -> None:
    meta = [names.get(id(p), "?") for p in trained if p.is_meta]
    if meta:
        raise WrongUse(
            f"{', '.join(meta[:5])} on the meta device, which holds no numbers",
            allowed="parameters on a device that computes",
            do="model.to_empty(device=...) and load the weights, then build the optimizer",
        )
    foreign = sum(id(p) not in names for p in trained)
    if foreign and world.size() > 1:
        raise WrongUse(
            f"{foreign} parameters in the optimizer that are not the model's, on several processes",
            allowed="parameters of the model, whose gradients are synchronised",
            do="make the module that holds them (a loss with weights, say) a part of the model",
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
    held = {id(p) for optimizer in optimizers.values() for p in owned_by(optimizer)}
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
        for p in owned_by(optimizer):
            if owner.setdefault(id(p), lane) != lane:
                raise WrongUse(
                    f"{names.get(id(p), 'a parameter')} belongs to optimizers {owner[id(p)]!r} and {lane!r}",
                    allowed="each parameter in one optimizer",
                    do="split the parameters",
                )
