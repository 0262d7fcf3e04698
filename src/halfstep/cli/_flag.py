"""An option that takes no value, shown as such."""

from __future__ import annotations

from typing import Any

import typer


def flag(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, metavar="", **more)
