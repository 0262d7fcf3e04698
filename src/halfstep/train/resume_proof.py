"""Prove k + k = 2k: a run that is saved and resumed half-way equals the uninterrupted one bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.paths import CheckpointDir
from halfstep.checkpoint.reading import read_rank_state
from halfstep.errors import StorageFailed, WrongUse, choose_caller_wording
from halfstep.guard.repair.remedies import Remedies
from halfstep.journal import events
from halfstep.status_line import OnProgress
from halfstep.train.environment import AutoChoices
from halfstep.train.guarding import read_guard_remedies
from halfstep.train.loop import Loop
from halfstep.train.process_group import preserve_rng
from halfstep.train.resume import find_checkpoint, resume_from
from halfstep.train.state import COMPONENTS, State, restore_state

Build = Callable[[Path, AutoChoices | None, Remedies | None], Loop]
"""Builds a loop in a folder, with the automatic choices of the run's start and the remedies of its guard."""


@dataclass(frozen=True)
class StateDifference:
    """One value that differs between the two runs."""

    what: str
    in_one_go: str
    resumed: str

    def __str__(self) -> str:
        return f"{self.what} is {self.in_one_go} in one go, and {self.resumed} resumed"


@dataclass(frozen=True)
class ResumeProof:
    """The result of comparing k + k steps with 2k."""

    steps: int
    """The number k."""
    begin: int
    """Attempts of the run before the comparison."""
    tensors: int
    losses: tuple[float, ...]
    """The losses of the 2k uninterrupted steps."""
    loss: StateDifference | None
    """The first loss that differs."""
    state: StateDifference | None
    """The first value of the state that differs."""
    repeatable: bool
    """Whether the first k steps, which nothing interrupts, gave the same losses twice."""

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return self.loss is None and self.state is None


@dataclass(frozen=True)
class _Segment:
    losses: list[float]
    state: State


def prove_exact_resume(
    build: Build, whole: Sequence[CheckpointDir], steps: int, folder: Path, on_progress: OnProgress = lambda *_: None
) -> ResumeProof:
    """Take 2k steps; then k steps, a save, a new build and k more; compare all losses and states.

    Starts at the newest of the `whole` checkpoints with 2k steps left, or at step 0. Writes into `folder`.
    Raises WrongUse for a run that is too short, and StorageFailed where the save fails.
    """
    with preserve_rng():
        auto_choices = AutoChoices.from_dict(_read_checkpoint_state(whole[0]).auto_choices) if whole else None
        loop = build(_make_folder(folder / "one"), auto_choices, None)
        if loop.planned < 2 * steps:
            raise _too_short_error(f"a run of {loop.planned} steps", loop.planned, steps)
        begin = next((one for one in whole if loop.planned - one.attempt >= 2 * steps), None)
        remedies = None if begin is None else read_guard_remedies(_read_checkpoint_state(begin).guards)
        # The model has to be built with the remedies in place, and only the checkpoint knows them.
        if remedies is not None and remedies.placed:
            loop = build(folder / "one", auto_choices, remedies)
        # 2k steps in one go, and 2k in two parts.
        counted = _ProgressCounter(on_progress, 4 * steps)
        _set_start(loop, begin)
        with _SteppedLoop(loop, counted) as going:
            one = _Segment(going.on(2 * steps), State.of(loop.live))
        # Removed before the second way starts: the disk needs room for one run at a time.
        shutil.rmtree(folder / "one")
        two = _train_in_two_parts(
            build, _make_folder(folder / "two"), (loop.live.auto_choices, remedies), begin, steps, counted
        )
    return _build_resume_proof(one, two, steps, begin.attempt if begin else 0)


def _train_in_two_parts(
    build: Build,
    folder: Path,
    known: tuple[AutoChoices, Remedies | None],
    begin: CheckpointDir | None,
    steps: int,
    counted: _ProgressCounter,
) -> _Segment:
    first = build(folder, *known)
    _set_start(first, begin)
    with _SteppedLoop(first, counted) as going:
        losses = going.on(steps)
        _save_checkpoint(first)
    # Through the disk, with a new build: nothing of the first half may survive in memory.
    found = find_checkpoint(folder)
    assert found is not None
    second = build(folder, found.auto_choices, found.remedies)
    resume_from(second, found, folder, ())
    with _SteppedLoop(second, counted) as going:
        return _Segment(losses + going.on(steps), State.of(second.live))


class _SteppedLoop:
    """A loop that advances a few steps at a time, and closes what it opened."""

    def __init__(self, loop: Loop, counted: _ProgressCounter) -> None:
        self._loop, self._attempts, self._counted = loop, loop.attempts(), counted

    def on(self, count: int) -> list[float]:
        losses = []
        for report in islice(self._attempts, count):
            losses.append(report.loss)
            self._counted()
        if len(losses) < count:
            raise _too_short_error("a run that evaluate.patience ends", len(losses), count // 2)
        return losses

    def __enter__(self) -> _SteppedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self._attempts.close()  # type: ignore[attr-defined]
        self._loop.checkpoints.close()


class _ProgressCounter:
    def __init__(self, on_progress: OnProgress, of: int) -> None:
        self._on_progress, self._done, self._of = on_progress, 0, of

    def __call__(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._of)


class _NoteCollector:
    """A listener for the notes of a save."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_event(self, event: events.Event) -> None:
        if event["event"] == events.NOTE:
            self.texts.append(str(event["text"]))

    def close(self) -> None: ...


def _save_checkpoint(loop: Loop) -> None:
    """Save with the real commit, and wait for it."""
    notes = _NoteCollector()
    loop.journal.listeners.append(notes)
    loop.checkpoints.save()
    loop.checkpoints.finish()
    if loop.checkpoints.last is None or loop.checkpoints.last.attempt != loop.progress.attempts:
        raise StorageFailed(
            f"there is nothing to resume from: {notes.texts[-1] if notes.texts else 'the save failed'}",
            allowed="a finite state, and room for three checkpoints in the folder for temporary files",
            do="set TMPDIR to a folder with room; if the state is not finite, use a healthy run",
        )


def _set_start(loop: Loop, begin: CheckpointDir | None) -> None:
    # Read again each time: an optimizer keeps using the tensors that it loads.
    if begin is not None:
        restore_state(loop.live, _read_checkpoint_state(begin))


def _read_checkpoint_state(generation: CheckpointDir) -> State:
    return State.from_parts(*read_rank_state(generation, 0), where=str(generation.path))


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _too_short_error(what: str, there: int, steps: int) -> WrongUse:
    return WrongUse(
        f"{steps} + {steps} steps of {what}",
        allowed=f"at most {there // 2} + {there // 2} of the {there} steps of the run",
        do=choose_caller_wording(f"--steps {there // 2}", f"resume_steps={there // 2}")
        if there > 1
        else "take a longer run",
    )


def _build_resume_proof(one: _Segment, two: _Segment, steps: int, begin: int) -> ResumeProof:
    pairs = enumerate(zip(one.losses, two.losses, strict=True))
    # Compared as hexadecimal text: NaN equals itself there.
    unlike = next(((at, a, b) for at, (a, b) in pairs if a.hex() != b.hex()), None)
    loss = None
    if unlike is not None:
        at, a, b = unlike
        loss = StateDifference(f"the loss of step {begin + at + 1:,}", repr(a), repr(b))
    return ResumeProof(
        steps,
        begin,
        tensors=sum(isinstance(value, Tensor) for _, value in _iterate_component_leaves(one.state)),
        losses=tuple(one.losses),
        loss=loss,
        state=find_first_difference(one.state, two.state),
        repeatable=unlike is None or unlike[0] >= steps,
    )


def find_first_difference(one: State, two: State) -> StateDifference | None:
    """Return the first place, in the order of the components, where two states differ in a bit."""
    ours, theirs = dict(_iterate_component_leaves(one)), dict(_iterate_component_leaves(two))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            words = ["there" if name in side else "absent" for side in (ours, theirs)]
            return StateDifference(name, words[0], words[1])
        found = _find_leaf_difference(name, ours[name], theirs[name])
        if found is not None:
            return found
    return None


def _iterate_component_leaves(state: State) -> Iterator[tuple[str, Any]]:
    for name in COMPONENTS:
        yield from _iterate_named_leaves(getattr(state, name), name)


def _iterate_named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors and plain values with the names they have in a checkpoint."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    if not inner:
        yield name, value
    for key, one in inner:
        yield from _iterate_named_leaves(one, f"{name}/{key}")


def _find_leaf_difference(name: str, one: Any, two: Any) -> StateDifference | None:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _find_tensor_difference(name, one.detach().cpu(), two.detach().cpu())
    # Compared as text: NaN equals itself there, and 0.0 differs from -0.0.
    same = type(one) is type(two) and repr(one) == repr(two)
    return None if same else StateDifference(name, repr(one)[:80], repr(two)[:80])


def _find_tensor_difference(name: str, one: Tensor, two: Tensor) -> StateDifference | None:
    if _describe_tensor_layout(one) != _describe_tensor_layout(two):
        return StateDifference(name, _describe_tensor_layout(one), _describe_tensor_layout(two))
    # Bytes, since `==` calls 0.0 and -0.0 equal and NaN unequal.
    differs = (_view_as_bytes(one) != _view_as_bytes(two)).any(1).nonzero()
    if not len(differs):
        return None
    first = int(differs[0])
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(first), one.shape))
    numbers = [repr(tensor.reshape(-1)[first].item()) for tensor in (one, two)]
    return StateDifference(f"{name}[{place}]" if place else name, numbers[0], numbers[1])


def _describe_tensor_layout(tensor: Tensor) -> str:
    sides = "×".join(map(str, tensor.shape)) or "one number"
    return f"{sides} in {str(tensor.dtype).removeprefix('torch.')}, strides {tuple(tensor.stride())}"


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each element, one row per element."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
