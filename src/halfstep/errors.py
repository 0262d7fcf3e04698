"""The errors that halfstep raises, in one tree; `data.sets.downloads` adds one.

HalfstepError
├── WrongUse               a call that cannot work as written
│   └── WrongLaunch        launch variables that name no rank of a group
├── UnknownName            an unknown name; the message suggests the nearest one
├── Contradiction          two settings that ask for different things
├── PrecisionRefused       a precision that the device does not support, where a substitute was not allowed
├── PrecisionNotObserved   a step that did not run in the requested format
├── StartCheckFailed       a first micro-batch whose gradients or values are not those of fp32
├── RanksDisagree          ranks that have different gradients, or are at different steps
├── ReplicasDiffer         copies of weights or optimizer state that are not the same on all ranks
├── RankFailed             another rank failed, and the window was dropped on every rank
├── WorkerLost             a data worker that was killed from outside
├── NotRestarted           a restart that cannot help: the run ended for a reason that stays, or again and again
├── StateMismatch          a saved state that does not belong to this object
│   └── OtherForm          a file that an earlier or a later version of halfstep wrote
├── TornUpdate             an optimizer, schedule or average that failed in the middle of an update
├── BadRecipe              a recipe that cannot be read, or that asks for something impossible
├── BadData                samples that are missing, unreadable, or not usable for the task
├── NoCheckpoint           a run that was saved, and that has no intact checkpoint
├── NotExact               a resume that would not continue as the uninterrupted run
├── FolderTaken            a run folder that cannot be used
├── FolderLost             a run folder that was removed, moved or taken by another run while the run trained
├── StorageFailed          checkpoints that could not be written in repeated attempts
│   └── StoreFailed        an object store that cannot be reached, refuses, or has other content than expected
├── OutOfMemory            a step or an evaluation that did not fit into memory
├── NoStepInTime           a measurement without a single step in the time it was given
├── Diverged               a run that was given up: steps failed, and no remedy helped
├── WeightsNotFinite       a run that ended with weights that are not finite, and has none to save
├── Stopped                a run that was asked to stop, and has saved its state
│   └── NotBegun           ... before its first step, so that there is nothing to save
├── Unsafe                 a file that would run code, or that points outside of its folder
└── MissingExtra           an optional package that is not installed, or is not one for this torch

Every message has three parts: the given value, the allowed values, and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

USAGE, DATA, SOFTWARE, CANNOT_CREATE, STORAGE, TRY_AGAIN, REFUSED, CONFIGURATION = 64, 65, 70, 73, 74, 75, 77, 78
"""Exit codes of sysexits.h."""
HUNG = 76
"""A run in which nothing moved any more, or that lost a rank or a data worker: the same command resumes it."""
INCOMPATIBLE = 79
"""A saved state that belongs to another model, recipe or data set; sysexits.h has no code for it."""
GAVE_UP = 80
"""A run that cannot continue: steps fail, and every permitted remedy has been tried."""

OUT_OF_MEMORY = 81
"""Not enough memory: the same command will fail again."""
NO_STEP = 82
"""No step within the time that a measurement was given: more time, or a smaller batch, may be enough."""
INTERRUPTED = 130
"""Ctrl-C, as shells report it: 128 and the number of SIGINT."""
RUN_FINISHED = "run-finished"
"""The id of the error for a run that is already finished with the requested settings."""

_for_commands = False


@contextmanager
def use_command_wording() -> Iterator[None]:
    """Word the advice of errors that are made in the block for the command line; elsewhere it is worded for Python."""
    # Not a context variable: threads of the command, such as that of the checkpoints, need the same words.
    global _for_commands
    before, _for_commands = _for_commands, True
    try:
        yield
    finally:
        _for_commands = before


def choose_caller_wording(command: str, python: str) -> str:
    """Return the text for who made the call: `command` for the command line, else `python`."""
    return command if _for_commands else python


def format_option(name: str) -> str:
    """Return an option as the caller gives it: `--new` or `new=True`."""
    return choose_caller_wording(f"--{name.replace('_', '-')}", f"{name}=True")


def format_option_with_value(name: str, value: object) -> str:
    """Return an option with a value as the caller gives it: `--weights last` or `weights="last"`."""
    given = repr(value) if isinstance(value, int) else f'"{value}"'
    return choose_caller_wording(f"--{name.replace('_', '-')} {value}", f"{name}={given}")


def advise_adding_option(name: str) -> str:
    """Return the advice to launch the run with an option: `add --new` or `call fit(..., new=True)`."""
    return choose_caller_wording(f"add {format_option(name)}", f"call fit(..., {format_option(name)})")


def advise_new_run() -> str:
    """Return the advice to start a new run instead of one that cannot resume."""
    return f"{advise_adding_option('new')} to start again in a new folder"


class HalfstepError(Exception):
    """The base of all errors, with the three parts of its message and the exit code of a command that it ends.

    Args:
        given: The given value or situation.
        allowed: The allowed values.
        do: The fix, or the command to type.
        id: The name of the error, for code and tests; by default that of the class.
        line: The line of the file that the error is about.
    """

    exit_code = SOFTWARE
    id = "halfstep-error"
    """The name of the error, for code and tests; the text may be worded differently in another version."""

    def __init_subclass__(cls, id: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.id = id or cls.id

    def __init__(self, given: str, *, allowed: str = "", do: str = "", id: str = "", line: int | None = None) -> None:
        self.given, self.allowed, self.do = given, allowed, do
        self.line = line
        """The line of the file that it is about, where that is known."""
        if id:  # more exact than that of the class
            self.id = id
        lines = [given]
        if allowed:
            lines.append(f"  allowed: {allowed}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints: the caller's, without halfstep, torch and contextlib, and the message.

        `traceback.print_exception(error)` prints all of them.
        """
        import contextlib
        import os
        import sys
        import traceback

        packages = (sys.modules.get(name) for name in ("halfstep", "torch", "IPython"))
        inside = [os.path.join(os.path.dirname(str(one.__file__)), "") for one in packages if one is not None]
        inside.append(contextlib.__file__)
        frames = [one for one in traceback.extract_tb(self.__traceback__) if not one.filename.startswith(tuple(inside))]
        cause = [f"from {format_error_line(self.__cause__)}"] if self.__cause__ is not None else []
        lines = [line.rstrip("\n") for line in traceback.format_list(frames)]
        return [*lines, f"{type(self).__name__}: {self}", *cause]


# Each error is also a built-in one, so that code which catches ValueError or RuntimeError keeps working.
class WrongUse(HalfstepError, RuntimeError, id="wrong-use"):
    """A call that cannot work as written."""

    exit_code = CONFIGURATION


class WrongLaunch(WrongUse, id="wrong-launch"):
    """Launch variables that name no rank of a group; they may be wrong on one rank alone."""


class UnknownName(HalfstepError, ValueError, id="unknown-name"):
    """A name that is not known; the message offers the nearest one."""

    exit_code = CONFIGURATION


class Contradiction(HalfstepError, ValueError, id="contradiction"):
    """Two settings that ask for different things."""

    exit_code = CONFIGURATION


class PrecisionRefused(HalfstepError, RuntimeError, id="precision-refused"):
    """A precision that the device does not support, where a substitute was not allowed."""

    exit_code = CONFIGURATION


class PrecisionNotObserved(HalfstepError, RuntimeError, id="precision-not-observed"): ...


class StartCheckFailed(HalfstepError, RuntimeError, id="start-check-failed"):
    """A first micro-batch that lacks gradients or values which fp32 has; nothing of it was applied.

    `id` is that of the finding, such as `start.no_gradient`.
    """

    exit_code = CONFIGURATION
    module: str = ""
    """The path of the module."""
    figure: float = 0.0
    """The gradient, share or value that the message names."""


class RanksDisagree(HalfstepError, RuntimeError, id="ranks-disagree"): ...


class ReplicasDiffer(HalfstepError, RuntimeError, id="replicas-differ"):
    """Copies of weights or optimizer state that are not the same on all ranks; nothing of this was saved."""

    exit_code = GAVE_UP


class RankFailed(HalfstepError, RuntimeError, id="rank-failed"):
    """Another rank failed, and the window was dropped on every rank; nothing on this rank has changed."""

    exit_code = HUNG
    rank: int | None = None
    """The rank that failed, if it is known."""
    usable: bool = True
    """Whether the process group can be used for another window."""
    out_of_memory: bool = False
    """Whether that rank ran out of memory."""


class WorkerLost(HalfstepError, RuntimeError, id="worker-lost"):
    """A data worker that was killed from outside, as a system does that has no memory left."""

    exit_code = HUNG


class NotRestarted(HalfstepError, RuntimeError, id="not-restarted"):
    """A restart that cannot help: the run ended for a reason that stays, or again and again at the same place."""


class StateMismatch(HalfstepError, ValueError, id="state-mismatch"):
    """A saved state that does not belong to this object."""

    exit_code = INCOMPATIBLE


class OtherForm(StateMismatch, id="other-form"):
    """A file that an earlier or a later version of halfstep wrote; it is not damaged, but this one cannot read it."""


class TornUpdate(HalfstepError, RuntimeError, id="torn-update"): ...


class BadRecipe(HalfstepError, ValueError, id="bad-recipe"):
    """A recipe that cannot be read, or that asks for something impossible."""

    exit_code = CONFIGURATION


class BadData(HalfstepError, ValueError, id="bad-data"):
    """Samples that are missing, unreadable, or not usable for the task."""

    exit_code = DATA


class NoCheckpoint(HalfstepError, RuntimeError, id="no-checkpoint"):
    """A run that was saved, and that has no intact checkpoint."""

    exit_code = DATA


class NotExact(HalfstepError, RuntimeError, id="not-exact"):
    """A resume that would not continue as the uninterrupted run."""


class FolderTaken(HalfstepError, RuntimeError, id="folder-taken"):
    """A run folder that cannot be used."""

    exit_code = CANNOT_CREATE


class FolderLost(HalfstepError, RuntimeError, id="folder-lost"):
    """The folder of a running run that was removed or moved (exit code 74), or is another run's now (73)."""

    def __init__(self, given: str, *, allowed: str = "", do: str = "", exit_code: int = CANNOT_CREATE) -> None:
        super().__init__(given, allowed=allowed, do=do)
        self.exit_code = exit_code

    def copy(self) -> FolderLost:
        """Return a new error with the same words, to be raised in another thread or for another caller."""
        return FolderLost(self.given, allowed=self.allowed, do=self.do, exit_code=self.exit_code)


class StorageFailed(HalfstepError, RuntimeError, id="storage-failed"):
    """Checkpoints that could not be written in repeated attempts."""

    exit_code = STORAGE


class StoreFailed(StorageFailed, id="store-failed"):
    """An object store that cannot be reached, refuses, or has other content than expected; `kind` says which."""

    def __init__(self, given: str, *, allowed: str = "", do: str = "", kind: str = "unreachable") -> None:
        super().__init__(given, allowed=allowed, do=do)
        self.kind = kind


class OutOfMemory(HalfstepError, RuntimeError, id="out-of-memory"):
    """A step or an evaluation that did not fit into memory; nothing of the step was applied.

    `command` returns the command line to run with other settings, where there is one.
    """

    exit_code = OUT_OF_MEMORY
    command: Callable[[Mapping[str, object]], str] | None = None
    settings: Mapping[str, object] = {}
    """Settings under which it fits, where the failure itself tells."""
    more: str = ""
    """How the system gives more of what there was too little of."""
    batch: int = 0
    """Samples of the micro-batch that did not fit; 0 outside of a step."""
    microbatches: int = 1
    precision: str = ""


class NoStepInTime(HalfstepError, RuntimeError, id="no-step-in-time"):
    """A measurement without a single step in the time it was given."""

    exit_code = NO_STEP


class Diverged(HalfstepError, RuntimeError, id="diverged"):
    """A run that was given up; its weights are the last good ones, and the message tells which."""

    exit_code = GAVE_UP
    verdict: Mapping[str, Any] | None = None
    """The diagnosis as plain data; None if the step could not be replayed."""
    report: Any = None
    """The StepReport of the last attempt."""
    cause: str = ""
    """The verdict's cause, or `divergence`; empty where neither is known."""
    why: str = ""
    """The message without its advice on checkpoints, for callers that know which of them is good."""


class WeightsNotFinite(HalfstepError, RuntimeError, id="weights-not-finite"):
    """A run that ended with weights that are not finite: there are none to save."""

    exit_code = GAVE_UP


class Stopped(HalfstepError, RuntimeError, id="stopped"):
    """A run that was asked to stop, and has saved its state."""

    exit_code = TRY_AGAIN


class NotBegun(Stopped, id="not-begun"):
    """A run that was asked to stop before its first step, so that there is nothing to save."""

    signal: str = ""
    """The name of the signal that requested it."""


class Unsafe(HalfstepError, RuntimeError, id="unsafe"):
    """A file that would run code, or that points outside of its folder."""

    exit_code = REFUSED


class BadSample(Exception):
    """A sample that cannot be read: it is skipped, replaced and counted."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class MissingExtra(HalfstepError, ImportError, id="missing-extra"): ...


def build_unknown_name_error(kind: str, given: object, allowed: Iterable[str]) -> UnknownName:
    """Return the error for an unknown name, with the nearest known one as a suggestion."""
    known = sorted(set(allowed))
    near = difflib.get_close_matches(str(given), known, n=1, cutoff=0.6)
    return UnknownName(
        f"{kind} {given!r} is not known",
        allowed=", ".join(known),
        do=f"did you mean {near[0]!r}?" if near else f"use one of the allowed {kind} names",
    )


def format_error_reason(error: BaseException) -> str:
    """Return the reason of an error for a list of failures: for halfstep's own errors, without `allowed` and `do`."""
    return error.given if isinstance(error, HalfstepError) else str(error)


ENDED_FROM_OUTSIDE = "was killed (probably by the OOM killer)"
"""What happened to a process that got SIGKILL from somewhere else."""


def format_error_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message, like the last line of a traceback."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_EXTRAS = {
    "train": {"numpy", "psutil", "pydantic", "safetensors", "tensorboard", "yaml"},
    "vision": {"PIL", "segmentation_models_pytorch", "timm", "torchvision"},
    "diffusion": {"diffusers"},
    "video": {"av"},
    "onnx": {"onnx", "onnxruntime", "onnxscript"},
    "parquet": {"pyarrow"},
    "store": {"obstore"},
    "text": {"bitsandbytes", "gguf", "peft", "tokenizers", "transformers"},
    "narrow": {"torchao"},
}
_USUAL = ("train", "vision")
"""Extras that every run needs; others are added to the message where one of their packages is missing."""


def convert_import_error(error: ImportError) -> MissingExtra | None:
    """Return the error that names the extra to install, or None if the import failed for another reason."""
    package = (error.name or "").partition(".")[0]
    if isinstance(error, MissingExtra) or not any(package in packages for packages in _EXTRAS.values()):
        return None
    wanted = [extra for extra, packages in _EXTRAS.items() if extra in _USUAL or package in packages]
    return MissingExtra(
        f"the package {package!r} is not installed",
        allowed=f"halfstep with its extras {' and '.join(wanted)}",
        do=f"pip install 'halfstep[{','.join(wanted)}]'",
    )


def check_packages_installed(*packages: str) -> None:
    """Raise MissingExtra for a package of an extra that is not installed; nothing is imported."""
    for package in packages:
        if find_spec(package) is None:
            error = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise convert_import_error(error) or error


def convert_torchvision_error(error: Exception) -> MissingExtra | None:
    """Return the error for a torchvision that does not match this torch, or None for any other error.

    Each loads its own operators from a library that is linked against one build of torch.
    """
    if not ("torchvision::" in str(error) and "does not exist" in str(error)):
        return None
    return MissingExtra(
        "torchvision was built for another build of torch than the installed one, such as CUDA against CPU",
        allowed="torch and torchvision from the same index, in matching versions",
        do="pip install --force-reinstall torch torchvision",
    )


def check_same_keys(what: str, ours: Collection[str], saved: Collection[str]) -> None:
    """Raise StateMismatch where saved names and ours differ."""
    missing, extra = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or extra:
        words = [f"without {', '.join(missing)}"] if missing else []
        words += [f"with {', '.join(extra)}"] if extra else []
        raise StateMismatch(
            f"{what} saved {' and '.join(words)}",
            allowed=", ".join(sorted(ours)) or "none",
            do="build the Stepper as in the saved run",
        )


def check_same_presence(what: str, key: str, ours: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Raise StateMismatch where `key` is None in one of the two states and not in the other."""
    check_same_keys(what, [key] if ours[key] is not None else [], [key] if saved[key] is not None else [])


def check_same_form(what: object, ours: int, saved: int, *, for_earlier: str) -> None:
    """Raise OtherForm where `what` was saved in another form than ours; `for_earlier` is what to do with an older one.

    Readers must not take OtherForm for damage, which is set aside or removed.
    """
    if saved != ours:
        is_later = saved > ours
        raise OtherForm(
            f"{what} was written in form {saved} by {'a later' if is_later else 'an earlier'} halfstep",
            allowed=f"form {ours}, which this version writes",
            do="pip install --upgrade halfstep" if is_later else for_earlier,
        )
