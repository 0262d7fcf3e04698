"""Why a setting of a plan was not measured, where that says nothing about the setting itself."""

from __future__ import annotations

from enum import StrEnum


class NotMeasuredReason(StrEnum):
    """Values of `Cell.cut`, also in the JSON of a plan."""

    NO_TIME = "not measured: no time was left"
    INTERRUPTED = "not measured: interrupted"
    NOT_COMPILED = "not measured: compiling a faster setting failed or took too long"

    __str__ = str.__str__
