"""Agree with all ranks before an update: one small vector, summed once and read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import RankFailed, RanksDisagree, in_one_line
from halfstep.step.gradients import on
from halfstep.step.objective import Objective
from halfstep.step.ranks import Ranks, connection_broke, rank_failed
from halfstep.step.report import Guard, StepReport

# -- failure ----------------------------------------------------------------------------------------------------------
# Report a failure to the other ranks, so that errors are part of the one decision.
# Where the ranks can still meet, a failed rank votes in the window's agreement: every rank then drops the window, and
# the process group stays usable. Where they cannot, it leaves a message in the store, and the others stop waiting.


def tell(ranks: Ranks, window: int, error: BaseException) -> bool:
    """Publish an error for the other ranks; return False if it came from them, or if they cannot be reached."""
    if isinstance(error, RankFailed):
        return error.usable
    if connection_broke(error):
        return False
    ranks.tell(window, in_one_line(error))
    return True


def backward_from(output: Any) -> None:
    """Run backward from anything a loss function returned: only the collectives matter, not the gradients."""
    total = [leaf.sum() for leaf in _leaves(output) if leaf.requires_grad]
    if total:
        sum(total[1:], total[0]).backward()  # type: ignore[no-untyped-call]


def _leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in fields(output)]
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for item in output for leaf in _leaves(item)] if isinstance(output, (list, tuple)) else []


# -- guards --------------------------------------------------------------------------------------------------------


def refused_by(guards: Sequence[Guard], report: StepReport, ranks: Ranks, window: int) -> str | None:
    """Return the name of the first guard that refuses a step on any rank, or None.

    A guard that raises on one rank ends the window on all: the others raise RankFailed. Guards that decide from the
    report alone declare `same_on_all_ranks = True`; only others cost an agreement.
    """
    if ranks.size == 1 or all(getattr(guard, "same_on_all_ranks", False) for guard in guards):
        return next((guard.name for guard in guards if not guard.passes(report)), None)
    refusals, error = _asked(guards, report)
    if error is not None:
        ranks.tell(window, in_one_line(error))
    # After the message was stored: the others look for it as soon as they have this result.
    raised, *refused = ranks.agree(torch.tensor([error is not None, *refusals], dtype=torch.float64)).tolist()
    if error is not None:
        raise error
    if raised:
        raise ranks.failed(window)
    return next((guard.name for guard, ranks_against in zip(guards, refused, strict=True) if ranks_against), None)


def _asked(guards: Sequence[Guard], report: StepReport) -> tuple[list[bool], BaseException | None]:
    """Return which guards refuse; asking stops at the first refusal, as with one process."""
    refusals = [False] * len(guards)
    try:
        for place, guard in enumerate(guards):
            if not guard.passes(report):
                refusals[place] = True
                break
    except BaseException as error:
        return [False] * len(guards), error
    return refusals, None


# -- errors --------------------------------------------------------------------------------------------------------


class Together:
    """The end of a window on every rank after one of them failed."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._gone: BaseException | None = None

    def check(self) -> None:
        """Raise RankFailed if the process group became unusable in an earlier window."""
        if self._gone is not None:
            given = f"a window after one in which ranks parted: {in_one_line(self._gone)}"
            raise rank_failed(given, None, usable=False)

    def fail(
        self,
        window: int,
        error: BaseException,
        complete: Callable[[], bool],
        vote: Callable[[], object],
        begun: Callable[[], str],
    ) -> None:
        """Inform the other ranks of an error here.

        `complete` joins the collectives in which they wait, `vote` votes to abort in the agreement, and `begun` returns
        which collectives this rank had begun.
        """
        # Read first: `complete` begins further collectives.
        place = begun()
        if not tell(self.ranks, window, error):
            self._part(error)
        # No rank waits either if all of them failed at the same place, as with a mistake in the loss function.
        elif self._meets(complete, vote) or self.ranks.everybody_failed(window, place):
            return
        else:
            self.ranks.leave(in_one_line(error))
            self._part(error)
            _say(
                error, "the other ranks waited for this one in a collective: the process group cannot be used any more"
            )

    def _meets(self, complete: Callable[[], bool], vote: Callable[[], object]) -> bool:
        try:
            if not complete():
                return False
            vote()
        except Exception:
            return False
        return True

    def _part(self, error: BaseException) -> None:
        self._gone = error
        if not isinstance(error, RankFailed):
            with self.ranks.explained():
                if connection_broke(error):
                    raise error


def _say(error: BaseException, words: str) -> None:
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(words)


# -- agreement --------------------------------------------------------------------------------------------------------


_MOST = 2**13
"""Ranks whose votes can be counted: four counters of 13 bits fit the exact integers of a float64."""


def token_of(window: int, which: int, applied: int) -> int:
    """Return a number that all ranks share if they are at the same step, for the same optimizers and past."""
    # 19 bits, so that squares summed over 2**13 ranks stay below 2**53, where float64 is exact.
    return (window % 256 * 8 + which) * 256 + applied % 256


@dataclass(frozen=True)
class Votes:
    """The number of ranks that report something besides their numbers; packed into one number."""

    stop: int = 0
    """Ranks that ask all ranks to stop after this step."""
    abort: int = 0
    """Ranks that failed in this window."""
    no_batch: int = 0
    """Ranks that had no batch and contributed zeros."""
    bad_buffer: int = 0
    """Ranks with a buffer that this window made non-finite."""

    def packed(self) -> int:
        # Without bad_buffer, which is a flag on the device and is added there: packing it here would need a host read.
        """Return this rank's votes as one number."""
        return self.stop + _MOST * (self.abort + _MOST * self.no_batch)

    @classmethod
    def unpacked(cls, total: float) -> Votes:
        """Return the number of votes of each kind in a sum of packed votes."""
        rest, counts = int(total), []
        for _ in range(4):
            rest, count = divmod(rest, _MOST)
            counts.append(count)
        return cls(*counts)


MOST_IN_128_BYTES = 4
"""Optimizers that fit a vector of 16 numbers; each further one may add a loss, a count and a norm."""


class Agreement:
    """The vector of a step. It has the same length on every rank, so that a failed rank can vote too."""

    def __init__(self, ranks: Ranks, optimizers: int) -> None:
        self._ranks = ranks
        # Fixed when the Stepper is built: a failed rank does not know what its window would have held.
        self._length = 16 + 3 * max(0, optimizers - MOST_IN_128_BYTES)

    def on(
        self, objectives: Sequence[Objective], token: int, votes: Votes, bad_buffer: Tensor | None, *, cure: str
    ) -> Votes:
        """Run the only collective of a step, read it once on the host, and return the votes of all ranks.

        Raises RanksDisagree if tokens differ, because the ranks are not at the same step, or if gradients differ;
        `cure` is the advice for that case.
        """
        # One vector on one device: each further tensor would be one more synchronization with the host.
        device = objectives[0].loss.device
        if self._ranks.size == 1:
            return self._alone(objectives, votes, bad_buffer, device)
        body = [on(device, number).double() for objective in objectives for number in objective.numbers_on_ranks()]
        shares = [on(device, share).double() for o in objectives for share in o.squared_shares()]
        squared = torch.stack(shares).sum()
        vote = torch.tensor([token, token**2, votes.packed()], dtype=torch.float64, device=device)
        if bad_buffer is not None:
            vote[2] += on(device, bad_buffer) * float(_MOST**3)
        # Padded to one pair for each possible loss, so that a rank without a batch finds the norms at the same place.
        body += [torch.zeros_like(squared)] * (2 * (len(shares) - len(objectives)))
        # n times the sum of squares equals the square of the sum only if all ranks have the same norm: two numbers
        # compare all ranks, at any world size.
        numbers = torch.cat([vote, torch.stack([squared.square() * self._ranks.size, *body, *shares])])
        agreed, found = self._sum(numbers)
        if found.abort:
            return found
        self._read(objectives, agreed, max(1, self._ranks.size - found.no_batch), cure)
        return found

    def abort(self, device: torch.device) -> None:
        """Vote that this rank has failed: no rank applies this window, whatever step it is at."""
        # Token 0: with an abort in the sum, tokens are not compared.
        self._sum(torch.tensor([0.0, 0.0, Votes(abort=1).packed()], dtype=torch.float64, device=device))

    def _sum(self, numbers: Tensor) -> tuple[list[float], Votes]:
        # all_reduce needs the same length everywhere, also from a rank that has nothing but its vote.
        padded = numbers.new_zeros(self._length)
        padded[: len(numbers)] = numbers
        agreed: list[float] = self._ranks.agree(padded).tolist()  # host read
        found = Votes.unpacked(agreed[2])
        if not found.abort:
            _check_tokens(agreed[0], agreed[1], self._ranks.size)
        return agreed[3:], found

    def _alone(
        self, objectives: Sequence[Objective], votes: Votes, bad_buffer: Tensor | None, device: torch.device
    ) -> Votes:
        # One tensor for all numbers: the host waits for the device once.
        flat = [on(device, number) for objective in objectives for number in objective.numbers()]
        if bad_buffer is not None:
            flat.append(on(device, bad_buffer))
        agreed: list[float] = torch.stack(flat).tolist()  # host read
        numbers = iter(agreed)
        for objective in objectives:
            objective.read(numbers)
        return Votes(votes.stop, bad_buffer=int(bad_buffer is not None and agreed[-1] != 0.0))

    def _read(self, objectives: Sequence[Objective], agreed: list[float], with_a_batch: int, cure: str) -> None:
        fourth, *rest = agreed
        optimizers = sum(len(objective.slots) for objective in objectives)
        numbers, norms = iter(rest), iter(rest[2 * optimizers :])
        total = 0.0
        for objective in objectives:
            total += objective.read_on_ranks(numbers, norms, self._ranks.size, with_a_batch)
        # Ranks hold different shards by design.
        if not any(slot.gradients.sharded for objective in objectives for slot in objective.slots):
            _check_norms(total, fourth, cure)


def _check_tokens(total: float, of_squares: float, ranks: int) -> None:
    # Exact small integers: by Cauchy-Schwarz the two sides are equal only if all tokens are.
    if int(of_squares) * ranks != int(total) ** 2:
        raise RanksDisagree(
            "ranks are at different steps: one of them caught an error, was given another `only`, got more "
            "batches, or applied what another skipped",
            allowed="the same calls on every rank, and guards that decide from what the report says",
            do="let an error end the process; a rank that has no batch left calls stepper.step(None)",
        )


def _check_norms(mean: float, mean_of_squares: float, cure: str) -> None:
    # In float64, over norms that are equal to the bit where gradients are: the tolerance only covers the order of the
    # sum. Non-finite gradients skip the step anyway.
    if math.isfinite(mean_of_squares) and not math.isclose(mean**2, mean_of_squares, rel_tol=1e-9):
        raise RanksDisagree(
            "gradients differ between ranks that hold the same model",
            allowed="a loss that reaches every trainable parameter, on every rank, in every window",
            do=cure,
        )
