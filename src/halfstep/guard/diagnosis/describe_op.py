"""Describe in words how an operation made non-finite values."""

from __future__ import annotations

from halfstep.formats import FORMATS, FP32
from halfstep.observe.nonfinite_origin import MINUS_INF, NAN, Made, OperationInput

_BY_THE_SECOND = ("div", "remainder", "fmod", "true_divide", "floor_divide")
_BY_THE_FIRST = ("reciprocal", "rsqrt")
_LOGS = ("log", "log2", "log10", "log1p", "xlogy")
_EDGES = ("logit", "atanh", "acosh", "acos", "asin", "erfinv", "lgamma", "digamma", "polygamma")
"""Functions that are defined only between two numbers, or not at some."""
_ROOTS = ("sqrt", "rsqrt", "pow")
_SPREADS = ("std", "var", "std_mean", "var_mean")
_SQUARE_FITS = 1e15
"""The limit up to which squares add up to something finite in fp32."""
_SOFT = ("softmax", "attention")
_AVERAGES = ("mean", "var", "std", "nll_loss", "mse_loss", "batch_norm", "layer_norm", "div")


def deed_of(made: Made) -> str:
    """Return what an operation did, as the end of a sentence that begins with its name."""
    if made.outside is not None:
        return f"holds {_kinds(made)} before anything is computed"
    return _too_large(made) or _of_zero(made) or _without_answer(made) or _other(made)


def limit_of(format: str) -> float:
    """Return the largest number of a format; fp32's for an unknown one."""
    return FORMATS.get(format, FP32).largest


def needs_other_code(made: Made) -> bool:
    """Return whether neither smaller weights nor wider formats help, since the code asks for an undefined result."""
    return made.outside is None and not _too_large(made) and bool(_of_zero(made) or _without_answer(made))


def _too_large(made: Made) -> str:
    """Return how far the result exceeds its format, if fp32 can hold it."""
    limit = limit_of(made.format)
    if made.in_fp32 is None or limit >= FP32.largest:
        return ""
    if made.in_fp32 > limit:
        return f"makes {number(made.in_fp32)} in {made.format}, whose largest number is {number(limit)}"
    return f"makes {_kinds(made)} in {made.format}, where fp32 makes {number(made.in_fp32)}"


def _of_zero(made: Made) -> str:
    name, given = _short(made.name), made.given
    if made.on_purpose or (any(word in name for word in _SOFT) and any(MINUS_INF in each.kinds for each in given)):
        return "is over a row that is all -inf"
    if any(each.kinds for each in made.operands) and not any(each.kinds for each in given):
        return f"is given {' and '.join(sorted(made.operands[-1].kinds))} by the code"
    if made.selects_nothing:
        return "averages over nothing: every label is ignored, or weighs nothing"
    if name in _LOGS and given:
        return "takes the logarithm of a negative number" if NAN in made.kinds else "takes the logarithm of 0"
    if name in _ROOTS and NAN in made.kinds and made.operands and made.operands[0].has_negative:
        return "takes the root of a negative number"
    if name in _EDGES and given:
        return f"is not defined for what it gets, numbers up to {number(_largest(made))}"
    if _divides_by_zero(name, made.operands):
        return "divides by zero"
    return "averages over nothing" if _has_too_few(name, made) else _unabsorbed(made)


def _unabsorbed(made: Made) -> str:
    """Return the case that infinities were put there on purpose, as by a mask, and no operation removed them."""
    hidden = sorted({kind for each in made.given for kind in each.kinds})
    return f"makes {_kinds(made)} of the {' and '.join(hidden)} that a mask put there" if hidden else ""


def _without_answer(made: Made) -> str:
    """Return the case that fp64 fails as well although the inputs are not large: it is not a matter of range."""
    # An in-place operation has overwritten its input, so it cannot be repeated in fp64.
    judged = made.format in FORMATS and not made.name.endswith("_") and made.in_fp64 is None
    if not judged or _largest(made) > _SQUARE_FITS or NAN not in made.kinds:
        return ""
    return f"makes {_kinds(made)} out of numbers up to {number(_largest(made))}, in every format"


def _divides_by_zero(name: str, operands: tuple[OperationInput, ...]) -> bool:
    first, second = (*operands, None, None)[:2]
    if name in _BY_THE_FIRST:
        return first is not None and first.has_zero
    if first is None or second is None:
        return False
    return second.has_zero if name in _BY_THE_SECOND else name == "pow" and first.has_zero and second.has_negative


def _has_too_few(name: str, made: Made) -> bool:
    """Return whether there was no element to average, or only one for a spread."""
    if name in _SPREADS and NAN in made.kinds:
        return _largest(made) < _SQUARE_FITS
    return any(word in name for word in _AVERAGES) and any(0 in each.shape for each in made.given[:1])


def _other(made: Made) -> str:
    if NAN in made.kinds:
        return f"makes {_kinds(made)} in {made.format} out of numbers up to {number(_largest(made))}"
    format = made.format if made.format in FORMATS else FP32.name
    return f"makes more than {format}'s largest number, {number(limit_of(format))}"


def _largest(made: Made) -> float:
    return max((each.largest for each in made.given), default=0.0)


def _kinds(made: Made) -> str:
    return " and ".join(sorted(made.kinds)) or "nothing finite"


def _short(name: str) -> str:
    return name.rpartition(".")[2].strip("_").removesuffix("_backward")


def number(value: float) -> str:
    """Return a number as users write it: 71,204 and 3.4e+38."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"
