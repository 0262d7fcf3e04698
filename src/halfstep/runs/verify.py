"""`halfstep.verify`: check every byte of a run's checkpoints, and whether a resume is exact."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import (
    BadData,
    HalfstepError,
    NoCheckpoint,
    NotExact,
    WrongUse,
    advise_new_run,
    choose_caller_wording,
)
from halfstep.numbers import format_counted_noun
from halfstep.runs.verify_page import ReadSpeed, VerifiedCheckpoint, VerifyReport
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.checkpoint.paths import CheckpointDir
    from halfstep.checkpoint.reading import CheckpointVerdict
    from halfstep.runs.data_check import VerifiedData
    from halfstep.train.resume_proof import ResumeProof
    from halfstep.train.task import Task

TRIES = 10
MOST_CHANGES = 20
BRIEF = 0.05
"""Seconds below which a throughput is mostly noise."""


def verify(
    run: str | os.PathLike[str],
    *,
    resume_steps: int | None = None,
    data: bool = False,
    task: type[Task] | str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Check every byte of a run's checkpoints. Changes nothing, also while the run is training.

    Args:
        run: The folder of a run.
        resume_steps: Also prove that a resume is exact: train k + k steps and 2k steps in a temporary folder, and
            compare them bit by bit.
        data: Also compare the data with the newest checkpoint, and every byte of its shards with their index.
        task: The class of a task of your own, or its file, which the proof trains with.

    Returns:
        The checkpoints, newest first. Problems are in `error` and are not raised: damaged checkpoints, other data, a
        resume that is not exact, or a proof for a run of several processes.

    Raises:
        BadData: The folder holds no run.
        WrongUse: A proof of more steps than the run has.
    """
    folder = Path(os.path.expanduser(run))
    result = verify_checkpoints(folder)
    error, proof, found = _build_damage_error(folder, result), None, None
    if data and error is None:
        found = _check_data(folder, result.verdicts[0].generation, task)
        error = _changed_data_error(found)
    if resume_steps is not None and error is None:
        error = _several_processes_error(folder, result)
        if error is None:
            proof = _prove_resume(folder, result.verdicts, resume_steps, task)
            error = _not_exact_error(proof)
    return replace(_make_report(folder, result, error, proof), data=found)


# -- every byte -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifiedRun:
    """The result of reading every byte of every checkpoint, and where the time went."""

    verdicts: list[CheckpointVerdict]
    """Newest first."""
    bytes: int
    """Bytes that were found as written."""
    seconds: float
    hashing: float
    """Seconds of user time."""
    copying: float
    """Seconds of system time, copying out of the page cache."""
    from_disk: int
    """Bytes that were in no cache."""

    @property
    def limited_by(self) -> str:
        """Return the bottleneck of the verification, in words."""
        waiting = self.seconds - self.hashing - self.copying
        most = max(self.hashing, self.copying, waiting)
        if most == self.hashing:
            return "SHA-256 on one core"
        if most == self.copying:
            return "copying out of the system's cache"
        # Waiting without reads from the disk means that the cores were busy.
        return "the disk" if 10 * self.from_disk > self.bytes else "other programs on the cores"


def verify_checkpoints(folder: Path) -> VerifiedRun:
    """Read every byte of every checkpoint. No lock is needed: a generation that disappears was retired by the run."""
    from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
    from halfstep.train.run_folder import find_recipe_file

    place = find_recipe_file(folder).parent / CHECKPOINTS
    # A run that saves often may retire every listed generation while the first is read.
    for _ in range(TRIES):
        found = list_generations(place)
        result = _verify_all(found)
        if result.verdicts or not found:
            break  # otherwise the run retired all of them and has saved new ones
    return result


def _verify_all(found: list[CheckpointDir]) -> VerifiedRun:
    from halfstep.checkpoint.reading import verify_checkpoint

    total, done = sum(map(_compute_checkpoint_bytes, found)), 0
    before, began = _measure_thread_usage(), time.perf_counter()
    with display_progress("verifying", "MB") as on_progress:

        def count(read: int) -> None:
            nonlocal done
            done += read
            on_progress(done // 10**6, total // 10**6)

        def verify_one(generation: CheckpointDir) -> CheckpointVerdict | None:
            # A problem in a generation that is gone by now is no problem: the run retired it while it was read.
            verdict = verify_checkpoint(generation, count)
            return verdict if verdict.problem is None or os.path.lexists(generation.path) else None

        verdicts = [verdict for one in found if (verdict := verify_one(one)) is not None]
    seconds = time.perf_counter() - began
    # User time is SHA-256, system time is copying; the rest of the wall time is waiting.
    hashing, copying, blocks = (now - then for now, then in zip(_measure_thread_usage(), before, strict=True))
    # ru_inblock counts blocks of 512 bytes.
    return VerifiedRun(verdicts, done, seconds, hashing, copying, int(blocks) * 512)


def _measure_thread_usage() -> tuple[float, float, int]:
    """Return this thread's user seconds, system seconds, and blocks read from disk."""
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_utime, used.ru_stime, used.ru_inblock
    except (ImportError, AttributeError):  # RUSAGE_THREAD is Linux only
        return time.thread_time(), 0.0, 0


def _compute_checkpoint_bytes(generation: CheckpointDir) -> int:
    try:
        return sum(file.lstat().st_size for file in generation.path.iterdir())
    except OSError:
        return 0


# -- what it means ----------------------------------------------------------------------------------------------------


def _build_damage_error(folder: Path, result: VerifiedRun) -> HalfstepError | None:
    """Return the error for missing or corrupt checkpoints, with what a resume would do; None if all are intact."""
    if not result.verdicts:
        return NoCheckpoint(
            f"{folder} has no checkpoints",
            allowed="a run with a checkpoint, saved every checkpoint.every_steps steps and after each epoch",
            do=f"start it with the same {choose_caller_wording('command', 'call')}, and verify when it has been saved",
        )
    damaged = [one for one in result.verdicts if one.problem is not None]
    whole = [one for one in result.verdicts if one.problem is None]
    if not damaged:
        return None
    if not whole:
        return NoCheckpoint(
            f"none of the {len(damaged)} checkpoints is intact"
            if len(damaged) > 1
            else "the only checkpoint is damaged",
            allowed="at least one intact checkpoint; without one a resume is refused",
            do=f"restore the folder from a copy, or {advise_new_run()}",
        )
    return BadData(
        f"{len(damaged)} of {len(result.verdicts)} checkpoints {'is' if len(damaged) == 1 else 'are'} damaged",
        allowed="intact checkpoints",
        do=_describe_resume(folder, result),
    )


def _describe_resume(folder: Path, result: VerifiedRun) -> str:
    from halfstep.train.run_folder import is_finished

    newest = next(one for one in result.verdicts if one.problem is None).generation
    if is_finished(folder):
        return "nothing, if you need only the weights: the run is finished, and no resume needs its checkpoints"
    if result.verdicts[0].problem is None:
        return f"nothing, for a resume: it continues from {newest.name}, the newest, which is intact"
    lost = result.verdicts[0].generation.attempt - newest.attempt
    again = f", and repeats at least {format_counted_noun(lost, 'step')}" if lost else ""
    return f"start the run with the same command: it continues from {newest.name} (step {newest.attempt:,}){again}"


def _make_report(
    folder: Path, result: VerifiedRun, error: HalfstepError | None, proof: ResumeProof | None
) -> VerifyReport:
    from halfstep.checkpoint.paths import CHECKPOINTS, list_set_aside

    checkpoints = []
    for one in result.verdicts:
        size, ranks = (
            (one.manifest.bytes, one.manifest.world_size)
            if one.manifest
            else (_compute_checkpoint_bytes(one.generation), None)
        )
        named = (one.generation.name, one.generation.attempt)
        checkpoints.append(VerifiedCheckpoint(*named, one.problem is None, one.problem, size, ranks))
    newest = next((one.name for one in checkpoints if one.whole), None)
    per_second, limit = (result.bytes / result.seconds, result.limited_by) if result.seconds >= BRIEF else (None, None)
    parts = (result.hashing, result.copying, result.from_disk)
    speed = ReadSpeed(result.bytes, result.seconds, per_second, limit, *parts)
    aside = tuple(path.name for path in list_set_aside(folder / CHECKPOINTS))
    return VerifyReport(folder, tuple(checkpoints), newest, aside, speed, error, proof)


# -- data -------------------------------------------------------------------------------------------------------------


def _check_data(folder: Path, newest: CheckpointDir, task: type[Task] | str | os.PathLike[str] | None) -> VerifiedData:
    from halfstep.runs.data_check import check_data
    from halfstep.runs.registry import resolve_own_task

    with display_progress("reading", "shards") as on_progress:
        return check_data(folder, newest, resolve_own_task(task) if task is not None else None, on_progress)


def _changed_data_error(found: VerifiedData) -> BadData | None:
    if not found.changes:
        return None
    return BadData(
        "\n    ".join(["the data has changed since the run began:", *found.changes[:MOST_CHANGES]]),
        allowed="the data that the run started with",
        do="restore it from a copy; halfstep verify RUN --data --json lists all changes",
    )


# -- k + k = 2k -------------------------------------------------------------------------------------------------------


def _several_processes_error(folder: Path, result: VerifiedRun) -> WrongUse | None:
    # The proof trains in this process alone, without the other ranks.
    together = max(one.manifest.world_size for one in result.verdicts if one.manifest is not None)
    if together == 1:
        return None
    return WrongUse(
        f"{choose_caller_wording('--resume', 'resume_steps')} for a run of {together} processes",
        allowed="runs of one process; the checkpoints of all processes were checked, byte for byte",
        do=choose_caller_wording(f"halfstep verify {folder}, without --resume", f'halfstep.verify("{folder}")'),
    )


def _prove_resume(
    folder: Path,
    verdicts: list[CheckpointVerdict],
    steps: int,
    task: type[Task] | str | os.PathLike[str] | None,
) -> ResumeProof:
    """Train a few steps in two ways in a temporary folder, and compare."""
    import tempfile

    from halfstep.runs.finished import build_run_rebuilder
    from halfstep.runs.registry import resolve_own_task
    from halfstep.train.resume_proof import prove_exact_resume

    own = (lambda: resolve_own_task(task)) if task is not None else None
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-verify-") as place,
        display_progress("proving", "steps") as on_progress,
    ):
        return prove_exact_resume(
            build_run_rebuilder(folder, own), [one.generation for one in verdicts], steps, Path(place), on_progress
        )


def _not_exact_error(proof: ResumeProof) -> NotExact | None:
    if proof.equal:
        return None
    lines = [str(one) for one in (proof.loss, proof.state) if one is not None]
    title = f"{proof.steps} + {proof.steps} steps are not {2 * proof.steps} steps:"
    if not proof.repeatable:
        title = f"the same {proof.steps} steps gave two results, even before a resume:"
    return NotExact(
        "\n    ".join([title, *lines]),
        allowed="random numbers from torch, numpy.random and random, which a checkpoint keeps; kernels that repeat",
        do="look in the task for its own generator, counter or clock, and draw from torch instead",
    )
