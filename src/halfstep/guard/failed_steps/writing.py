"""Write a failed step to the run's folder as a checkpoint is written, without ever failing the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep import distributed, numbers
from halfstep.checkpoint.commit import (
    RankGather,
    RankSnapshot,
    commit_checkpoint,
    decide_on_all_ranks,
    remove_generation,
)
from halfstep.checkpoint.packing import pack_state
from halfstep.checkpoint.paths import CheckpointDir, Disk, remove_unfinished_saves
from halfstep.errors import HalfstepError, OtherForm, format_error_reason
from halfstep.guard.failed_steps.reading import (
    FAILED_STEPS,
    INPUTS,
    MODEL,
    StepRecord,
    check_failed_steps_folder,
    list_failed_steps,
    read_failed_step,
)
from halfstep.guard.verdict import FailedStep
from halfstep.precision.environment import collect_environment
from halfstep.safetensors_header import encode_header
from halfstep.step.saved_tensors import list_non_persistent_buffers, select_saved_parameters
from halfstep.step.step_inputs import StepInputs

MOST_BYTES = 4 * 2**30
"""Bytes of one failed step, over all ranks."""
MOST_KEPT = 3
"""Failed steps that are retained per run."""
OTHER_FORM = "other_form"
"""The cause of failed steps that another version of halfstep recorded, for their retention."""
Tell = Callable[[str, str], None]
"""A callback with text and level, `info` or `warning`."""


@dataclass(frozen=True)
class RankInputs:
    """The part of a failed step that one rank writes."""

    plain: Any = None
    """Its micro-batches and their inputs, with names instead of tensors."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    without: str = ""
    """Why it has no tensors to record."""

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def build_step_recorder(
    folder: Path, model: nn.Module, tell: Tell, compute_recipe_digest: Callable[[], str] = str
) -> Callable[[FailedStep], None]:
    """Return a function that records failed steps in the run's folder. All ranks create and call it together.

    `compute_recipe_digest` is called for each record; a loop without a recipe has none.

    The function never raises: a run continues without a record, and `tell` gets the reason.
    """
    party = distributed.RankGroup()

    def record(failed: FailedStep) -> None:
        try:
            write_failed_step(folder, failed, model, party=party, recipe=compute_recipe_digest())
        except Exception as failure:
            # Any error: a record must not end the run.
            tell(f"attempt {failed.report.attempt:,} was not recorded: {failure}", "warning")
        else:
            tell(f"attempt {failed.report.attempt:,} is recorded; to run it again: halfstep replay {folder}", "info")

    return record


def write_failed_step(
    folder: Path,
    failed: FailedStep,
    model: nn.Module,
    *,
    party: RankGather,
    recipe: str = "",
    disk: Disk | None = None,
    most: int = MOST_BYTES,
    keep: int = MOST_KEPT,
) -> CheckpointDir:
    """Record a failed step on all ranks together; raise NotCommitted on all where one fails."""
    disk, first = disk or Disk(), party.rank == 0
    own = _collect_rank_inputs(failed.attempt, model, party.rank)

    def offer() -> tuple[str, int]:
        check_failed_steps_folder(folder)
        if first:
            remove_unfinished_saves(folder / FAILED_STEPS, disk)
        return own.without, own.bytes

    def settle(offered: list[tuple[str, int]]) -> tuple[str, Any]:
        # A record with the tensors of some ranks cannot be replayed.
        without, size = next((why for why, _ in offered if why), ""), sum(size for _, size in offered)
        if not without and size > most:
            without = (
                f"weights and batch take {numbers.format_bytes(size)}, and at most {numbers.format_bytes(most)} are "
                "kept"
            )
        return without, _build_step_record(failed, model, recipe, without)

    without, record = decide_on_all_ranks(party, offer, settle)
    own = RankInputs(without=without) if without else own
    snapshot = RankSnapshot(
        failed.report.attempt,
        {"record": record if first else None, "inputs": own.plain},
        own.tensors,
        environment=collect_environment(next(model.parameters()).device),
    )
    place = commit_checkpoint(folder / FAILED_STEPS, snapshot, keep=None, disk=disk, party=party)
    if first:
        with contextlib.suppress(OSError):
            _remove_excess_steps(folder, keep, disk)
    return place


def _collect_rank_inputs(attempt: StepInputs, model: nn.Module, rank: int) -> RankInputs:
    """Return references; nothing is copied until all ranks agree to write."""
    if distributed.is_sharded(model.parameters()):
        return RankInputs(without="the weights are sharded over several processes")
    inputs = {
        "microbatches": list(attempt.microbatches),
        "only": attempt.only,
        "generators": list(attempt.generators),
        "factors": {name: list(factor) for name, factor in attempt.factors.items()},
    }
    try:
        plain, tensors = pack_state(inputs, INPUTS)
        if rank == 0:
            # A skipped step left parameters and buffers unchanged.
            weights = {**select_saved_parameters(model), **dict(model.named_buffers())}
            tensors |= {f"{MODEL}{name}": tensor.detach() for name, tensor in weights.items()}
        encode_header(tensors, {})  # raises for dtypes that safetensors does not have
    except Exception as error:
        # Any error of a user's batch: the other ranks wait for this one's answer.
        return RankInputs(without=format_error_reason(error) or type(error).__name__)
    return RankInputs(plain, tensors)


def _build_step_record(failed: FailedStep, model: nn.Module, recipe: str, without: str) -> Any:
    """Return everything but tensors; non-finite numbers in the form of `pack_state`."""
    record = StepRecord(
        report=failed.report._replace(aux=None),
        precision=failed.precision,
        islands=failed.islands,
        history=failed.history,
        verdict=failed.verdict,
        batch_changed=_has_batch_changed(failed.attempt),
        recipe=recipe,
        non_persistent_buffers=tuple(list_non_persistent_buffers(model)),
        without=without,
    )
    return pack_state(record.model_dump(mode="json"), "the step")[0]


def _has_batch_changed(attempt: StepInputs) -> bool:
    try:
        return attempt.batch_changed
    except Exception:
        return False  # a batch that cannot be inspected is not recorded either


def _remove_excess_steps(run: Path, keep: int, disk: Disk) -> None:
    """Remove failed steps until `keep` are left: unreadable ones first, then the oldest whose cause recurs later."""
    for older, newer in pairwise(list_failed_steps(run)):
        if older.attempt == newer.attempt:  # the run was resumed from before this step
            remove_generation(older, disk)
    found = [(place, _read_failure_cause(place)) for place in list_failed_steps(run)]
    while len(found) > keep:
        causes = [cause for _, cause in found]
        repeated = (n for n, cause in enumerate(causes) if cause in causes[n + 1 :])
        place, _ = found.pop(causes.index(None) if None in causes else next(repeated, 0))
        with contextlib.suppress(OSError):
            remove_generation(place, disk)


def _read_failure_cause(place: CheckpointDir) -> str | None:
    try:
        return read_failed_step(place).step.verdict.cause
    except OtherForm:
        # Another version can read it: it counts as a separate cause, not as unreadable.
        return OTHER_FORM
    except HalfstepError:
        return None
