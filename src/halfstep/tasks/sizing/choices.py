"""Choose a value, with a reason, for every setting the user left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.data.layout import HELD_OUT, choose_validation_share
from halfstep.data.set_facts import SetFacts
from halfstep.recipe.resolve import ChosenSetting
from halfstep.recipe.schema import EXACT
from halfstep.train.machine import Machine

MINUTES, ACCELERATED_MINUTES = 5, 30
"""The target length of a first run with its evaluations: long enough to learn, short enough to wait for."""
EVALUATING = 0.2
"""The share of the training time that evaluations may take."""
MOST_EVALUATIONS = 25
MOST_EPOCHS = 200
MEMORY_SHARE = 0.5
"""The share of memory for activations; weights, libraries and other programs use the rest."""
UNKNOWN = SetFacts(images=200, width=512, height=512)
"""Stands for a data set that is not available for inspection."""


class Choices:
    """Settings in the order they are decided; a setting the user gave wins, and later ones see it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.made = given, list[ChosenSetting]()

    def choose(self, key: str, value: Any, reason: str) -> Any:
        """Return the user's value of `key`, or record and return `value` with its reason."""
        if key in self.given:
            return self.given[key]
        self.made.append(ChosenSetting(key, value, reason))
        return value

    def validation(self, facts: SetFacts) -> tuple[int, int]:
        """Return how many samples are for training and for validation; an existing folder wins over a share."""
        share = choose_validation_share(facts.images)
        reason = f"{self._held_out(facts, share)} of {facts.images:,} images are held out, chosen by their names"
        if facts.val is not None:
            reason = f"the folder {facts.val} is there"
        val = self.choose("data.val", facts.val or share, reason)
        if isinstance(val, str):
            return facts.images, max(1, round(facts.images * share))
        held = self._held_out(facts, float(val))
        return max(facts.images - held, 1), held

    def _held_out(self, facts: SetFacts, share: float) -> int:
        """Return how many images the run holds out."""
        if len(facts.places) < 2:  # no set, or none that can be split
            return max(1, round(facts.images * share))
        return len(HELD_OUT[self.given.get("data.split", EXACT)](facts.places, share))

    def batch(self, samples: int, wanted: int, bytes_each: float, machine: Machine) -> int:
        """Return the largest power of two that fits half of the memory and leaves at least 4 steps per epoch."""
        fits, some = int(MEMORY_SHARE * machine.memory / bytes_each), max(samples // (4 * machine.devices), 2)
        size = 1
        while size * 2 <= min(wanted, fits, some):
            size *= 2
        reason = "the largest batch that still trains well"
        if size < wanted:
            reason = (
                f"{samples} images give at least 4 steps an epoch" if some <= fits else "more would fill the memory"
            )
        return int(self.choose("train.batch_size", max(size, 1), reason))

    def length(self, per_epoch: int, step_seconds: float, evaluation_seconds: float, machine: Machine) -> None:
        """Choose epochs that fill the time of a first run, and evaluations that use a small part of it."""
        epochs = max(1, min(MOST_EPOCHS, round(choose_target_minutes(machine) * 60 / (per_epoch * step_seconds))))
        steps = self.given.get("train.steps") or (self.given.get("train.epochs") or epochs) * per_epoch
        if not any(self.given.get(f"train.{key}") is not None for key in ("epochs", "steps")):
            about = max(1, round(steps * step_seconds / 60))
            reason = f"{steps:,} steps, about {about} minute{'s' * (about != 1)} on {machine}; more epochs help"
            self.choose("train.epochs", epochs, reason)
        length = -(-steps // per_epoch)
        # A set with nothing to evaluate would divide by zero.
        number = int(EVALUATING * steps * step_seconds / max(evaluation_seconds, 1e-9))
        every = -(-length // max(1, min(MOST_EVALUATIONS, length, number)))
        reason = f"evaluations take no more than {EVALUATING:.0%} of the training's time"
        self.choose("evaluate.every_epochs", every, reason)


def choose_target_minutes(machine: Machine) -> int:
    """Return the target length of a first run on this machine."""
    return ACCELERATED_MINUTES if machine.has_accelerator else MINUTES
