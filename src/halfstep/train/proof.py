"""k + k = 2k: a run that was saved half-way and taken up again by a new one is, to the bit, the run that was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import StorageFailed, WrongUse
from halfstep.guard.remedy.remedies import Remedies
from halfstep.train.checkpoint.generation import Generation
from halfstep.train.checkpoint.reading import read_state
from halfstep.train.cures import cures_in
from halfstep.train.journal import journal as events
from halfstep.train.loop import Loop
from halfstep.train.measured import Measured
from halfstep.train.restoring import restore
from halfstep.train.resuming import find, take_up
from halfstep.train.start import generators_kept
from halfstep.train.state import COMPONENTS, State

Build = Callable[[Path, Measured | None, Remedies | None], Loop]
"""Everything anew, for a folder of its own, with what was measured when the run began and what its guard placed."""
Told = Callable[[int, int], None]
"""Hears how many steps are done, and of how many."""


@dataclass(frozen=True)
class Difference:
    """One thing that came out in two ways."""

    what: str
    in_one_go: str
    resumed: str

    def __str__(self) -> str:
        return f"{self.what} is {self.in_one_go} in one go, and {self.resumed} resumed"


@dataclass(frozen=True)
class Proof:
    """What came of k + k steps beside 2k."""

    steps: int
    """k."""
    begin: int
    """Attempts that the run had behind it."""
    tensors: int
    losses: tuple[float, ...]
    """Of the 2k steps in one go."""
    loss: Difference | None
    """The first loss that differs."""
    state: Difference | None
    """The first thing in the state that differs."""
    repeatable: bool
    """Whether the first k steps, which nothing interrupts, came out the same twice."""

    @property
    def equal(self) -> bool:
        return self.loss is None and self.state is None


@dataclass(frozen=True)
class _Part:
    losses: list[float]
    state: State


def prove(build: Build, whole: Sequence[Generation], steps: int, folder: Path, told: Told = lambda *_: None) -> Proof:
    """Go 2k steps at once, and k, a save, everything anew, and k more; compare all that there is.

    From the newest of the `whole` checkpoints that leaves 2k steps to do, or from the beginning. Writes into `folder`.
    """
    with generators_kept():
        measured = Measured.from_dict(_read(whole[0]).measured) if whole else None
        loop = build(_made(folder / "one"), measured, None)
        begin = _begin(whole, loop.planned, steps)
        cures = None if begin is None else cures_in(_read(begin).guards)
        if cures is not None and cures.placed:
            loop = build(folder / "one", measured, cures)
        counted = _Counted(told, 4 * steps)
        one = _whole_part(loop, begin, 2 * steps, counted)
        shutil.rmtree(folder / "one")
        two = _in_two_parts(build, _made(folder / "two"), (loop.live.measured, cures), begin, steps, counted)
    return _judged(one, two, steps, begin.attempt if begin else 0)


# -- the two ways -----------------------------------------------------------------------------------------------------


def _begin(whole: Sequence[Generation], planned: int, steps: int) -> Generation | None:
    if planned < 2 * steps:
        raise _too_short(f"a run of {planned} steps", planned, steps)
    return next((one for one in whole if planned - one.attempt >= 2 * steps), None)


def _whole_part(loop: Loop, begin: Generation | None, count: int, counted: _Counted) -> _Part:
    _put(loop, begin)
    with _Going(loop, counted) as going:
        return _Part(going.on(count), State.of(loop.live))


def _in_two_parts(
    build: Build,
    folder: Path,
    known: tuple[Measured, Remedies | None],
    begin: Generation | None,
    steps: int,
    counted: _Counted,
) -> _Part:
    first = build(folder, *known)
    _put(first, begin)
    with _Going(first, counted) as going:
        losses = going.on(steps)
        _save(first)
    found = find(folder)
    assert found is not None
    second = build(folder, found.measured, cures_in(found.state.guards))
    take_up(second, found, folder, ())
    with _Going(second, counted) as going:
        return _Part(losses + going.on(steps), State.of(second.live))


class _Going:
    """A loop under way, a few steps at a time; what it has open is closed at the end."""

    def __init__(self, loop: Loop, counted: _Counted) -> None:
        self._loop, self._attempts, self._counted = loop, loop.attempts(), counted

    def on(self, count: int) -> list[float]:
        losses = []
        for report in islice(self._attempts, count):
            losses.append(report.loss)
            self._counted()
        if len(losses) < count:
            raise _too_short("a run that evaluate.patience ends", len(losses), count // 2)
        return losses

    def __enter__(self) -> _Going:
        return self

    def __exit__(self, *_: object) -> None:
        self._attempts.close()  # type: ignore[attr-defined]
        self._loop.checkpoints.close()


class _Counted:
    def __init__(self, told: Told, of: int) -> None:
        self._told, self._done, self._of = told, 0, of

    def __call__(self) -> None:
        self._done += 1
        self._told(self._done, self._of)


class _Notes:
    """Listens for what a save has to say."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def hear(self, event: events.Event) -> None:
        if event["event"] == events.NOTE:
            self.texts.append(str(event["text"]))

    def close(self) -> None: ...


def _save(loop: Loop) -> None:
    """Through the real commit, and waited for."""
    notes = _Notes()
    loop.journal.listeners.append(notes)
    loop.checkpoints.save()
    loop.checkpoints.finish()
    if loop.checkpoints.last is None or loop.checkpoints.last.attempt != loop.progress.attempts:
        raise StorageFailed(
            f"there is nothing to resume from: {notes.texts[-1] if notes.texts else 'the save failed'}",
            allowed="a finite state, and room for three checkpoints in the folder for temporary files",
            do="set TMPDIR to a folder with room; where the state is not finite, take a run that has not gone wrong",
        )


def _put(loop: Loop, begin: Generation | None) -> None:
    # Read anew each time: an optimizer goes on with the very tensors that it is given.
    if begin is not None:
        restore(loop.live, _read(begin))


def _read(generation: Generation) -> State:
    return State.from_parts(*read_state(generation, 0), where=str(generation.path))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _too_short(what: str, there: int, steps: int) -> WrongUse:
    return WrongUse(
        f"{steps} + {steps} steps of {what}",
        allowed=f"at most {there // 2} + {there // 2} of the {there} steps that there are",
        do=f"--steps {there // 2}" if there > 1 else "take a longer run",
    )


# -- the comparison ---------------------------------------------------------------------------------------------------


def _judged(one: _Part, two: _Part, steps: int, begin: int) -> Proof:
    pairs = enumerate(zip(one.losses, two.losses, strict=True))
    unlike = next(((at, a, b) for at, (a, b) in pairs if a.hex() != b.hex()), None)
    loss = None
    if unlike is not None:
        at, a, b = unlike
        loss = Difference(f"the loss of step {begin + at + 1:,}", repr(a), repr(b))
    return Proof(
        steps,
        begin,
        tensors=sum(isinstance(value, Tensor) for _, value in _leaves_of(one.state)),
        losses=tuple(one.losses),
        loss=loss,
        state=first_difference(one.state, two.state),
        repeatable=unlike is None or unlike[0] >= steps,
    )


def first_difference(one: State, two: State) -> Difference | None:
    """The first place, in the order of the components, in which two states are not the same to the bit."""
    ours, theirs = dict(_leaves_of(one)), dict(_leaves_of(two))
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            words = ["there" if name in side else "absent" for side in (ours, theirs)]
            return Difference(name, words[0], words[1])
        found = _unlike(name, ours[name], theirs[name])
        if found is not None:
            return found
    return None


def _leaves_of(state: State) -> Iterator[tuple[str, Any]]:
    for name in COMPONENTS:
        yield from _leaves(getattr(state, name), name)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values, by the names that a checkpoint has for them."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    if not inner:
        yield name, value
    for key, one in inner:
        yield from _leaves(one, f"{name}/{key}")


def _unlike(name: str, one: Any, two: Any) -> Difference | None:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _unlike_tensors(name, one.detach().cpu(), two.detach().cpu())
    # As texts, in which NaN is itself, and 0.0 is not -0.0.
    same = type(one) is type(two) and repr(one) == repr(two)
    return None if same else Difference(name, repr(one)[:80], repr(two)[:80])


def _unlike_tensors(name: str, one: Tensor, two: Tensor) -> Difference | None:
    if _facts(one) != _facts(two):
        return Difference(name, _facts(one), _facts(two))
    differs = (_bytes(one) != _bytes(two)).any(1).nonzero()
    if not len(differs):
        return None
    first = int(differs[0])
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(first), one.shape))
    numbers = [repr(tensor.reshape(-1)[first].item()) for tensor in (one, two)]
    return Difference(f"{name}[{place}]" if place else name, numbers[0], numbers[1])


def _facts(tensor: Tensor) -> str:
    sides = "×".join(map(str, tensor.shape)) or "one number"
    return f"{sides} in {str(tensor.dtype).removeprefix('torch.')}, strides {tuple(tensor.stride())}"


def _bytes(tensor: Tensor) -> Tensor:
    """The bits of each element, a row for each."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
