"""A run that gave up: which checkpoint is good, and the one command to type."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfstep import world
from halfstep.errors import Diverged
from halfstep.guard.verdict import COMPILER, DATA, DIVERGENCE, HARDWARE, PRECISION
from halfstep.train.advising import launcher, lower_rate, written_rate
from halfstep.train.checkpoints import Checkpoints
from halfstep.train.guarding import in_the_data
from halfstep.train.loop import Loop
from halfstep.train.losses import Losses

REPAIR = "repair"
_CURED = (PRECISION, COMPILER, HARDWARE)
"""Causes that the guard itself has a cure for."""
_EARLIER = ": go on from an earlier checkpoint"
"""How the guard's words end where it knows of no checkpoints."""
_ALSO = {"guard": ("guard.mode", "mode"), "optimizer.lr": ("lr", "learning_rate")}
"""Other words for a setting, on the command line."""


class Leave(NamedTuple):
    """What a launch is allowed to do, on the command line and in Python."""

    flag: str
    argument: str


_ACCEPT, _NEW = Leave("--accept-recipe-change", "accept_recipe_change"), Leave("--new", "new")


@dataclass(frozen=True)
class GivenUp:
    """The end of a run, in words."""

    why: str
    kept: str
    do: str
    checkpoint: str | None
    cause: str
    verdict: Any

    @property
    def error(self) -> Diverged:
        made = Diverged(f"{self.why}\n{self.kept}", do=self.do)
        made.verdict = self.verdict
        return made

    def as_dict(self) -> dict[str, Any]:
        """What the journal's last event has of it."""
        return {name: getattr(self, name) for name in ("why", "kept", "do", "checkpoint", "cause")}


def given_up(loop: Loop, error: Diverged, command: str) -> GivenUp:
    """Checkpoints that have the weights which failed are set aside. Called by every process, at the same step."""
    cause, checkpoints, since = _cause(error), loop.checkpoints, loop.guarding.applied_at
    checkpoints.finish()
    is_spoilt = False
    if cause == DIVERGENCE and not _is_in_the_code(error) and since and checkpoints.last is not None:
        # The weights are what is wrong, and one that was saved with them, or on the way to them, is of no use.
        is_spoilt = not checkpoints.set_aside(since, Losses(loop.keeper.folder).ruined)
    do = error.do if _is_in_the_code(error) else _command(loop, cause, command, _NEW if is_spoilt else _ACCEPT)
    good, kept = None if is_spoilt else checkpoints.name, _kept(checkpoints, is_spoilt)
    if do and cause == DIVERGENCE and not _is_in_the_code(error):
        kept = f"{kept}; try a lower learning rate"
    return GivenUp(_why(loop, cause, error), kept, do or error.do, good, cause, error.verdict)


def _why(loop: Loop, cause: str, error: Diverged) -> str:
    """Which checkpoint to go on from, if any, is said after it."""
    why = error.given.removesuffix(_EARLIER)
    return why + in_the_data(loop.guarding.guilty) if cause == DATA else why


def _cause(error: Diverged) -> str:
    """Losses that are far too high and finite have no verdict: the words alone say what they are."""
    return str((error.verdict or {}).get("cause") or error.given.partition(":")[0])


def _is_in_the_code(error: Diverged) -> bool:
    return any(cure["kind"] == "fix_code" for cure in (error.verdict or {}).get("cures", ()))


def _kept(checkpoints: Checkpoints, is_spoilt: bool) -> str:
    if checkpoints.last is None:
        return "no checkpoint was written yet: the run begins again from step 0"
    if is_spoilt:
        return "the weights were spoilt before the oldest checkpoint was taken: the run must begin again"
    at = f"{checkpoints.last.attempt:,}"
    return f"the last good checkpoint is {checkpoints.name}, of step {at}: the run goes on from it"


def _command(loop: Loop, cause: str, command: str, leave: Leave) -> str | None:
    """The whole line to type, where one setting is the cure; None where the guard's own words say more."""
    if cause in _CURED and loop.guarding.mode != REPAIR:
        return _typed(loop, command, "guard", REPAIR, None)
    if cause == DIVERGENCE:
        guardian = loop.guarding.guardian
        rates = guardian.history().rates if guardian is not None else ()
        rate = lower_rate(loop.recipe.optimizer.lr, rates, written_rate(command))
        return _typed(loop, command, "optimizer.lr", rate, leave)
    return None


def _typed(loop: Loop, command: str, key: str, value: str, leave: Leave | None) -> str:
    if not command.startswith("halfstep "):
        more = f", {leave.argument}=True" if leave else ""
        return f"halfstep.fit(..., settings={{{key!r}: {value!r}}}{more})"
    typed = _launched(shlex.split(command))
    words = _without(typed, {_NEW.flag, _ACCEPT.flag}, {key, *_ALSO[key]})
    if _NEW.flag in typed and leave is not _NEW:  # it would begin another run
        words = [*_without(words, set(), {"run.dir", "dir"}), f"run.dir={loop.keeper.folder}"]
    return shlex.join([*words, f"{key}={value}", *([leave.flag] if leave else [])])


def _launched(words: list[str]) -> list[str]:
    """With what starts as many processes again: a checkpoint of several is of no use to one."""
    return [*launcher(world.size()), *words[1:]]


def _without(words: Sequence[str], flags: Collection[str], names: Collection[str]) -> list[str]:
    """A command without these flags, and without what it says about these settings."""
    kept, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.lstrip("-").partition("=")
        if word in flags or (name in names and (equals or word.startswith("--"))):
            if word not in flags and not equals and left:
                left.pop(0)
        else:
            kept.append(word)
    return kept
