"""One loss and the optimizers that it trains: differentiated, agreed on by all ranks, judged, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from halfstep.errors import RanksDisagree, WrongUse
from halfstep.formats import FP32, FP64, Format
from halfstep.step.direct_backward import run_backward
from halfstep.step.ema import StepCounts
from halfstep.step.loss import LossSlot
from halfstep.step.optimizer_slot import OptimizerSlot, compute_clip_factor, compute_fp32_norm, move_number_to_device
from halfstep.step.ranks import Ranks
from halfstep.step.report import (
    GRADIENT_NOT_FINITE,
    GRADIENT_OVERFLOW,
    LOSS_NOT_FINITE,
    Guard,
    OptimizerReport,
    StepReport,
)

_PLACE = itemgetter(0)


class Objective:
    """A loss, and the optimizers whose parameters it differentiates."""

    def __init__(
        self, loss: LossSlot, slots: Sequence[OptimizerSlot], *, clip_norm: float | None, everywhere: bool
    ) -> None:
        self.loss, self.slots, self._clip_norm = loss, slots, clip_norm
        self.everywhere = everywhere
        """Whether no other loss shares the graph, so that backward needs no list of inputs."""
        self.norm = math.nan
        self.bad_parameter: Tensor | None = None
        """The first parameter with a non-finite gradient, if the window has one."""

    def begin(self) -> None:
        """Reset for a new window."""
        self.loss.begin()
        self.norm, self.bad_parameter = math.nan, None

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters with `requires_grad` of its optimizers."""
        if len(self.slots) == 1:
            return self.slots[0].gradients.trainable
        return [p for slot in self.slots for p in slot.gradients.trainable]

    def backward(self, loss: Any, divide: int, ranks: Ranks, *, window: int, retain_graph: bool) -> None:
        """Run backward from a loss, only into the parameters of its optimizers."""
        ready = self.loss.scaled(loss, divide, ranks, window)
        if self.everywhere:
            # Without `inputs`: FSDP2 cannot restrict backward to some parameters, and one loss has no need to.
            run_backward(ready)
        else:
            ready.backward(inputs=self._inputs(), retain_graph=retain_graph)

    def _inputs(self) -> list[Tensor]:
        found = self.trainable
        if not found:
            raise WrongUse(
                f"a step for optimizer {_format_optimizer_names(self.slots)}, all of whose parameters are frozen",
                allowed="at least one parameter with requires_grad",
                do="requires_grad_(True) on the parameters of this step, or name another optimizer with only=",
            )
        return found

    # -- what all ranks must agree on -------------------------------------------------------------------------

    def numbers(self) -> list[Tensor]:
        """Return the numbers of one rank: the loss's, then each optimizer's norm."""
        self.collect()
        found = self.loss.numbers()
        if len(self.slots) == 1:
            return [*found, self.slots[0].gradients.norm()]
        everything = self._gradients_in_order()
        # torch's own norm over all of them, to the bit; the root of the summed squares would round differently.
        own = [s.gradients.norm() if s.gradients.local else torch.zeros_like(found[0]) for s in self.slots]
        total = compute_fp32_norm if any(slot.gradients.may_be_narrow for slot in self.slots) else get_total_norm
        return [*found, total(everything), *own]

    def _gradients_in_order(self) -> list[Tensor]:
        """Return the gradients of all its optimizers in the model's order, in which `clip_grad_norm_` sums them."""
        if not all(slot.gradients.places for slot in self.slots):
            return [gradient for slot in self.slots for gradient in slot.gradients.local]
        found = [pair for slot in self.slots for pair in slot.gradients.with_places()]
        return [gradient for _, gradient in sorted(found, key=_PLACE)]

    def numbers_on_ranks(self) -> list[Tensor]:
        """Return a total and a count in any case, so that a rank without a batch knows every position."""
        self.collect()
        return self.loss.numbers_on_ranks()

    def squared_shares(self) -> list[Tensor]:
        """Return this rank's share of each optimizer's squared norm."""
        zero = torch.zeros((), dtype=torch.float64, device=self.loss.device)
        return [slot.gradients.squared_share() if slot.gradients.local else zero for slot in self.slots]

    def collect(self) -> None:
        """Collect the gradients that backward left; raise WrongUse if it reached no optimizer."""
        reached = any([slot.gradients.collect() for slot in self.slots])
        # A rank without a batch has none if no other rank has a batch either.
        if not reached and self.loss.microbatches:
            raise WrongUse(
                f"no parameter of optimizer {_format_optimizer_names(self.slots)} has a gradient",
                allowed="at least one parameter that the loss depends on",
                do="build the optimizer from the trained parameters (after wrapping or freezing the model)",
            )

    def read(self, numbers: Iterator[float]) -> None:
        """Take the numbers of `numbers`, as read by the host."""
        total = next(numbers)
        if self.loss.count is None:
            self.loss.read(total / self.loss.microbatches, None)
        else:
            self.loss.read(total, next(numbers))
        together = next(numbers)
        self._read_norms([next(numbers) for _ in self.slots] if len(self.slots) > 1 else [together])
        self.norm = together * self.loss.factor

    def read_on_ranks(self, numbers: Iterator[float], norms: Iterator[float], ranks: int, with_a_batch: int) -> float:
        """Take the numbers that all ranks agreed on, and return the sum of the squared norms, still scaled."""
        total, count = next(numbers), next(numbers)
        # -1 stands for a mean, so that a rank without a batch learns which of the two the others have.
        self.loss.read(total, None if count < 0.0 else count, ranks, with_a_batch)
        squared = [next(norms) for _ in self.slots]
        self._read_norms([math.sqrt(norm) for norm in squared])
        return sum(squared)

    def _read_norms(self, norms: list[float]) -> None:
        for slot, norm in zip(self.slots, norms, strict=True):
            slot.norm = norm * self.loss.factor
        self.norm = math.hypot(*(slot.norm for slot in self.slots))

    # -- the verdict ------------------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        # Norms are Python floats here and reach further than fp32; False for NaN as well.
        """Whether loss and gradient norm are finite."""
        return self._norm_fits and math.isfinite(self.loss.value)

    @property
    def _norm_fits(self) -> bool:
        return self.norm <= FP32.largest or self.norm <= self._norm_format.largest

    @property
    def _norm_format(self) -> Format:
        """The format of the common norm, as torch computes it."""
        return FP64 if any(slot.gradients.norm_format is FP64 for slot in self.slots) else FP32

    def reason(self) -> str | None:
        """Return why this objective cannot be applied, or None."""
        if not math.isfinite(self.loss.value):
            return LOSS_NOT_FINITE
        if self._norm_fits:
            return None
        # The parameter is looked up only here: it costs a host read, which a clean step does not pay.
        found = (slot.gradients.first_not_finite() for slot in self.slots if slot.gradients.local)
        self.bad_parameter = next((p for p in found if p is not None), None)
        return GRADIENT_OVERFLOW if self.loss.scale.can_fall else GRADIENT_NOT_FINITE

    def unscale(self, ranks: Ranks) -> list[Tensor]:
        """Unscale gradients ahead of a callback that edits them, and return the parameters that have one."""
        self.collect()
        factor = self.loss.unscale_ahead(ranks)
        for slot in self.slots:
            if slot.gradients.local:
                slot.gradients.multiply_(factor)
        return [p for slot in self.slots for p in slot.gradients.parameters if p.grad is not None]

    def ready(self) -> None:
        """Unscale and clip gradients, in one multiplication."""
        together = 1.0
        if self._clip_norm is not None:
            together = compute_clip_factor(self.norm, self._clip_norm, self._norm_format)
        for slot in self.slots:
            own = 1.0
            if slot.clip_norm is not None:
                own = compute_clip_factor(slot.norm, slot.clip_norm, slot.gradients.norm_format)
            # Unscaling and clipping in one factor: one pass over the gradients, and one rounding.
            slot.multiplier = self.loss.factor * together * own
            if slot.gradients.local:
                slot.gradients.multiply_all_but_bf16_(slot.multiplier)
                if slot.clip_value is not None:
                    slot.gradients.clamp_all_but_bf16_(slot.clip_value)

    def unscale_skipped(self) -> None:
        """Unscale gradients that are kept and not applied."""
        for slot in self.slots:
            if slot.gradients.local:
                slot.gradients.multiply_(self.loss.factor)

    def adjust(self) -> None:
        """Adjust the scale from the gradients: a non-finite loss says nothing about it."""
        if math.isfinite(self.loss.value):
            self.loss.scale.update(overflow=not self._norm_fits)


def _format_optimizer_names(slots: Sequence[OptimizerSlot]) -> str:
    return ", ".join(repr(slot.name) for slot in slots)


# -- agreement --------------------------------------------------------------------------------------------------------
# Agree with all ranks before an update: one small vector, summed once and read once.


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
        found: list[float] = torch.stack(
            [move_number_to_device(device, number) for number in (*numbers, *self._more)]
        ).tolist()  # host read
        self.read = found[len(numbers) :]
        return found[: len(numbers)]

    def read_with(self, agreed: Tensor) -> list[float]:
        """Read a vector that all ranks have agreed on, and the flags."""
        more = [move_number_to_device(agreed.device, flag).to(agreed.dtype).view(1) for flag in self._more]
        found: list[float] = (torch.cat([agreed, *more]) if more else agreed).tolist()  # host read
        self.read = found[len(agreed) :]
        return found[: len(agreed)]


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
        if self._ranks.size == 1:
            return self._decide_alone(objectives, votes, flags, device)
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

    def _decide_alone(
        self, objectives: Sequence[Objective], votes: RankVotes, flags: LocalFlags, device: torch.device
    ) -> RankVotes:
        # One tensor for all numbers: the host waits for the device once.
        flat = [number for objective in objectives for number in objective.numbers()]
        if flags.bad_buffer is not None:
            flat.append(flags.bad_buffer)
        agreed = flags.read_alone(flat, device)
        numbers = iter(agreed)
        for objective in objectives:
            objective.read(numbers)
        bad = int(flags.bad_buffer is not None and agreed[-1] != 0.0)
        return RankVotes(votes.stop, bad_buffer=bad, save=votes.save)

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


# -- verdict ----------------------------------------------------------------------------------------------------------


def build_step_report(objectives: Sequence[Objective], counts: StepCounts, reason: str | None, aux: Any) -> StepReport:
    """Return the report of a step with this outcome."""
    applied = reason is None
    return StepReport(
        # The counters change only after this; the report shows them as they will be.
        step=counts.applied + applied,
        attempt=counts.attempted,
        applied=applied,
        reason=reason,
        finite=all(objective.finite for objective in objectives),
        loss=sum(objective.loss.value for objective in objectives),
        grad_norm=math.hypot(*(objective.norm for objective in objectives)),
        loss_scale=objectives[0].loss.scale.value,
        parts={
            slot.name: OptimizerReport(objective.loss.value, slot.norm, objective.loss.scale.value)
            for objective in objectives
            for slot in objective.slots
        },
        aux=aux,
    )


def find_refusing_guard(guards: Sequence[Guard], report: StepReport, ranks: Ranks, window: int) -> str | None:
    """Return the name of the first guard that refuses a step on any rank, or None.

    A guard that raises on one rank ends the window on all: the others raise RankFailed. Guards that decide from the
    report alone declare `same_on_all_ranks = True`; only others cost an agreement.
    """
    if ranks.size == 1 or all(getattr(guard, "same_on_all_ranks", False) for guard in guards):
        return next((guard.name for guard in guards if not guard.passes(report)), None)
    refusals, error = _ask_guards(guards, report)
    if error is not None:
        ranks.publish_failure(window, error)
    # After the message was stored: the others look for it as soon as they have this result.
    raised, *refused = ranks.agree(torch.tensor([error is not None, *refusals], dtype=torch.float64)).tolist()
    if error is not None:
        raise error
    if raised:
        raise ranks.failed(window)
    return next((guard.name for guard, ranks_against in zip(guards, refused, strict=True) if ranks_against), None)


def _ask_guards(guards: Sequence[Guard], report: StepReport) -> tuple[list[bool], BaseException | None]:
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
