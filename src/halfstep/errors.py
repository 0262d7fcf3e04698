"""Everything halfstep raises, in one tree.

HalfstepError
├── WrongUse               the call cannot mean what it says
├── UnknownName            a word outside the vocabulary; the nearest one is offered
├── Contradiction          two settings that ask for different things
├── PrecisionRefused       the device cannot do what was asked, and substitution was not allowed
├── PrecisionNotObserved   the step ran, but not in the format that was asked for
├── RanksDisagree          processes that train one model had different gradients, or different steps
├── StateMismatch          a saved state that does not belong to this object
├── NotExact               a resume that would not go on as the run would have
├── TornUpdate             an optimizer failed half-way through an update
├── BadRecipe              a recipe that cannot be read, or that says something impossible
├── BadData                samples that are missing, unreadable or not what the task can use
├── NoCheckpoint           a run that has been saved, and of which no checkpoint is whole
├── FolderTaken            a run's folder that cannot be used
├── StorageFailed          checkpoints that could not be written, again and again
├── Diverged               a run that was given up: steps failed and nothing cured them
├── Stopped                a run that was asked to stop, and has saved what it had
│   └── NotBegun           ... before its first step, so that there was nothing to save
├── Unsafe                 a file that would run code, or reach outside its folder
└── MissingExtra           an optional package that is not installed

Every message has the same three parts: what was given, what is allowed, what to type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

USAGE, DATA, SOFTWARE, CANNOT_CREATE, STORAGE, TRY_AGAIN, REFUSED, CONFIGURATION = 64, 65, 70, 73, 74, 75, 77, 78
"""Exit codes, as sysexits.h has them."""
INCOMPATIBLE = 79
"""A saved state that belongs to another model, recipe or data set; sysexits.h has no word for it."""
GAVE_UP = 80
"""A run that cannot go on as it is: steps fail, and what may be tried has been."""


class HalfstepError(Exception):
    """Base of all errors; carries the three parts of its message, and the exit code of a command that ends in it."""

    exit_code = SOFTWARE

    def __init__(self, given: str, *, allowed: str = "", do: str = "") -> None:
        self.given, self.allowed, self.do = given, allowed, do
        lines = [given]
        if allowed:
            lines.append(f"  allowed: {allowed}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))


class WrongUse(HalfstepError, RuntimeError):
    exit_code = CONFIGURATION


class UnknownName(HalfstepError, ValueError):
    exit_code = CONFIGURATION


class Contradiction(HalfstepError, ValueError):
    exit_code = CONFIGURATION


class PrecisionRefused(HalfstepError, RuntimeError):
    exit_code = CONFIGURATION


class PrecisionNotObserved(HalfstepError, RuntimeError): ...


class RanksDisagree(HalfstepError, RuntimeError): ...


class StateMismatch(HalfstepError, ValueError):
    exit_code = INCOMPATIBLE


class TornUpdate(HalfstepError, RuntimeError): ...


class BadRecipe(HalfstepError, ValueError):
    exit_code = CONFIGURATION


class BadData(HalfstepError, ValueError):
    exit_code = DATA


class NoCheckpoint(HalfstepError, RuntimeError):
    exit_code = DATA


class FolderTaken(HalfstepError, RuntimeError):
    exit_code = CANNOT_CREATE


class StorageFailed(HalfstepError, RuntimeError):
    exit_code = STORAGE


class Diverged(HalfstepError, RuntimeError):
    """The weights are good: they are the last ones from before the trouble, as the message says."""

    exit_code = GAVE_UP
    verdict: Mapping[str, Any] | None = None
    """What was found, as plain data; None where the step could not be run again."""
    report: Any = None
    """The StepReport of the last attempt."""


class Stopped(HalfstepError, RuntimeError):
    exit_code = TRY_AGAIN


class NotBegun(Stopped): ...


class Unsafe(HalfstepError, RuntimeError):
    exit_code = REFUSED


class MissingExtra(HalfstepError, ImportError): ...


def unknown_name(kind: str, given: object, allowed: Iterable[str]) -> UnknownName:
    """The error for a word that is not known, with the nearest one that is."""
    known = sorted(set(allowed))
    near = difflib.get_close_matches(str(given), known, n=1, cutoff=0.6)
    return UnknownName(
        f"{kind} {given!r} is not known",
        allowed=", ".join(known),
        do=f"did you mean {near[0]!r}?" if near else f"use one of the allowed {kind} names",
    )


def reason_in(error: BaseException) -> str:
    """Why it failed, for a list of what did: of our errors only what was given, without what to do about it."""
    return error.given if isinstance(error, HalfstepError) else str(error)


def in_one_line(error: BaseException) -> str:
    """What somebody else's code raised, with the name of its type, as the last line of a traceback has it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_EXTRAS = {
    "train": {"matplotlib", "psutil", "pydantic", "safetensors", "tensorboard", "yaml"},
    "vision": {"PIL", "segmentation_models_pytorch", "timm", "torchmetrics", "torchvision", "webdataset"},
    "diffusion": {"diffusers"},
    "video": {"av"},
}
_USUAL = ("train", "vision")
"""What every run needs; other extras are named where one of their packages is missing."""


def missing_extra(error: ImportError) -> MissingExtra | None:
    """What to install, where an import failed because an extra of halfstep is not there; None for other failures."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtra) or not any(package in packages for packages in _EXTRAS.values()):
        return None
    wanted = [extra for extra, packages in _EXTRAS.items() if extra in _USUAL or package in packages]
    return MissingExtra(
        f"the package {package!r} is not installed",
        allowed=f"halfstep with its extras {' and '.join(wanted)}",
        do=f"pip install 'halfstep[{','.join(wanted)}]'",
    )


def same_keys(what: str, ours: Collection[str], saved: Collection[str]) -> None:
    """Refuse saved names that lack one of ours, or have one that we have not."""
    missing, extra = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or extra:
        words = [f"without {', '.join(missing)}"] if missing else []
        words += [f"with {', '.join(extra)}"] if extra else []
        raise StateMismatch(
            f"{what} saved {' and '.join(words)}",
            allowed=", ".join(sorted(ours)) or "none",
            do="build the Stepper as it was when it was saved",
        )


def same_presence(what: str, key: str, ours: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Refuse where one of the two has None for `key` and the other has something."""
    same_keys(what, [key] if ours[key] is not None else [], [key] if saved[key] is not None else [])
