"""Open recipes in the tools that measure: the trainer registers how, and nothing here imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from halfstep.errors import WrongUse

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.measure.case import Case

B = TypeVar("B")


class RecipeOpener(Protocol):
    """Recipes as the tools need them."""

    def open_case(self, text: str, settings: Sequence[str]) -> Case:
        """Return the case of a recipe, with its data."""

    def describe_case(self, text: str, settings: Sequence[str]) -> Case:
        """Return the case of a recipe; drawn samples replace data that is not here."""

    def change_settings(self, text: str, settings: Sequence[str], *changes: str) -> list[str]:
        """Return the recipe and its settings as typed, each set once."""

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


_registered: list[Callable[[], RecipeOpener]] = []


def register_recipe_opener(load: Callable[[], RecipeOpener]) -> None:
    """Register the function that returns the opener of recipes; it is called when a recipe is given."""
    _registered[:] = [load]


def find_recipe_opener() -> RecipeOpener:
    """Return the registered opener; raise `WrongUse` if there is none."""
    if not _registered:
        raise WrongUse(
            "a recipe, without an opener of recipes",
            allowed="a model with loss_fn and batch, or a case (module:callable)",
            do="import halfstep, which registers the opener",
        )
    return _registered[-1]()
