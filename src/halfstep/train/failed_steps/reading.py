"""Read a failed step from disk; everything is verified against its digests before use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.checkpoint.packing import unpack
from halfstep.checkpoint.reading import load_tensors, refuse_strangers
from halfstep.checkpoint.sealed import is_sealed, problem_with, read_bounded
from halfstep.errors import BadData, HalfstepError, StateMismatch
from halfstep.files import LARGEST_JSON, strict_json
from halfstep.precision.island import island
from halfstep.recipe.changes import SAFE
from halfstep.recipe.sources import read_bounded as read_recipe_file
from halfstep.recipe.strict_yaml import flat, read_yaml
from halfstep.step.step_inputs import Factor, StepInputs, generator_states, versions_of
from halfstep.step.sync import LossFunction
from halfstep.step.window import Window
from halfstep.train.failed_steps.places import FAILED_STEPS, RECORD, WEIGHTS, batch_of, recorded_in
from halfstep.train.failed_steps.record import FORMAT, Record, record_from
from halfstep.train.run_folder import RECIPE
from halfstep.train.weights import put_buffers, with_a_place


def read(place: Path) -> Record:
    """Return the record of a failed step.

    Raises BadData where it is damaged or forged, Unsafe where it could run code, StateMismatch for a later format.
    """
    try:
        refuse_strangers(place)
        return _read(place)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise damaged(place, error) from error


def _read(place: Path) -> Record:
    text = read_bounded(place / RECORD, LARGEST_JSON)
    content = strict_json(text)
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("no record of a failed step")
    if not is_sealed(text, content.get("seal")):
        raise ValueError("changed since it was written")
    if content["format"] != FORMAT:
        is_later = content["format"] > FORMAT
        raise StateMismatch(
            f"{place} was written in form {content['format']} by {'a later' if is_later else 'an earlier'} halfstep",
            allowed=f"form {FORMAT}",
            do="pip install --upgrade halfstep" if is_later else "replay it with the version that wrote it",
        )
    return record_from(content, place)


def tensors_of(record: Record, name: str) -> dict[str, Tensor]:
    """Return the tensors of one of its files after verifying every byte; raise BadData where one differs."""
    try:
        problem = problem_with(record.path, record.files[name])
        if problem is not None:
            raise ValueError(problem)
        return load_tensors(record.path / name)
    except Exception as error:
        # A forged file may raise anything: TypeError, OverflowError, RuntimeError, ...
        if isinstance(error, HalfstepError):
            raise
        raise damaged(record.path, error) from error


def cut_off(record: Record) -> str | None:
    """Return which file has another size than it was written with, without reading any; None where all fit."""
    for sealed in record.files.values():
        try:
            if (record.path / sealed.name).lstat().st_size != sealed.size:
                return f"{sealed.name} has another size than it was written with"
        except OSError as error:
            return f"{sealed.name}: {error.strerror}"
    return None


def damaged(place: Path, error: Any) -> BadData:
    """Return the error for a failed step that cannot be used."""
    words = str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
    return BadData(
        f"{place} cannot be used: {words}",
        allowed="a failed step as halfstep wrote it",
        do=_another(place),
    )


def _another(place: Path) -> str:
    """Return how to choose an older step: following this advice repeatedly comes to an end."""
    run = run_of(place)
    older = [path.name for path in recorded_in(run) if path.name < place.name]
    if older:
        return f"choose another one: halfstep replay {run} --attempt {int(older[-1])}"
    return "nothing: no older one is recorded; the next step that fails is recorded anew"


def run_of(place: Path) -> Path:
    """Return the folder of the run that a failed step belongs to."""
    # A relative path such as `000123` has no parents to look at.
    place = place if len(place.parts) > 2 else place.absolute()
    return place.parent.parent if place.parent.name == FAILED_STEPS else place


def recipe_digest(run: Path) -> str:
    """Return a SHA-256 of the settings that affect the computation; empty where the run has no recipe."""
    try:
        settings = read_yaml(read_recipe_file(run / RECIPE), RECIPE)
    except HalfstepError:
        return ""
    kept = {key: value for key, value in flat(settings) if not key.startswith(tuple(SAFE))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


# -- loading ----------------------------------------------------------------------------------------------------------
# Load a failed step into a model: its weights, buffers, batch and random state.


GENERATORS = "step/generators/"
"""The prefix of random states, which stay on the host."""


@contextmanager
def _of_a_step(record: Record) -> Iterator[None]:
    """Raise BadData for any error that a forged record causes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise damaged(record.path, error) from error


def load_model(record: Record, model: nn.Module) -> None:
    """Load the weights, buffers and islands of the step; raise StateMismatch where they belong to another model."""
    with _of_a_step(record):
        found = tensors_of(record, WEIGHTS)
        parameters = dict(model.named_parameters())
        _refuse_another_model(record, model, parameters, found)
        device = next(iter(parameters.values())).device
        with torch.no_grad():
            for name, parameter in parameters.items():
                # In the dtype that was recorded, and in this model's memory format.
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


def load_attempt(record: Record, rank: int, loss_fn: LossFunction, device: torch.device) -> StepInputs:
    """Return the step of one rank, ready to run again; raise BadData where its record is damaged."""
    with _of_a_step(record):
        found = tensors_of(record, batch_of(rank))
        placed = {name: t if name.startswith(GENERATORS) else t.to(device) for name, t in found.items()}
        own = unpack(record.batches[rank], placed, str(record.path))
        microbatches = Window(own["microbatches"])
        return StepInputs(
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
    """Return the random states; those of another kind of device are replaced by this device's own."""
    here = generator_states(device)
    fitting = [own.shape == found.shape and own.dtype == found.dtype for own, found in zip(here, states, strict=False)]
    if not fitting or not fitting[0]:
        raise ValueError("no random numbers of torch's")
    return [states[n] if n < len(fitting) and fitting[n] else own for n, own in enumerate(here)]
