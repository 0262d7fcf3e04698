"""The recipes of the trainer, for the tools that measure them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.measure.case import Case

B = TypeVar("B")


class TrainerRecipes:
    """The registered opener of recipes. Each method imports the part of the trainer that it needs."""

    def open_case(self, text: str, settings: Sequence[str]) -> Case:
        """Return the case of a recipe, with its data."""
        from halfstep.runs.recipe_case import build_recipe_case

        return build_recipe_case(text, settings)

    def describe_case(self, text: str, settings: Sequence[str]) -> Case:
        """Return the case of a recipe; drawn samples replace data that is not here."""
        from halfstep.runs.recipe_case import build_case_synthetic_fallback

        return build_case_synthetic_fallback(text, settings)

    def change_settings(self, text: str, settings: Sequence[str], *changes: str) -> list[str]:
        """Return the recipe and its settings as typed, each set once."""
        from halfstep.runs.resolve import apply_setting_changes

        return apply_setting_changes(text, settings, *changes)

    def bench(
        self,
        text: str,
        settings: Sequence[str],
        changes: Mapping[str, tuple[str, ...]],
        folder: Path,
        seeds: int,
        run: Callable[..., B],
    ) -> B:
        """Train the recipe with the changes of each candidate; `run` compares the runs in the folder."""
        from halfstep.measure.subject import Subject
        from halfstep.runs.bench_recipe import bench_recipe

        return bench_recipe(Subject(text, tuple(settings)), changes, folder, seeds, run)
