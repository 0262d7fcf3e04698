"""`halfstep verify`: whether every byte of a run's checkpoints is as it was written, and whether a resume is exact."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._opened import OwnTask, RunFolder
from halfstep.cli._verify_page import print_proof, print_report
from halfstep.errors import BadData, HalfstepError, NoCheckpoint, WrongUse

if TYPE_CHECKING:
    from halfstep.train.checkpoint.generation import Generation
    from halfstep.train.checkpoint.reading import Verdict
    from halfstep.train.proof import Proof

GROUP = "Files"
STEPS = 3
TRIES = 10
BRIEF = 0.05
"""Seconds below which a speed is mostly noise."""


class NotExact(HalfstepError, RuntimeError):
    """A resume that would not go on as the run would have."""


def run(
    folder: RunFolder,
    resume: Annotated[bool, flag("--resume", "Also prove that a resume is exact, in a folder for a moment.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help=f"With --resume: K + K steps beside 2 K; {STEPS} if left out."),
    ] = None,
    task: OwnTask = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Check every byte of a run's checkpoints. Changes nothing, also while the run is being trained."""
    if not resume and (steps is not None or task is not None):
        raise WrongUse(
            f"--{'steps' if steps is not None else 'task'} without --resume",
            allowed="--steps and --task with --resume, which trains a few steps",
            do=f"halfstep verify {folder} --resume",
        )
    looked = look(folder)
    report = described(folder, looked)
    if not json:
        print_report(report)
    failure = complaint(folder, looked)
    proof = None
    if resume and failure is None:
        proof = proven(folder, looked.verdicts, steps or STEPS, task)
        report["proof"] = {**asdict(proof), "losses": len(proof.losses), "equal": proof.equal}
        failure = _not_exact(proof)
    if json:
        from json import dumps

        typer.echo(dumps(report, indent=1))
    elif proof is not None:
        print_proof(proof)
    if failure is not None:
        raise failure


# -- every byte -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looked:
    """What a look at every byte of every checkpoint found, and what the time went to."""

    verdicts: list[Verdict]
    """The newest first."""
    bytes: int
    """That were found as they were written."""
    seconds: float
    hashing: float
    """Seconds of computing."""
    copying: float
    """Seconds in which the system handed over what it had read."""
    from_disk: int
    """Bytes that were in no cache."""

    @property
    def limited_by(self) -> str:
        waiting = self.seconds - self.hashing - self.copying
        most = max(self.hashing, self.copying, waiting)
        if most == self.hashing:
            return "SHA-256 on one core"
        if most == self.copying:
            return "copying out of the system's cache"
        return "the disk" if 10 * self.from_disk > self.bytes else "other programs on the cores"


def look(folder: Path) -> Looked:
    """Needs no lock: a generation that goes while it is read was retired by the run, and is left out."""
    from halfstep.tasks._finished import recipe_in
    from halfstep.train.checkpoint.generation import CHECKPOINTS, generations

    place = recipe_in(folder).parent / CHECKPOINTS
    for _ in range(TRIES):
        found = generations(place)
        looked = _looked_at(found)
        if looked.verdicts or not found:
            break  # else the run has saved as many since, so there are others
    return looked


def _looked_at(found: list[Generation]) -> Looked:
    from halfstep.progress import progress
    from halfstep.train.checkpoint.reading import verified

    total, done = sum(map(_size, found)), 0
    before, began = _spent(), time.perf_counter()
    with progress("verifying", "MB") as told:

        def count(read: int) -> None:
            nonlocal done
            done += read
            told(done // 10**6, total // 10**6)

        def seen(generation: Generation) -> Verdict | None:
            verdict = verified(generation, count)
            return verdict if verdict.problem is None or os.path.lexists(generation.path) else None

        verdicts = [verdict for one in found if (verdict := seen(one)) is not None]
    seconds = time.perf_counter() - began
    hashing, copying, blocks = (now - then for now, then in zip(_spent(), before, strict=True))
    return Looked(verdicts, done, seconds, hashing, copying, int(blocks) * 512)


def _spent() -> tuple[float, float, int]:
    """Of this thread: seconds in its own code, seconds in the system, and blocks that came from a disk."""
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_utime, used.ru_stime, used.ru_inblock
    except (ImportError, AttributeError):  # where the system does not tell these apart
        return time.thread_time(), 0.0, 0


def _size(generation: Generation) -> int:
    try:
        return sum(file.lstat().st_size for file in generation.path.iterdir())
    except OSError:
        return 0


# -- what it means ----------------------------------------------------------------------------------------------------


def complaint(folder: Path, looked: Looked) -> HalfstepError | None:
    """What is wrong, and what a resume would make of it."""
    if not looked.verdicts:
        return NoCheckpoint(
            f"{folder} has no checkpoints",
            allowed="a run that has been saved: every checkpoint.every_steps steps, and after each epoch",
            do="start it with the same command, and verify when it has been saved",
        )
    damaged = [one for one in looked.verdicts if one.problem is not None]
    whole = [one for one in looked.verdicts if one.problem is None]
    if not damaged:
        return None
    if not whole:
        return NoCheckpoint(
            f"none of the {len(damaged)} checkpoints is whole"
            if len(damaged) > 1
            else "the only checkpoint is damaged",
            allowed="at least one checkpoint as it was written; without one a resume is refused",
            do="bring back the folder from a copy, or begin again with --new, in a folder of its own",
        )
    return BadData(
        f"{len(damaged)} of {len(looked.verdicts)} checkpoints {'is' if len(damaged) == 1 else 'are'} damaged",
        allowed="checkpoints as they were written",
        do=_what_a_resume_does(folder, looked),
    )


def _what_a_resume_does(folder: Path, looked: Looked) -> str:
    from halfstep.train.run_folder import is_finished

    newest = next(one for one in looked.verdicts if one.problem is None).generation
    if is_finished(folder):
        return "nothing, if you need the weights only: the run is finished, and nothing goes on from its checkpoints"
    if looked.verdicts[0].problem is None:
        return f"nothing has to be done for a resume: it goes on from {newest.name}, the newest, which is whole"
    lost = looked.verdicts[0].generation.attempt - newest.attempt
    again = f", and does at least {lost:,} {'step' if lost == 1 else 'steps'} again" if lost else ""
    return f"start the run with the same command: it goes on from {newest.name} (step {newest.attempt:,}){again}"


def described(folder: Path, looked: Looked) -> dict[str, Any]:
    """The report as plain data."""
    from halfstep.train.checkpoint.generation import CHECKPOINTS, set_aside

    newest = next((one.generation.name for one in looked.verdicts if one.problem is None), None)
    return {
        "run": str(folder),
        "checkpoints": [
            {
                "name": one.generation.name,
                "step": one.generation.attempt,
                "whole": one.problem is None,
                "problem": one.problem,
                "bytes": one.manifest.bytes if one.manifest else _size(one.generation),
                "processes": one.manifest.world if one.manifest else None,
            }
            for one in looked.verdicts
        ],
        "newest_whole": newest,
        "set_aside": [path.name for path in set_aside(folder / CHECKPOINTS)],
        "bytes": looked.bytes,
        "seconds": looked.seconds,
        "bytes_per_second": looked.bytes / looked.seconds if looked.seconds >= BRIEF else None,
        "limited_by": looked.limited_by if looked.seconds >= BRIEF else None,
        "seconds_hashing": looked.hashing,
        "seconds_copying": looked.copying,
        "bytes_from_disk": looked.from_disk,
    }


# -- k + k = 2k -------------------------------------------------------------------------------------------------------


def proven(folder: Path, verdicts: list[Verdict], steps: int, task: Path | None) -> Proof:
    """Train a few steps in two ways, in a folder that is gone afterwards."""
    import tempfile

    from halfstep.progress import progress
    from halfstep.tasks._folder import task_from_file
    from halfstep.tasks._rebuilt import rebuilding
    from halfstep.train.proof import prove

    together = max(one.manifest.world for one in verdicts if one.manifest is not None)
    if together > 1:
        raise WrongUse(
            f"--resume for a run of {together} processes",
            allowed="runs of one process; the checkpoints of all processes were checked, byte for byte",
            do=f"halfstep verify {folder}, without --resume",
        )
    own = (lambda: task_from_file(task)[0]) if task is not None else None
    with tempfile.TemporaryDirectory(prefix="halfstep-verify-") as place, progress("proving", "steps") as told:
        return prove(rebuilding(folder, own), [one.generation for one in verdicts], steps, Path(place), told)


def _not_exact(proof: Proof) -> NotExact | None:
    if proof.equal:
        return None
    lines = [str(one) for one in (proof.loss, proof.state) if one is not None]
    title = f"{proof.steps} + {proof.steps} steps are not {2 * proof.steps} steps:"
    if not proof.repeatable:
        title = f"the same {proof.steps} steps came out in two ways, before anything was resumed:"
    return NotExact(
        "\n    ".join([title, *lines]),
        allowed="random numbers from torch, numpy.random and random, which a checkpoint keeps; kernels that repeat",
        do="look in the task for a generator, a counter or a clock of its own, and draw from torch instead",
    )
