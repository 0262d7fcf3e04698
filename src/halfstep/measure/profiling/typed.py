"""What to type next, for a recipe, for a case, and for objects in Python."""

from __future__ import annotations

import shlex

from halfstep.measure.profiling.facts import Facts

_IN_PYTHON = "profile(model, loss_fn, batch)"


def again(facts: Facts) -> str:
    """Profile it anew, after the change."""
    return _command("halfstep", "profile", *facts.subject, *_precision(facts)) if facts.subject else _IN_PYTHON


def changed(facts: Facts, setting: str) -> str:
    """Train the recipe with another setting; a person's own code is changed by hand, and profiled again."""
    if facts.own_code or not facts.subject:
        return again(facts)
    return _command("halfstep", "train", *facts.subject, setting)


def in_precision(facts: Facts, precision: str) -> str:
    if not facts.subject:
        return f'profile(model, loss_fn, batch, precision="{precision}")'
    if facts.own_code:
        return _command("halfstep", "profile", *facts.subject, "--precision", precision)
    return _command("halfstep", "train", *facts.subject, f"precision={precision}")


def planned(facts: Facts) -> str:
    return _command("halfstep", "plan", *facts.subject, "--grow-batch") if facts.subject else "halfstep plan --help"


def benched(facts: Facts) -> str:
    if not facts.subject:
        return "halfstep bench --help"
    return _command("halfstep", "bench", *facts.subject, "--precisions", f"fp32,{facts.asked}")


def trained(facts: Facts) -> str:
    if facts.own_code or not facts.subject:
        return planned(facts)
    return _command("halfstep", "train", *facts.subject)


def reading(facts: Facts) -> str:
    """Where reading a batch spends its time, line by line of the person's own code."""
    if not facts.subject:
        return "python -m cProfile -s cumulative YOUR_SCRIPT.py"
    module = f"{__package__}.reading"
    return _command("python", "-m", "cProfile", "-s", "cumulative", "-m", module, *facts.subject)


def _precision(facts: Facts) -> tuple[str, ...]:
    return ("--precision", facts.asked)


def _command(*words: str) -> str:
    return shlex.join(words)
