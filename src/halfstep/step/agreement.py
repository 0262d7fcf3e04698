"""Agree with all ranks before an update: one small vector, summed once and read once. A single rank reads its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.errors import RanksDisagree
from halfstep.step.optimizer_slot import move_number_to_device

if TYPE_CHECKING:
    from halfstep.step.objective import Objective
    from halfstep.step.ranks import Ranks

_MOST = 2**13
"""Ranks whose votes can be counted: four counters of 13 bits and one bit fit the exact integers of a float64."""


@dataclass(frozen=True)
class RankVotes:
    """The number of ranks that report something besides their numbers; packed into one number."""

    stop: int = 0
    """Ranks that ask all ranks to stop after this step."""
    abort: int = 0
    """Ranks that failed in this window."""
    no_batch: int = 0
    """Ranks that had no batch and contributed zeros."""
    bad_buffer: int = 0
    """Ranks with a buffer that this window made non-finite."""
    save: int = 0
    """Whether rank 0 asks all ranks to save after this step; no other rank may set it."""

    def packed(self) -> int:
        # Without bad_buffer, which is a flag on the device and is added there: packing it here would need a host read.
        """Return this rank's votes as one number."""
        return self.stop + _MOST * (self.abort + _MOST * self.no_batch) + _MOST**4 * self.save

    @classmethod
    def unpacked(cls, total: float) -> RankVotes:
        """Return the number of votes of each kind in a sum of packed votes."""
        rest, counts = int(total), []
        for _ in range(4):
            rest, count = divmod(rest, _MOST)
            counts.append(count)
        stop, abort, no_batch, bad_buffer = counts
        return cls(stop, abort, no_batch, bad_buffer, save=rest)


class LocalFlags:
    """Flags of this rank that are read with the agreement: each further read would synchronize with the host again."""

    def __init__(self, bad_buffer: Tensor | None, more: Sequence[Tensor] = ()) -> None:
        self.bad_buffer, self._more = bad_buffer, more
        """Whether a buffer is non-finite: counted over all ranks."""
        self.read: list[float] = []
        """The other flags as numbers, once the host has read them; no other rank learns them."""

    def read_alone(self, numbers: Sequence[Tensor], device: torch.device) -> list[float]:
        """Read some numbers and the flags, without other ranks."""
        every = [*numbers, *self._more] if self._more else numbers
        found: list[float] = torch.stack(
            [number if number.device == device else move_number_to_device(device, number) for number in every]
        ).tolist()  # host read
        self.read = found[len(numbers) :]
        return found[: len(numbers)]

    def read_with(self, agreed: Tensor) -> list[float]:
        """Read a vector that all ranks have agreed on, and the flags."""
        more = [move_number_to_device(agreed.device, flag).to(agreed.dtype).view(1) for flag in self._more]
        found: list[float] = (torch.cat([agreed, *more]) if more else agreed).tolist()  # host read
        self.read = found[len(agreed) :]
        return found[: len(agreed)]


def read_alone(
    objectives: Sequence[Objective], bad_buffer: Tensor | None, flags: Sequence[Tensor]
) -> tuple[bool, list[float]]:
    """Read the numbers of a step of a single rank; return whether a buffer is non-finite, and the flags as numbers."""
    numbers = objectives[0].numbers()
    for objective in objectives[1:]:
        numbers += objective.numbers()
    if bad_buffer is not None:
        numbers.append(bad_buffer)
    # One tensor for all numbers: the host waits for the device once.
    read = LocalFlags(None, flags)
    found = iter(read.read_alone(numbers, objectives[0].loss.device))
    for objective in objectives:
        objective.read(found)
    return bad_buffer is not None and next(found) != 0.0, read.read


AGREEMENT_BYTES = 128
MOST_IN_128_BYTES = 4
"""Optimizers that fit a vector of 16 numbers; each further one may add a loss, a count and a norm."""


class RankAgreement:
    """The vector of a step. It has the same length on every rank, so that a failed rank can vote too."""

    def __init__(self, ranks: Ranks, optimizers: int) -> None:
        self._ranks = ranks
        # Fixed when the Stepper is built: a failed rank does not know what its window would have held.
        self._length = AGREEMENT_BYTES // 8 + 3 * max(0, optimizers - MOST_IN_128_BYTES)

    def on(
        self, objectives: Sequence[Objective], token: int, votes: RankVotes, flags: LocalFlags, *, fix: str
    ) -> RankVotes:
        """Run the only collective of a step, read it once on the host, and return the votes of all ranks.

        Raises RanksDisagree if tokens differ, because the ranks are not at the same step, or if gradients differ;
        `fix` is the advice for that case.
        """
        # One vector on one device: each further tensor would be one more synchronization with the host.
        device = objectives[0].loss.device
        body = [
            move_number_to_device(device, number).double()
            for objective in objectives
            for number in objective.numbers_on_ranks()
        ]
        shares = [move_number_to_device(device, share).double() for o in objectives for share in o.squared_shares()]
        squared = torch.stack(shares).sum()
        vote = torch.tensor([token, token**2, votes.packed()], dtype=torch.float64, device=device)
        if flags.bad_buffer is not None:
            vote[2] += move_number_to_device(device, flags.bad_buffer) * float(_MOST**3)
        # Padded to one pair for each possible loss, so that a rank without a batch finds the norms at the same place.
        body += [torch.zeros_like(squared)] * (2 * (len(shares) - len(objectives)))
        # n times the sum of squares equals the square of the sum only if all ranks have the same norm: two numbers
        # compare all ranks, at any world size.
        numbers = torch.cat([vote, torch.stack([squared.square() * self._ranks.size, *body, *shares])])
        agreed, found = self._sum(numbers, flags)
        if found.abort:
            return found
        self._read(objectives, agreed, max(1, self._ranks.size - found.no_batch), fix)
        return found

    def abort(self, device: torch.device) -> None:
        """Vote that this rank has failed: no rank applies this window, at any stage of the step."""
        # Token 0: with an abort in the sum, tokens are not compared.
        numbers = torch.tensor([0.0, 0.0, RankVotes(abort=1).packed()], dtype=torch.float64, device=device)
        self._sum(numbers, LocalFlags(None))

    def _sum(self, numbers: Tensor, flags: LocalFlags) -> tuple[list[float], RankVotes]:
        # all_reduce needs the same length everywhere, also from a rank that has nothing but its vote.
        padded = numbers.new_zeros(self._length)
        padded[: len(numbers)] = numbers
        agreed = flags.read_with(self._ranks.agree(padded))
        found = RankVotes.unpacked(agreed[2])
        if not found.abort:
            _check_same_step(agreed[0], agreed[1], self._ranks.size)
        return agreed[3:], found

    def _read(self, objectives: Sequence[Objective], agreed: list[float], with_a_batch: int, fix: str) -> None:
        fourth, *rest = agreed
        optimizers = sum(len(objective.slots) for objective in objectives)
        numbers, norms = iter(rest), iter(rest[2 * optimizers :])
        total = 0.0
        for objective in objectives:
            total += objective.read_on_ranks(numbers, norms, self._ranks.size, with_a_batch)
        # Ranks hold different shards by design.
        if not any(slot.gradients.sharded for objective in objectives for slot in objective.slots):
            _check_same_gradients(total, fourth, fix)


def _check_same_step(total: float, of_squares: float, ranks: int) -> None:
    # Exact small integers: by Cauchy-Schwarz the two sides are equal only if all tokens are.
    if int(of_squares) * ranks != int(total) ** 2:
        raise RanksDisagree(
            "ranks are at different steps: one of them caught an error, was given another `only`, got more "
            "batches, or applied a step that another skipped",
            allowed="the same calls on every rank, and guards that decide from the report alone",
            do="let an error end the process; a rank without a batch calls stepper.step(None)",
        )


def _check_same_gradients(mean: float, mean_of_squares: float, fix: str) -> None:
    # In float64, over norms that are equal to the bit where gradients are: the tolerance only covers the order of the
    # sum. Non-finite gradients skip the step anyway.
    if math.isfinite(mean_of_squares) and not math.isclose(mean**2, mean_of_squares, rel_tol=1e-9):
        raise RanksDisagree(
            "gradients differ between ranks that hold the same model",
            allowed="a loss that reaches every trainable parameter, on every rank, in every window",
            do=fix,
        )
