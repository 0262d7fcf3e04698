"""The next command to type: for a recipe, for a case, and for objects in Python."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from halfstep.measure.profile.facts import ProfileFacts
from halfstep.numbers import many

_NAMED = 4


def listed(names: Sequence[str]) -> str:
    """Return module names in quotes; names in parentheses are placeholders and stay as they are."""
    more = len(names) - _NAMED
    shown = [name if name.startswith("(") else f'"{name}"' for name in names[:_NAMED]]
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def layers(names: Sequence[str], kind: str) -> str:
    """Return `layer "2" (Conv2d)`."""
    return f"{many(len(names), 'layer')} {listed(names)}" + (f" ({kind})" if kind else "")


_LONGER = 4


def again(facts: ProfileFacts) -> str:
    """Return the command that profiles again, after the change."""
    return _profile(facts, facts.asked)


def longer(facts: ProfileFacts) -> str:
    """Return the command that profiles again, with more time."""
    seconds = f"{_LONGER * facts.seconds:g}"
    if not facts.subject:
        return f"profile(model, loss_fn, batch, seconds={seconds})"
    return _profile(facts, facts.asked, "--seconds", seconds)


def changed(facts: ProfileFacts, setting: str) -> str:
    """Return the command that trains the recipe with another setting; the user's own code is profiled again."""
    if facts.own_code or not facts.subject:
        return again(facts)
    return _train_command(facts.subject, setting)


def in_precision(facts: ProfileFacts, precision: str) -> str:
    """Return the command for another precision."""
    if facts.own_code or not facts.subject:
        return _profile(facts, precision)
    return _train_command(facts.subject, f"precision={precision}")


def planned(facts: ProfileFacts) -> str:
    """Return the command for a plan."""
    return _command("halfstep", "plan", *facts.subject, *_device(facts)) if facts.subject else "halfstep plan --help"


def grown(facts: ProfileFacts) -> str:
    """Return the command for a plan that may try larger batches."""
    return f"{planned(facts)} --grow-batch" if facts.subject else planned(facts)


def benched(facts: ProfileFacts) -> str:
    """Return the command that benches the precision against fp32."""
    if not facts.subject:
        return "halfstep bench --help"
    return _command("halfstep", "bench", *facts.subject, "--precisions", f"fp32,{facts.asked}")


def trained(facts: ProfileFacts) -> str:
    """Return the command that trains the recipe in the measured precision; for own code, the one for a plan."""
    return planned(facts) if facts.own_code else changed(facts, f"precision={facts.asked}")


def reading(facts: ProfileFacts) -> str:
    """Return the command that shows where reading a batch spends its time, by function of the user's code."""
    if not facts.subject:
        return "python -m cProfile -s cumulative YOUR_SCRIPT.py"
    module = f"{__package__}.reading"
    return _command("python", "-m", "cProfile", "-s", "cumulative", "-m", module, *facts.subject)


def _profile(facts: ProfileFacts, precision: str, *more: str) -> str:
    if not facts.subject:
        return f'profile(model, loss_fn, batch, precision="{precision}")'
    return _command("halfstep", "profile", *facts.subject, "--precision", precision, *_device(facts), *more)


def _device(facts: ProfileFacts) -> tuple[str, ...]:
    return ("--device", facts.device) if facts.device else ()


def _train_command(words: Sequence[str], setting: str) -> str:
    from halfstep.runs.resolve import with_changes  # imports the recipe packages, which objects in Python do not need

    return _command("halfstep", "train", *with_changes(words[0], words[1:], setting))


def _command(*words: str) -> str:
    return shlex.join(words)
