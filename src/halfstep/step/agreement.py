"""What all processes must agree on before an update: one small vector, summed, and read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep import world
from halfstep.errors import RanksDisagree
from halfstep.step.lane import Lane


def token_of(window: int, which: int, applied: int) -> int:
    """The same on all processes, if they are at the same step, for the same optimizers, with the same past."""
    return (window % 256 * 8 + which) * 256 + applied % 256


HAND = 2.0**-20
"""A raised hand, in the fraction of the tokens' sum, which are whole numbers: it costs no place in the vector."""


def agree(lanes: Sequence[Lane], token: int, hand: bool, *, cure: str) -> int:
    """One small collective, and one read by the host: the only ones of a step. How many hands are raised.

    Processes whose tokens differ are not at the same step and must not go on together; `cure` is said to those whose
    gradients differ.
    """
    numbers = [lane.numbers() for lane in lanes]
    flat = [n for some in numbers for n in some]
    together = world.size() > 1
    if together:
        flat += _fingerprints([some[1] for some in numbers], token, hand)
    agreed = world.agree(torch.stack(flat)).tolist()  # host read
    hands = int(hand)
    if together:
        norm, norm_squared, tokens, tokens_squared = agreed[-4:]
        hands = round(tokens % 1.0 / HAND)
        _check_tokens(tokens, tokens_squared)
        if not any(lane.gradients.sharded for lane in lanes):
            _check_norms(norm, norm_squared, cure)
    rest = iter(agreed)
    for lane, some in zip(lanes, numbers, strict=True):
        lane.read(*(next(rest) for _ in some))
    return hands


def _fingerprints(squared_shares: list[Tensor], token: int, hand: bool) -> list[Tensor]:
    """First and second moments: processes are alike where the one's square is the other, scaled by their number."""
    norm = torch.stack(squared_shares).sum()
    here = torch.tensor([token + HAND * hand, float(token**2)], dtype=torch.float64, device=norm.device)
    return [norm, norm.square() * world.size(), *here]


def _check_tokens(total: float, of_squares: float) -> None:
    # Small integers, summed exactly: equal on all processes, or not.
    if int(of_squares) * world.size() != int(total) ** 2:
        raise RanksDisagree(
            "processes are at different steps: one of them caught an error, was given another `only`, got more "
            "batches, or applied what another skipped",
            allowed="the same calls on every process, and guards that decide from what the report says",
            do="let an error end the process, and give every rank the same number of batches",
        )


def _check_norms(mean: float, mean_of_squares: float, cure: str) -> None:
    if math.isfinite(mean_of_squares) and not math.isclose(mean**2, mean_of_squares, rel_tol=1e-9):
        raise RanksDisagree(
            "gradients differ between processes that hold the same model",
            allowed="a loss that reaches every trainable parameter, on every process, in every window",
            do=cure,
        )
