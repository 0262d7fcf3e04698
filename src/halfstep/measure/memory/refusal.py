"""Code that needs a number while there are none: told as an error that names its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from halfstep.errors import WrongUse
from halfstep.measure.code_lines import MEASURING, lines_outside, place_and_text

_NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_NUMPY = ".numpy() is not supported for tensor subclasses"
_KINDS = {
    "_local_scalar_dense": "reads a number out of a tensor, as item(), float() and `if` do,",
    "equal": "compares two tensors by their numbers",
    "nonzero": "makes a tensor whose size depends on numbers, as a boolean mask in brackets does,",
}


@contextmanager
def numbers_refused(why: str = "memory is estimated without computing any") -> Iterator[None]:
    """Round a person's code on fake tensors."""
    try:
        yield
    except _NEEDS_NUMBERS as error:
        raise _refusal(error, str(error.func), why) from error
    except RuntimeError as error:
        if _NUMPY not in str(error):
            raise
        raise _refusal(error, "numpy", why) from error


def _refusal(error: BaseException, function: str, why: str) -> WrongUse:
    name = function.removeprefix("aten.").partition(".")[0]
    what = _KINDS.get(name, f"asks for numbers ({name})")
    return WrongUse(
        f"{asked_at(error)} {what} but {why}",
        allowed="code whose sizes and branches do not depend on the numbers in tensors",
        do="use torch.where, or multiply by the mask; read a tensor after the step; or take that line out",
    )


def asked_at(error: BaseException) -> str:
    """The innermost line of a person's own code, as file:line: its text."""
    lines = lines_outside(error, *MEASURING)
    return place_and_text(lines[-1]) if lines else "code outside any file"
