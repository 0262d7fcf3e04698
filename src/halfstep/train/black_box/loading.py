"""A failed step put back into a model: its weights and buffers, its batch, and its random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError, StateMismatch
from halfstep.precision.island import island
from halfstep.step.attempt import Attempt, Factor, generator_states, versions_of
from halfstep.step.synchronise import LossFunction
from halfstep.step.window import Window
from halfstep.train.black_box.places import WEIGHTS, batch_of
from halfstep.train.black_box.reading import damaged, tensors_of
from halfstep.train.black_box.record import Record
from halfstep.train.checkpoint.packing import unpack
from halfstep.train.fleeting import put_buffers, with_a_place

GENERATORS = "step/generators/"
"""How the names of random numbers begin, which stay in the main memory."""


@contextmanager
def _of_a_step(record: Record) -> Iterator[None]:
    """A record that was made up ends in whatever stumbles over it, which is then told as what it is."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise damaged(record.path, error) from error


def load_model(record: Record, model: nn.Module) -> None:
    """Weights, buffers and islands as they were in the step. StateMismatch where they are another model's."""
    with _of_a_step(record):
        found = tensors_of(record, WEIGHTS)
        parameters = dict(model.named_parameters())
        _refuse_another_model(record, model, parameters, found)
        device = next(iter(parameters.values())).device
        with torch.no_grad():
            for name, parameter in parameters.items():
                # In the format that it was kept in, and laid out as this model's is.
                parameter.data = torch.empty_like(parameter.data, dtype=found[name].dtype).copy_(found[name])
            buffers = {name: tensor.to(device) for name, tensor in found.items() if name not in parameters}
            put_buffers(model, buffers, record.fleeting)
        for path in record.islands:
            island(model, path) if path else island(model)


def _refuse_another_model(
    record: Record, model: nn.Module, parameters: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    own = {**parameters, **dict(model.named_buffers())}
    come = with_a_place(model, [name for name in record.fleeting if name in found])
    missing = [name for name in own if name not in found and name not in come]
    other = [name for name in found if name not in own and name not in come]
    shapes = [
        name for name, tensor in own.items() if name in found and name not in come and not _alike(tensor, found[name])
    ]
    if missing or other or shapes:
        first = (missing + other + shapes)[0]
        raise StateMismatch(
            f"{record.path} was kept of another model: {len(missing)} of its tensors are missing, {len(other)} are not "
            f"in it, {len(shapes)} have another shape; the first is {first}",
            allowed="the model that the run was trained with",
            do="bring back the recipe, the versions and the task's file that the run was made with",
        )


def _alike(own: Tensor, found: Tensor) -> bool:
    return own.shape == found.shape and own.is_floating_point() == found.is_floating_point()


def load_attempt(record: Record, rank: int, loss_fn: LossFunction, device: torch.device) -> Attempt:
    """The step of one process, ready to be run again."""
    with _of_a_step(record):
        found = tensors_of(record, batch_of(rank))
        placed = {name: t if name.startswith(GENERATORS) else t.to(device) for name, t in found.items()}
        own = unpack(record.batches[rank], placed, str(record.path))
        microbatches = Window(own["microbatches"])
        return Attempt(
            loss_fn,
            microbatches,
            own["only"],
            _for_this_device(own["generators"], device),
            {str(name): _factor(*factor) for name, factor in own["factors"].items()},
            versions_of(microbatches),
        )


def _factor(scale: Any, base: Any) -> Factor:
    return Factor(float(scale), None if base is None else float(base))


def _for_this_device(states: list[Tensor], device: torch.device) -> list[Tensor]:
    """Those of another kind of device mean nothing on this one."""
    here = generator_states(device)
    fitting = [own.shape == found.shape and own.dtype == found.dtype for own, found in zip(here, states, strict=False)]
    if not fitting or not fitting[0]:
        raise ValueError("no random numbers of torch's")
    return [states[n] if n < len(fitting) and fitting[n] else own for n, own in enumerate(here)]
