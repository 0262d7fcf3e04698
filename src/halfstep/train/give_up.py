"""End a run whose guard gave up: name the last good checkpoint and the one command to type."""

from __future__ import annotations

import ast
import functools
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from halfstep import distributed
from halfstep.errors import Diverged, HalfstepError, OutOfMemory, RankFailed, format_error_reason
from halfstep.guard.alarms.spike import REFUSED
from halfstep.guard.verdict import COMPILER, DATA, DIVERGENCE, NOT_REPRODUCIBLE, PRECISION, STATE
from halfstep.journal import events
from halfstep.journal.jsonl import JOURNAL, iterate_saved_events
from halfstep.journal.text import FIT_CALL
from halfstep.out_of_memory import (
    convert_memory_error,
    convert_worker_error,
    is_out_of_memory,
    is_shared_memory_error,
    is_thread_limit_error,
)
from halfstep.recipe.fields import build_recipe_fields
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.recipe.sources import read_recipe
from halfstep.train.checkpointing import Checkpoints
from halfstep.train.guarding import describe_guilty_samples
from halfstep.train.loop import Loop
from halfstep.train.microbatches import choose_smaller_microbatches

LOWER = 10
"""The divisor for a learning rate that was too high; also the factor above its recipe's that counts as a mistake."""


def build_launcher_words(processes: int) -> list[str]:
    """Return the words that launch halfstep with so many ranks."""
    if processes == 1:
        return ["halfstep"]
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "halfstep"]


def suggest_lower_lr(rate: float, rates: Sequence[float] = (), in_recipe: float | None = None) -> str:
    """Return a learning rate to try instead of `rate`, which failed.

    `rates` are those of the last steps, `in_recipe` is the one in the recipe file. An lr far above the recipe's is
    replaced by the recipe's. Otherwise the result is a tenth of the highest lr reached: during warm-up the configured
    lr was never used, and during decay the lr of the last step is too low to be the cause.
    """
    if in_recipe is not None and 0 < LOWER * in_recipe <= rate:
        return f"{in_recipe:g}"
    reached = max(rates, default=0.0)
    tenth = min(rate, reached if reached > 0 else rate) / LOWER
    # Nine decimals absorb the rounding of the division: 0.0006 / 10 must not become 5e-05.
    digit, _, exponent = f"{tenth:.9e}".partition("e")
    return f"{float(f'{digit[0]}e{exponent}'):g}"  # truncated to one digit, so never higher


def format_fit_call(recipe: object) -> str:
    """Return the call that trains a recipe in Python, as the journal of its run records it."""
    return f"{FIT_CALL}{str(recipe)!r})" if isinstance(recipe, str | Path) else f"{FIT_CALL}...)"


def read_recipe_lr(command: str) -> float | None:
    """Return the learning rate in the file that `halfstep train RECIPE`, or `halfstep.fit('RECIPE')`, names; None
    if there is none.
    """
    recipe = _parse_recipe_name(command)
    if recipe is None:
        return None
    try:
        section: Any = read_recipe(recipe).raw.get("optimizer")
    except HalfstepError:
        return None
    rate: Any = section.get("lr") if isinstance(section, dict) else None
    try:
        return float(rate)
    except (TypeError, ValueError):
        return None


def _parse_recipe_name(command: str) -> str | None:
    if command.startswith(FIT_CALL):
        with suppress(ValueError, SyntaxError):
            named = ast.literal_eval(command.removeprefix(FIT_CALL).removesuffix(")"))
            return named if isinstance(named, str) else None
        return None
    words = shlex.split(command)
    return words[2] if words[:2] == ["halfstep", "train"] and len(words) > 2 else None


FAR = 10.0
"""Weights are ruined where their loss is this many times the first loss of the run."""


class LossHistory:
    """The losses of one run over all its launches. Without a journal nothing is known, and nothing is ruined."""

    def __init__(self, folder: Path) -> None:
        self._after: dict[int, float] = {}
        """The lowest loss of the weights that each attempt left."""
        self._first: float | None = None
        waiting: list[int] = []
        """The attempts that left the weights in their present state."""
        for attempt, loss, applied in _read_step_losses(folder):
            if not waiting:
                waiting = [attempt - 1]
            if math.isfinite(loss):
                self._first = loss if self._first is None else self._first
                for one in waiting:
                    self._after[one] = min(loss, self._after.get(one, math.inf))
            # A skipped step leaves the weights of the step before: the next loss is that of all of them.
            waiting = [attempt] if applied else [*waiting, attempt]

    def ruined(self, attempt: int) -> bool:
        """Return whether the weights after `attempt` have a loss far above the first loss of the run."""
        first, after = self._first, self._after.get(attempt)
        if not first or after is None:
            return False
        # A difference, not a ratio: the first loss may be negative.
        return after - first > (FAR - 1) * abs(first)


def _read_step_losses(folder: Path) -> list[tuple[int, float, bool]]:
    """Return attempt, loss and whether it was applied; the loss of a step that failed numerically is NaN."""
    told = []
    for event in iterate_saved_events(folder / JOURNAL):
        attempt, loss, applied = (event.get(key) for key in ("attempt", "loss", "applied"))
        if event["event"] == events.STEP and type(attempt) is int:
            # A loss refused as a spike is finite, and measures the weights.
            counts = applied is True or event.get("reason") == REFUSED
            number = float(loss) if counts and isinstance(loss, (int, float)) else math.nan
            told.append((attempt, number, applied is True))
    return told


OUT_OF_MEMORY = "out_of_memory"
RECOMPUTE = "train.checkpoint_activations"


def build_oom_error(loop: Loop, error: Exception, command: str) -> OutOfMemory | None:
    """Return the error to raise instead of an out-of-memory error, here or on another rank; None for any other."""
    line = functools.partial(build_resume_command, loop.outputs.folder, command, permission=ACCEPT)
    if is_thread_limit_error(error) or is_shared_memory_error(error):
        error = convert_worker_error(error) or error
    if isinstance(error, OutOfMemory) and error.settings:
        # No permission: these settings may change in a resumed run.
        again = build_resume_command(loop.outputs.folder, command, error.settings, permission=None)
        return OutOfMemory(error.given, allowed=error.allowed, do=f"{error.more}; or {again}")
    elsewhere = isinstance(error, RankFailed) and error.out_of_memory
    if not is_out_of_memory(error) and not elsewhere:
        return None
    train, precision = loop.recipe.train, loop.parts.choice.precision.name
    what = "evaluating" if loop.is_evaluating else "in a step with"
    do = line(_suggest_smaller_settings(loop))
    doing = f"{what} micro-batches of {train.batch_size} samples in {precision}"
    if distributed.count_ranks() > 1 and not elsewhere:
        doing = f"on rank {distributed.rank()} {doing}"
    failed = (
        OutOfMemory(f"out of memory: {format_error_reason(error)}", allowed="a batch that fits into the memory", do=do)
        if elsewhere
        else convert_memory_error(error, doing, do)
    )
    if failed is not None:
        failed.command, failed.precision = line, precision
        failed.batch, failed.microbatches = 0 if loop.is_evaluating else train.batch_size, train.microbatches
    return failed


def _suggest_smaller_settings(loop: Loop) -> Mapping[str, object]:
    """Return smaller settings where only the failure is known: half the batch, then recomputation, then resolution."""
    train = loop.recipe.train
    if train.batch_size > 1:
        return choose_smaller_microbatches(train.batch_size, train.microbatches, train.batch_size // 2)
    if not train.checkpoint_activations and not train.compile:
        return {RECOMPUTE: "true"}
    section, _, name = loop.task.resolution.partition(".")
    size = getattr(getattr(loop.recipe, section, None), name, None) if name else None
    return {loop.task.resolution: size // 2} if isinstance(size, int) and size > 1 else {}


REPAIR = "repair"
_CURED = (PRECISION, COMPILER, NOT_REPRODUCIBLE)
"""Causes that the guard can remedy itself."""
_IN_THE_WEIGHTS = (DIVERGENCE, STATE)
"""Causes for which a recent checkpoint may be as bad as the weights."""


class Permission(NamedTuple):
    """A permission for a launch, as a flag on the command line and as an argument in Python."""

    flag: str
    argument: str


ACCEPT, _NEW = Permission("--accept-recipe-change", "accept_recipe_change"), Permission("--new", "new")


@dataclass(frozen=True)
class GiveUpReport:
    """The end of a run, in words."""

    why: str
    kept: str
    do: str
    checkpoint: str | None
    cause: str
    verdict: Any

    @property
    def error(self) -> Diverged:
        """The error to raise."""
        made = Diverged(f"{self.why}\n{self.kept}", do=self.do)
        made.verdict = self.verdict
        return made

    def as_dict(self) -> dict[str, str | None]:
        """Return the fields of the journal's last event."""
        same = {"do": self.do, "checkpoint": self.checkpoint, "cause": self.cause}
        return {"error": self.why, "checkpoint_note": self.kept, **same}


def give_up_run(loop: Loop, error: Diverged, command: str) -> GiveUpReport:
    """Return how the run ends; checkpoints that hold the failed weights are set aside.

    Every rank calls it at the same step.
    """
    cause, checkpoints, since = error.cause, loop.checkpoints, loop.guarding.applied_at
    # A save in the background may hold the weights that failed.
    checkpoints.finish()
    none_is_good = False
    if cause in _IN_THE_WEIGHTS and not _is_code_fault(error) and since and checkpoints.last is not None:
        # The weights are at fault: checkpoints saved with them, or on the way to them, are useless.
        none_is_good = not checkpoints.set_aside(since, LossHistory(loop.outputs.folder).ruined)
    do = (
        error.do
        if _is_code_fault(error)
        else _build_remedy_command(loop, cause, command, _NEW if none_is_good else ACCEPT)
    )
    good, kept = None if none_is_good else checkpoints.name, _describe_kept_checkpoint(checkpoints, none_is_good)
    if do and cause == DIVERGENCE and not _is_code_fault(error):
        kept = f"{kept}; this time, use a lower learning rate"
    why = error.why or error.given
    if cause == DATA:
        why += describe_guilty_samples(loop.guarding.guilty)
    return GiveUpReport(why, kept, do or error.do, good, cause, error.verdict)


def _is_code_fault(error: Diverged) -> bool:
    return any(remedy["kind"] == "fix_code" for remedy in (error.verdict or {}).get("remedies", ()))


def _describe_kept_checkpoint(checkpoints: Checkpoints, none_is_good: bool) -> str:
    if checkpoints.last is None:
        return "no checkpoint was written: the run must start again from step 0"
    if none_is_good:
        return "the weights were already bad in the oldest checkpoint: the run must start again"
    at = f"{checkpoints.last.attempt:,}"
    return f"the last good checkpoint is {checkpoints.name}, of step {at}: the run continues from it"


def _build_remedy_command(loop: Loop, cause: str, command: str, permission: Permission) -> str | None:
    """Return the full command where one setting is the remedy; None if the guard's message is better advice."""
    if cause in _CURED and loop.guarding.mode != REPAIR:
        return build_resume_command(loop.outputs.folder, command, {"guard": REPAIR}, None)
    if cause == DIVERGENCE:
        guardian = loop.guarding.guardian
        rates = guardian.history().rates if guardian is not None else ()
        rate = suggest_lower_lr(loop.recipe.optimizer.lr, rates, read_recipe_lr(command))
        return build_resume_command(loop.outputs.folder, command, {"optimizer.lr": float(rate)}, permission)
    return None


def build_resume_command(
    folder: Path, command: str, changes: Mapping[str, object], permission: Permission | None
) -> str:
    """Return the command that resumes the run in `folder` with changed settings, from the original command."""
    # A run started from Python has no command line to repeat.
    if not command.startswith("halfstep "):
        more = f", {permission.argument}=True" if permission else ""
        return f"{command.removesuffix(')')}, settings={dict(changes)!r}{more})"
    line = _add_launcher(shlex.split(command))
    words = _drop_words(line, {_NEW.flag, ACCEPT.flag}, {word for key in changes for word in _list_setting_words(key)})
    if _NEW.flag in line and permission is not _NEW:  # it would start another run
        words = [*_drop_words(words, set(), set(_list_setting_words("run.dir"))), f"run.dir={folder}"]
    settings = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in changes.items()]
    return shlex.join([*words, *settings, *([permission.flag] if permission else [])])


def _list_setting_words(key: str) -> list[str]:
    """Return the words that stand for a setting on the command line."""
    fields = build_recipe_fields(Recipe[ModelOptions, DataOptions, LossOptions])
    setting = fields.by_key.get(key) or fields.by_key.get(fields.keys_of.get(key, [key])[0])
    return [key, setting.key, setting.name, *setting.also] if setting else [key]


def _add_launcher(words: list[str]) -> list[str]:
    """Return the command with its launcher: a checkpoint of several ranks cannot be resumed on one."""
    return [*build_launcher_words(distributed.count_ranks()), *words[1:]]


def _drop_words(words: Sequence[str], flags: Collection[str], names: Collection[str]) -> list[str]:
    """Return a command without these flags and these settings."""
    kept, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.lstrip("-").partition("=")
        if word in flags or (name.replace("-", "_") in names and (equals or word.startswith("--"))):
            # "--lr 0.1" is two words: the value goes with its option.
            if word not in flags and not equals and left:
                left.pop(0)
        else:
            kept.append(word)
    return kept
