"""The next command to type: for a recipe, for a case, and for objects in Python."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from halfstep.measure.profile.facts import ProfileFacts
from halfstep.measure.recipe_opener import find_recipe_opener
from halfstep.numbers import pluralize_noun

_NAMED = 4


def format_module_names(names: Sequence[str]) -> str:
    """Return module names in quotes; names in parentheses are placeholders and stay as they are."""
    more = len(names) - _NAMED
    shown = [name if name.startswith("(") else f'"{name}"' for name in names[:_NAMED]]
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def format_layer_names(names: Sequence[str], kind: str) -> str:
    """Return `layer "2" (Conv2d)`."""
    return f"{pluralize_noun(len(names), 'layer')} {format_module_names(names)}" + (f" ({kind})" if kind else "")


_LONGER = 4


def suggest_profile_again(facts: ProfileFacts) -> str:
    """Return the command that profiles again, after the change."""
    return _format_profile_command(facts, facts.asked)


def suggest_longer_profile(facts: ProfileFacts) -> str:
    """Return the command that profiles again, with more time."""
    seconds = f"{_LONGER * facts.seconds:g}"
    if not facts.subject:
        return f"profile(model, loss_fn, batch, seconds={seconds})"
    return _format_profile_command(facts, facts.asked, "--seconds", seconds)


def suggest_train_setting(facts: ProfileFacts, setting: str) -> str:
    """Return the command that trains the recipe with another setting; the user's own code is profiled again."""
    if facts.own_code or not facts.subject:
        return suggest_profile_again(facts)
    return _format_train_command(facts.subject, setting)


def suggest_other_precision(facts: ProfileFacts, precision: str) -> str:
    """Return the command for another precision."""
    if facts.own_code or not facts.subject:
        return _format_profile_command(facts, precision)
    return _format_train_command(facts.subject, f"precision={precision}")


def suggest_plan(facts: ProfileFacts) -> str:
    """Return the command for a plan."""
    return (
        _join_command("halfstep", "plan", *facts.subject, *_format_device_option(facts))
        if facts.subject
        else "halfstep plan --help"
    )


def suggest_growing_plan(facts: ProfileFacts) -> str:
    """Return the command for a plan that may try larger batches."""
    return f"{suggest_plan(facts)} --grow-batch" if facts.subject else suggest_plan(facts)


def suggest_bench(facts: ProfileFacts) -> str:
    """Return the command that benches the precision against fp32."""
    if not facts.subject:
        return "halfstep bench --help"
    return _join_command("halfstep", "bench", *facts.subject, "--precisions", f"fp32,{facts.asked}")


def suggest_training(facts: ProfileFacts) -> str:
    """Return the command that trains the recipe in the measured precision; for own code, the one for a plan."""
    return suggest_plan(facts) if facts.own_code else suggest_train_setting(facts, f"precision={facts.asked}")


def suggest_reading_profile(facts: ProfileFacts) -> str:
    """Return the command that shows where reading a batch spends its time, by function of the user's code."""
    if not facts.subject:
        return "python -m cProfile -s cumulative YOUR_SCRIPT.py"
    module = f"{__package__}.reading"
    return _join_command("python", "-m", "cProfile", "-s", "cumulative", "-m", module, *facts.subject)


def _format_profile_command(facts: ProfileFacts, precision: str, *more: str) -> str:
    if not facts.subject:
        return f'profile(model, loss_fn, batch, precision="{precision}")'
    return _join_command(
        "halfstep", "profile", *facts.subject, "--precision", precision, *_format_device_option(facts), *more
    )


def _format_device_option(facts: ProfileFacts) -> tuple[str, ...]:
    return ("--device", facts.device) if facts.device else ()


def _format_train_command(words: Sequence[str], setting: str) -> str:
    return _join_command("halfstep", "train", *find_recipe_opener().change_settings(words[0], words[1:], setting))


def _join_command(*words: str) -> str:
    return shlex.join(words)
