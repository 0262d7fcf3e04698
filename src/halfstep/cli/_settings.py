"""A command that takes the settings of a recipe: its help lists them from the schema, so that none is written twice."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class TakesSettings(TyperCommand):
    """Everything the command does not know itself is a setting: `train.batch_size=4`, `--batch_size 4`, `--bf16`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from rich.console import Console

        from halfstep.cli._explained import settings_help

        Console(highlight=False).print(settings_help())
