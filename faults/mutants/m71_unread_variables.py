"""Launch variables are numbers, and any number will do."""

from __future__ import annotations

from halfstep import launch_variables

WHAT = "launch variables are read without limits"
ROWS = ("F55",)


def apply() -> None:
    launch_variables.read_number_variable = lambda name, variables, default, least, most: int(
        variables.get(name, default)
    )
