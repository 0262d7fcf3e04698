"""Read a failed step from disk: its record with every field checked, its tensors verified against their digests.

A failed step is stored like a checkpoint: `failed_steps/step-00000123.0001` holds attempt 123, with a manifest written
last. The JSON of rank 0 holds the record and that rank's inputs; its tensors include the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer
from torch import Tensor, nn

from halfstep.checkpoint.packing import unpack_state
from halfstep.checkpoint.paths import CheckpointDir, list_generations
from halfstep.checkpoint.reading import load_tensors, refuse_unsafe_files
from halfstep.checkpoint.sealed import (
    Manifest,
    find_file_defect,
    name_state_file,
    name_tensors_file,
    read_bounded,
    read_manifest,
)
from halfstep.errors import (
    BadData,
    HalfstepError,
    PrecisionRefused,
    StateMismatch,
    check_same_form,
    choose_caller_wording,
)
from halfstep.files import LARGEST_JSON, parse_strict_json
from halfstep.guard.verdict import StepHistory, Verdict
from halfstep.precision.island import island
from halfstep.precision.select import Choice, choose_precision
from halfstep.random_state import collect_torch_rng_states
from halfstep.step.report import StepReport
from halfstep.step.saved_tensors import put_buffers, select_assignable_buffers, select_saved_parameters
from halfstep.step.step_inputs import LossFactors, StepInputs, list_batch_versions
from halfstep.step.sync import LossFunction
from halfstep.step.window import Window

FAILED_STEPS = "failed_steps"
"""The folder of failed steps in a run's folder."""
_FORM_1, _FORM_2 = "trouble", "failed_step.json"
"""The folder of form 1, and the file of each step in form 2; neither is read any more."""


def list_failed_steps(run: Path) -> list[CheckpointDir]:
    """Return the failed steps of a run, in the order of their attempts; empty if there are none."""
    if (run / FAILED_STEPS).is_symlink():
        return []
    found = [one for one in list_generations(run / FAILED_STEPS) if not one.path.is_symlink()]
    return sorted(found, key=lambda one: (one.attempt, one.number))


def find_failed_step(place: Path) -> CheckpointDir | None:
    """Return the failed step in this folder; None if the folder is not one of a failed step."""
    run = resolve_run_folder(place)
    return next((one for one in list_failed_steps(run) if run != place and one.name == place.name), None)


def resolve_run_folder(place: Path) -> Path:
    """Return the folder of the run that a failed step belongs to; any other folder is returned as it is."""
    # A relative path such as `step-00000123.0001` has no parents to look at.
    step = place if len(place.parts) > 2 else place.absolute()
    return step.parent.parent if step.parent.name == FAILED_STEPS else place


def check_failed_steps_folder(run: Path) -> None:
    """Raise OSError if the folder is a link or a file: its content was not written by the run."""
    place = run / FAILED_STEPS
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise OSError(f"{place} is {'a link' if place.is_symlink() else 'a file'} instead of a folder")


def refuse_earlier_format(place: Path) -> None:
    """Raise StateMismatch if a run, or the folder of a step, has failed steps of an earlier form and no others."""
    run = resolve_run_folder(place)
    old = place / _FORM_2 if run != place else next((run / FAILED_STEPS).glob(f"*/{_FORM_2}"), run / _FORM_1)
    if old.exists() and (run != place or not list_failed_steps(run)):
        raise StateMismatch(
            f"{run / _FORM_1 if old.is_dir() else run / FAILED_STEPS} contains failed steps of an earlier halfstep",
            allowed=f"{FAILED_STEPS}/ in form {FORMAT}, as this version writes them",
            do="replay them with the version that wrote them",
        )


FORMAT = 4
"""Increased when readers of the old format could not read the new one."""


class StepRecord(BaseModel):
    """A failed step without its tensors; pydantic checks every field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")

    format: int = FORMAT
    report: StepReport
    precision: str
    islands: tuple[str, ...]
    history: StepHistory
    verdict: Verdict
    """The verdict of the run."""
    batch_changed: bool
    """Whether the batch was written to before it was recorded: a replay may then differ."""
    recipe: str
    """A SHA-256 of the settings that affect the computation."""
    non_persistent_buffers: tuple[str, ...]
    without: str
    """Why there are no tensors; empty if there are."""

    @field_serializer("report")
    def _name_fields(self, report: StepReport) -> dict[str, Any]:
        """Return the report by field names: a record is also read by people."""
        return {**report._asdict(), "parts": {name: part._asdict() for name, part in report.parts.items()}}


@dataclass(frozen=True)
class StoredFailedStep:
    """A failed step on disk; only its record was read and verified, its tensors were not."""

    place: CheckpointDir
    manifest: Manifest
    step: StepRecord

    @property
    def path(self) -> Path:
        return self.place.path

    @property
    def ranks(self) -> int:
        return self.manifest.world_size


def read_failed_step(place: CheckpointDir) -> StoredFailedStep:
    """Return the record of a failed step.

    Raises BadData if it is damaged or forged, Unsafe where it could run code, OtherForm for another form.
    """
    with _replace_damage_errors(place.path):
        refuse_unsafe_files(place.path)
        manifest = read_manifest(place)
        return StoredFailedStep(
            place, manifest, _parse_step_record(_read_rank_state(place.path, manifest, 0)["record"], place)
        )


def _parse_step_record(plain: Any, place: CheckpointDir) -> StepRecord:
    form = plain["format"]
    if type(form) is int:
        check_same_form(place.path, FORMAT, form, for_earlier="replay it with the version that wrote it")
    try:
        # As JSON text: only from there does pydantic's strict mode make tuples of lists. NaN and inf are words in it.
        record = StepRecord.model_validate_json(json.dumps(unpack_state(plain, {}, str(place.path))))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if record.report.attempt != place.attempt:
        raise ValueError(f"the record of attempt {record.report.attempt}, in the folder of {place.attempt}")
    return record


def _read_rank_state(place: Path, manifest: Manifest, rank: int) -> Any:
    _verify_sealed_file(place, manifest, name_state_file(rank))
    return parse_strict_json(read_bounded(place / name_state_file(rank), LARGEST_JSON))


def _load_rank_tensors(record: StoredFailedStep, rank: int, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a rank whose names start with `prefix`, after verifying every byte of its file."""
    _verify_sealed_file(record.path, record.manifest, name_tensors_file(rank))
    found = load_tensors(record.path / name_tensors_file(rank))
    return {name: tensor for name, tensor in found.items() if name.startswith(prefix)}


def _verify_sealed_file(place: Path, manifest: Manifest, name: str) -> None:
    problem = find_file_defect(place, next(sealed for sealed in manifest.files if sealed.name == name))
    if problem is not None:
        raise ValueError(problem)


def describe_size_problem(record: StoredFailedStep) -> str | None:
    """Return which file has a different size than was written, without reading any; None if all fit."""
    for sealed in record.manifest.files:
        try:
            if (record.path / sealed.name).lstat().st_size != sealed.size:
                return f"{sealed.name} has a different size than was written"
        except OSError as error:
            return f"{sealed.name}: {error.strerror}"
    return None


@contextmanager
def _replace_damage_errors(place: Path) -> Iterator[None]:
    """Raise BadData for any error that a damaged or forged step causes; the advice names an older one."""
    try:
        yield
    except Exception as error:
        # A forged file may raise anything: TypeError, OverflowError, RuntimeError, ...
        if isinstance(error, HalfstepError):
            raise
        words = str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
        raise BadData(
            f"{place} cannot be used: {words}",
            allowed="a failed step written by halfstep",
            do=_suggest_older_step(place),
        ) from error


def suggest_replay(run: Path, attempt: int) -> str:
    """Return how the caller replays one failed step of a run."""
    return choose_caller_wording(
        f"halfstep replay {run} --attempt {attempt}", f'halfstep.replay("{run}", attempt={attempt})'
    )


def _suggest_older_step(place: Path) -> str:
    """Return how to choose an older step: following this advice repeatedly comes to an end."""
    run = resolve_run_folder(place)
    older = [one.attempt for one in list_failed_steps(run) if one.name < place.name]
    if older:
        return f"choose another one: {suggest_replay(run, older[-1])}"
    return "nothing: no older one is recorded; the next step that fails is recorded anew"


MODEL, INPUTS = "model/", "step"
"""The prefixes of the names of tensors: the model's, and those of a rank's inputs."""
_GENERATORS = f"{INPUTS}/generators/"
"""The prefix of random states, which stay on the host."""


def load_recorded_model(record: StoredFailedStep, model: nn.Module) -> None:
    """Load the weights, buffers and islands of the step; raise StateMismatch if they belong to another model."""
    with _replace_damage_errors(record.path):
        found = {name.removeprefix(MODEL): tensor for name, tensor in _load_rank_tensors(record, 0, MODEL).items()}
        parameters = select_saved_parameters(model)
        _refuse_another_model(record, model, parameters, found)
        device = next(iter(parameters.values())).device
        with torch.no_grad():
            for name, parameter in parameters.items():
                # In the dtype that was recorded, and in this model's memory format.
                parameter.data = torch.empty_like(parameter.data, dtype=found[name].dtype).copy_(found[name])
            buffers = {name: tensor.to(device) for name, tensor in found.items() if name not in parameters}
            put_buffers(model, buffers, record.step.non_persistent_buffers)
        for path in record.step.islands:
            island(model, path) if path else island(model)


def _refuse_another_model(
    record: StoredFailedStep, model: nn.Module, parameters: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    own = {**parameters, **dict(model.named_buffers())}
    come = select_assignable_buffers(model, [name for name in record.step.non_persistent_buffers if name in found])
    missing = [name for name in own if name not in found and name not in come]
    other = [name for name in found if name not in own and name not in come]
    both = [(name, own[name], found[name]) for name in own if name in found and name not in come]
    shapes = [n for n, a, b in both if a.shape != b.shape or a.is_floating_point() != b.is_floating_point()]
    if missing or other or shapes:
        first = (missing + other + shapes)[0]
        raise StateMismatch(
            f"{record.path} belongs to another model: {len(missing)} of its tensors are missing, {len(other)} are not "
            f"in it, {len(shapes)} have another shape; the first is {first}",
            allowed="the model that the run was trained with",
            do="restore the recipe, the versions and the task's file of the run",
        )


def load_attempt(record: StoredFailedStep, rank: int, loss_fn: LossFunction, device: torch.device) -> StepInputs:
    """Return the step of one rank, ready to run again; raise BadData if its record is damaged."""
    with _replace_damage_errors(record.path):
        found = _load_rank_tensors(record, rank, INPUTS)
        placed = {name: t if name.startswith(_GENERATORS) else t.to(device) for name, t in found.items()}
        own = unpack_state(_read_rank_state(record.path, record.manifest, rank)["inputs"], placed, str(record.path))
        microbatches = Window(own["microbatches"])
        return StepInputs(
            loss_fn,
            microbatches,
            own["only"],
            _fit_generator_states(own["generators"], device),
            {str(name): _build_factor(*factor) for name, factor in own["factors"].items()},
            # Which tensors were written to is not kept: none of the versions is known.
            () if record.step.batch_changed else list_batch_versions(microbatches),
        )


def _build_factor(scale: Any, base: Any) -> LossFactors:
    return LossFactors(float(scale), None if base is None else float(base))


def _fit_generator_states(states: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the random states; those of another kind of device are replaced by this device's own."""
    here = collect_torch_rng_states(device)
    fitting = [own.shape == found.shape and own.dtype == found.dtype for own, found in zip(here, states, strict=False)]
    if not fitting or not fitting[0]:
        raise ValueError("no random state of torch")
    return [states[n] if n < len(fitting) and fitting[n] else own for n, own in enumerate(here)]


def choose_recorded_precision(name: str, device: torch.device) -> Choice:
    """Choose the precision of a recorded step: its own, emulated if need be; where it cannot run here, the next."""
    try:
        return choose_precision(name, device=device)
    except PrecisionRefused:
        return choose_precision(name, device=device, fallback=True)
