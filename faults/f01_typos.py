"""A key with one letter wrong, in every place where a recipe has a key."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from faults.outcome import Outcome
from faults.recipe_check import Ending, in_process, through_the_command

ID = "F01"
WHAT = "a misspelled key is refused, with the correct key as a hint, before any file is written"
REFERENCES = ("unet", "imagenet100", "segmentation_tiny", "classification_tiny", "cifar10")
LETTERS = "abcdefghijklmnopqrstuvwxyz_"
RIGHT_HINTS = 0.9
SLOWEST = {False: 0.05, True: 3.0}
"""Seconds: in this process, and as a command of its own."""
PER_KEY = {False: 2, True: 3}


class Mutant(NamedTuple):
    recipe: dict[str, Any]
    meant: str
    """The dotted key before it was misspelled."""


def run(full: bool) -> Outcome:
    mutants = list(_mutants(PER_KEY[full]))
    held, hinted, slowest = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        check = through_the_command if full else in_process
        for name in REFERENCES:  # unspoiled, each must pass; what is loaded once is not the price of a check
            _must_pass(check(name, Path(folder)), name)
        for mutant in mutants:
            file = Path(folder) / "recipe_under_test.yaml"
            file.write_text(yaml.safe_dump(mutant.recipe, sort_keys=False))
            ending = check(str(file), Path(folder))
            file.unlink()
            slowest = max(slowest, ending.seconds)
            hinted += f"did you mean {mutant.meant}?" in ending.said
            held += ending.code == 78 and not any(Path(folder).iterdir())
    good = held == len(mutants) and hinted >= RIGHT_HINTS * len(mutants) and slowest <= SLOWEST[full]
    # Hints and time are for all of them together: where they fail, no count of single mutants may hide it.
    share = hinted / len(mutants)
    return Outcome(
        held if good else min(held, len(mutants) - 1), len(mutants), f"{slowest * 1e3:.1f}ms,hints={share:.1%}"
    )


def _must_pass(ending: Ending, recipe: str) -> None:
    if ending.code != 0:
        raise RuntimeError(f"{recipe} should pass: {ending.said}")


def _mutants(per_key: int) -> Iterator[Mutant]:
    from halfstep.recipe.fields import build_recipe_fields
    from halfstep.recipe.names import FOREIGN_SECTIONS, PRECISION_WORDS
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import find_task_class

    chance = random.Random(0)
    for name in REFERENCES:
        raw = read_recipe(name).raw
        schema = find_task_class(raw["task"]).schema
        fields = build_recipe_fields(schema)
        meaningful = {*fields.keys_of, *fields.sections, *PRECISION_WORDS, *FOREIGN_SECTIONS}
        for path in _paths(raw):
            spoiled = {word for word in _misspelt(path[-1], chance) if word not in meaningful}
            # `task` decides which schema there is; without it the error is another one, and is a row of F02.
            for word in chance.sample(sorted(spoiled), per_key) if path != ("task",) else ():
                yield Mutant(_renamed(raw, path, word), ".".join(path))


def _paths(raw: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in raw.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _paths(value, (*prefix, key))


def _misspelt(word: str, chance: random.Random) -> Iterator[str]:
    for place in range(len(word)):
        if len(word) > 2:
            yield word[:place] + word[place + 1 :]
        yield word[:place] + chance.choice(LETTERS) + word[place:]
        yield word[:place] + chance.choice(LETTERS) + word[place + 1 :]
        if place:
            yield word[: place - 1] + word[place] + word[place - 1] + word[place + 1 :]


def _renamed(raw: dict[str, Any], path: tuple[str, ...], word: str) -> dict[str, Any]:
    result = copy.deepcopy(raw)
    place = result
    for key in path[:-1]:
        place = place[key]
    items = [(word if key == path[-1] else key, value) for key, value in place.items()]
    place.clear()
    place.update(items)
    return result
