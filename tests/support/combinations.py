"""Values that a test is given together: some combinations of them in CI, all of them with --full."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest

Parameters = tuple[list[str], list[Any]]
"""Names and cases, as `pytest.mark.parametrize` takes them."""


def pairwise(**values: Iterable[Any]) -> Parameters:
    """Return every two values of different names together at least once; the whole product with --full."""
    choices = [list(each) for each in values.values()]
    product = list(itertools.product(*(range(len(each)) for each in choices)))
    chosen: set[tuple[int, ...]] = set()
    missing = {pair for case in product for pair in _pairs(case)}
    while missing:
        best = max(product, key=lambda case: len(missing & _pairs(case)))
        chosen.add(best)
        missing -= _pairs(best)
    return list(values), _marked(choices, chosen)


def one_per_value(**values: Iterable[Any]) -> Parameters:
    """Return every value of every name at least once; the whole product with --full."""
    choices = [list(each) for each in values.values()]
    longest = max(map(len, choices))
    return list(values), _marked(choices, {tuple(n % len(each) for each in choices) for n in range(longest)})


def _pairs(case: tuple[int, ...]) -> set[tuple[Any, Any]]:
    return set(itertools.combinations(enumerate(case), 2))


def _marked(choices: list[list[Any]], chosen: Collection[tuple[int, ...]]) -> list[Any]:
    return [
        pytest.param(
            *(each[n] for each, n in zip(choices, case, strict=True)), marks=() if case in chosen else pytest.mark.full
        )
        for case in itertools.product(*(range(len(each)) for each in choices))
    ]
