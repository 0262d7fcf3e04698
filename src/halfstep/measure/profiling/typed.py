"""What to type next, for a recipe, for a case, and for objects in Python."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from halfstep.measure.profiling.facts import Facts

_LONGER = 4
_PRECISION_FLAGS = ("--bf16", "--fp16", "--fp32", "--tf32")


def again(facts: Facts) -> str:
    """Profile it anew, after the change."""
    return _profile(facts, facts.asked)


def longer(facts: Facts) -> str:
    """Profile it anew, with more time."""
    seconds = f"{_LONGER * facts.seconds:g}"
    if not facts.subject:
        return f"profile(model, loss_fn, batch, seconds={seconds})"
    return _profile(facts, facts.asked, "--seconds", seconds)


def changed(facts: Facts, setting: str) -> str:
    """Train the recipe with another setting; a person's own code is changed by hand, and profiled again."""
    if facts.own_code or not facts.subject:
        return again(facts)
    return _command("halfstep", "train", *_with(facts.subject, setting))


def in_precision(facts: Facts, precision: str) -> str:
    if facts.own_code or not facts.subject:
        return _profile(facts, precision)
    return _command("halfstep", "train", *_with(facts.subject, f"precision={precision}"))


def planned(facts: Facts) -> str:
    return _command("halfstep", "plan", *facts.subject, *_device(facts)) if facts.subject else "halfstep plan --help"


def grown(facts: Facts) -> str:
    """A plan that may try larger batches."""
    return f"{planned(facts)} --grow-batch" if facts.subject else planned(facts)


def benched(facts: Facts) -> str:
    if not facts.subject:
        return "halfstep bench --help"
    return _command("halfstep", "bench", *facts.subject, "--precisions", f"fp32,{facts.asked}")


def trained(facts: Facts) -> str:
    """The recipe in the precision that was measured."""
    return planned(facts) if facts.own_code else changed(facts, f"precision={facts.asked}")


def reading(facts: Facts) -> str:
    """Where reading a batch spends its time, line by line of the person's own code."""
    if not facts.subject:
        return "python -m cProfile -s cumulative YOUR_SCRIPT.py"
    module = f"{__package__}.reading"
    return _command("python", "-m", "cProfile", "-s", "cumulative", "-m", module, *facts.subject)


def _profile(facts: Facts, precision: str, *more: str) -> str:
    if not facts.subject:
        return f'profile(model, loss_fn, batch, precision="{precision}")'
    return _command("halfstep", "profile", *facts.subject, "--precision", precision, *_device(facts), *more)


def _device(facts: Facts) -> tuple[str, ...]:
    return ("--device", facts.device) if facts.device else ()


def _with(words: Sequence[str], setting: str) -> list[str]:
    """The words with a setting; one of the same name is replaced, however it was written."""
    key = setting.partition("=")[0]
    kept = [words[0]]
    rest = iter(words[1:])
    for word in rest:
        if word == f"--{key}":
            next(rest, None)  # its value stands apart
        elif not (word.lstrip("-").startswith(f"{key}=") or (key == "precision" and word in _PRECISION_FLAGS)):
            kept.append(word)
    return [*kept, setting]


def _command(*words: str) -> str:
    return shlex.join(words)
