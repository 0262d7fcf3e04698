"""The losses of a step: what a loss function may return, how micro-batches become one number, and loss scales."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfstep.errors import StateMismatch, WrongUse, check_same_keys
from halfstep.formats import round_to_fp32, widen, widest_dtype
from halfstep.step.ranks import Ranks

if TYPE_CHECKING:
    from halfstep.precision.precision import Precision

Count = float | Tensor
ONLY = "loss"
"""The name of the loss if there is one, and of the optimizer if there is one."""


class Counted(NamedTuple):
    """A loss that is a sum, with the number of summed elements.

    Micro-batches and ranks of unequal size are then weighted correctly: the update is that of one large batch.

    Attributes:
        sum: The sum of the losses.
        count: The number of summed elements.
    """

    sum: Tensor
    count: Count  # type: ignore[assignment]  # the field's own word; a tuple's method of this name is not needed


class _Out(NamedTuple):
    loss: Any
    aux: Any = None


class Out(_Out):
    """A loss, with any other value that `report.aux` returns: logits, an accuracy, a dict of terms.

    Attributes:
        loss: The loss.
        aux: The other values. Tensors are detached, so that they keep no graph alive, and DistributedDataParallel
            expects no gradient through them.
    """

    __slots__ = ()

    def __new__(cls, loss: Any, aux: Any = None) -> Out:
        return super().__new__(cls, loss, pytree.tree_map_only(Tensor, Tensor.detach, aux))


def split_loss_and_aux(result: Any) -> tuple[Any, Any]:
    """Split the result of a loss function into loss and aux.

    Raises WrongUse for anything else; a plain tuple is refused, because it could mean (loss, metric) or (sum, count).
    """
    if type(result) is Tensor:
        return result, None
    if isinstance(result, Out):
        return split_loss_and_aux(result.loss)[0], result.aux
    # Hugging Face's ModelOutput is a dict as well, but one with an attribute `loss`.
    if isinstance(result, (Tensor, Counted)) or (isinstance(result, dict) and not hasattr(result, "loss")):
        return result, None
    # Outputs of Hugging Face models, and named tuples with a field `loss`.
    loss = getattr(result, "loss", None)
    if isinstance(loss, (Tensor, Counted)):
        return loss, None
    raise _build_not_loss_error(result)


# -- one loss in a window ---------------------------------------------------------------------------------------------


class LossState(TypedDict):
    """The saved state of a loss."""

    loss_scale: dict[str, float]
    base_count: float | None


class LossSlot:
    """One loss by name: its scale, and its sum over the micro-batches of a window."""

    def __init__(self, name: str, scale: LossScale) -> None:
        self.name, self.scale = name, scale
        self._first = scale, scale.state_dict()
        self.base_count: float | None = None
        """N0: the divisor of sums before backward, so that they fit the format; agreed once, then constant."""
        self.begin()

    def begin(self) -> None:
        """Reset for a new window."""
        self.total: Tensor | None = None
        self.count: Count | None = None
        self.microbatches = 0
        self.divided = 1
        self.value = self.factor = math.nan
        self._unscaled, self._found_now = 1.0, False
        self._ask_base_count: Callable[[], float | None] | None = None

    def reset_scale(self, precision: Precision, *, as_built: bool) -> None:
        """Start with a new scale for another precision, or with the initial one."""
        if as_built:
            self.scale, first = self._first
            self.scale.load_state_dict(first)
        else:
            self.scale = choose_loss_scale(precision)

    def starts_like(self, other: LossSlot) -> bool:
        """Return whether both were given a loss scale of the same kind and settings."""
        return type(self.scale) is type(other._first[0]) and self._first[1] == other._first[1]

    def scaled(self, loss: Any, divide: int, ranks: Ranks, window: int) -> Tensor:
        """Return the tensor to run backward on.

        `divide` is the number of micro-batches in the window, where it is known. Raises WrongUse for an unusable loss,
        and for plain and counted losses in one window.
        """
        counted = isinstance(loss, Counted)
        if self.microbatches and counted != (self.count is not None):
            raise WrongUse(
                "a plain loss and a Counted one in one window",
                allowed="the same for every micro-batch of a window",
                do="return halfstep.Counted(loss.sum(), number_of_elements), or loss.mean()",
            )
        plain = loss.sum if counted else loss
        if not (isinstance(plain, Tensor) and plain.ndim == 0 and plain.requires_grad):
            raise _build_not_loss_error(plain)
        value = widen(plain)
        # A sum is divided before backward, because its gradients may overflow fp16. The exact count is known only after
        # the agreement, and is folded into unscaling.
        divisor = self._divisor(loss.count, divide, ranks, window) if counted else divide
        self.microbatches += 1
        self.divided = divide
        # Summed on the device; the host reads it once, in the agreement.
        seen = value.detach()
        self.total = seen if self.total is None else self.total + seen
        return divide_and_scale_loss(value, divisor, self.scale.value)

    def _divisor(self, count: Count, microbatches: int, ranks: Ranks, window: int) -> float:
        count = count.detach() if isinstance(count, Tensor) else float(count)
        self.count = count if self.count is None else self.count + count
        if self.base_count is None:
            # Once in a run: all ranks must divide by the same number before their gradients are summed. Through the
            # store rather than by a collective, because a rank may fail on its way here.
            # A host read, in the first window only.
            mine = estimate_window_count(float(count), microbatches, ranks.size)
            if ranks.size > 1:
                ranks.offer(window, self.name, mine)
                mine = ranks.first_of(window, self.name)
            self.base_count, self._found_now = mine, True
        return self.base_count or 1.0

    def forget(self) -> None:
        """Forget the base count if it was found in the window that was dropped."""
        if self._found_now:
            self.base_count = None

    def unscale_ahead(self, ranks: Ranks) -> float:
        """Return the missing factor of gradients before the agreement; sums cost a collective for their counts."""
        if self.count is None:
            self._unscaled = self.divided / self.microbatches / self.scale.value
        else:
            assert self.total is not None, "a count comes with its sum"
            count = ranks.agree(_widen_count(self.count, self.total.device)).item()
            self._unscaled = ranks.size * (self.base_count or 1.0) / (count if count > 0.0 else 1.0) / self.scale.value
        return self._unscaled

    @property
    def device(self) -> torch.device:
        """The device of the loss."""
        assert self.total is not None, "asked before a loss was seen"
        return self.total.device

    def numbers(self) -> list[Tensor]:
        """Return the total, and the count if there is one."""
        assert self.total is not None, "asked before a loss was seen"
        return [self.total] if self.count is None else [self.total, _widen_count(self.count, self.total.device)]

    def numbers_on_ranks(self) -> list[Tensor]:
        """Return the sum and its count, or the mean and -1. Summed over ranks, NaN and inf are preserved."""
        assert self.total is not None, "asked before a loss was seen"
        if self.count is not None:
            return [self.total, _widen_count(self.count, self.total.device)]
        return [self.total / self.microbatches, _widen_count(-1.0, self.total.device)]

    def begin_without_batch(self, device: torch.device, ranks: Ranks, window: int) -> None:
        """Set up a window without a batch: this rank adds nothing to the total, and offers no count."""
        self.total, self.count = torch.zeros((), device=device), 0.0
        if self.base_count is None:
            ranks.offer(window, self.name, None)
            self._ask_base_count = lambda: ranks.first_of(window, self.name)

    def read(self, total: float, count: float | None, ranks: int = 1, with_a_batch: int = 1) -> None:
        """Compute the loss, and the factor that gradients lack, from the agreed numbers."""
        if count is None:
            # Gradients were averaged over all ranks, including those that had no batch and contributed zeros.
            divided = self.divided / (self.microbatches or self.divided)
            self.value = total / with_a_batch
            self.factor = divided / self.scale.value * (ranks / with_a_batch) / self._unscaled
            return
        if self.base_count is None and self._ask_base_count is not None:
            # Only after the agreement: by then every rank has made its offer.
            self.base_count = self._ask_base_count()
        # No element counted means no loss: torch's own mean over nothing is NaN too.
        usable = 0.0 < count < math.inf
        self.value = total / count if usable else math.nan
        counted = count if usable else 1.0
        # DDP and FSDP2 average over ranks, and a sum must not be averaged: hence `ranks`.
        self.factor = ranks * (self.base_count or 1.0) / counted / self.scale.value / self._unscaled

    def state_dict(self) -> LossState:
        """Return the scale and the base count."""
        return {"loss_scale": self.scale.state_dict(), "base_count": self.base_count}

    def check_state(self, state: LossState) -> None:
        """Raise StateMismatch for a state that does not fit; nothing is changed."""
        check_same_keys(f"the loss {self.name!r}", self.state_dict(), state)
        # Loading into a copy runs all checks of the scale without changing it.
        LossSlot(self.name, copy.copy(self.scale)).load_state_dict(state)

    def load_state_dict(self, state: LossState) -> None:
        """Load the scale and the base count."""
        self.scale.load_state_dict(state["loss_scale"])
        self.base_count = state["base_count"]


def divide_and_scale_loss(value: Tensor, divisor: float, scale: float) -> Tensor:
    """Return what backward runs on: one micro-batch's share of a window's loss, scaled."""
    # Where a factor is 1 nothing is added to the graph, so that fp32 stays bitwise equal to a plain loop.
    ready = value if divisor == 1 else value / divisor
    return ready if scale == 1.0 else ready * scale


def estimate_window_count(count: float, microbatches: int, ranks: int) -> float | None:
    """Estimate the elements of a whole window from one micro-batch; None if nothing was counted."""
    everywhere = count * microbatches * ranks
    return everywhere if 0.0 < everywhere < math.inf else None


def _widen_count(count: Count, device: torch.device) -> Tensor:
    """Return a count as a tensor in the widest dtype of its device, so that it is exact."""
    return torch.as_tensor(count, dtype=widest_dtype(device), device=device)


_ALLOWED = (
    "a scalar tensor with a graph behind it, halfstep.Counted(sum, count), halfstep.Out(loss, aux=...), or a dict"
)


def _build_not_loss_error(given: Any) -> WrongUse:
    if isinstance(given, tuple):
        return WrongUse(
            f"a tuple of {len(given)} as the loss, which could be (loss, metric) or (sum, count)",
            allowed=_ALLOWED,
            do="return halfstep.Out(loss, aux=accuracy), or halfstep.Counted(loss_sum, count)",
        )
    what = f"a {type(given).__name__}"
    if isinstance(given, Tensor):
        what = f"a tensor of shape {tuple(given.shape)}" if given.ndim else "a scalar that does not require grad"
    return WrongUse(
        f"{what} as the loss", allowed=_ALLOWED, do="return loss.mean(), and call the model outside torch.no_grad()"
    )


# -- loss scales ------------------------------------------------------------------------------------------------------
# One interface for none, static and dynamic, so that the step does not depend on which one it has. halfstep has its
# own, because a step must know whether it was skipped and all ranks must agree on it. The arithmetic equals torch's to
# the bit (fp32, same order) as long as the scale stays between floor and cap.


class LossScale(ABC):
    """The factor of the loss before backward; gradients are divided by it before anything else sees them."""

    value: float = 1.0

    @property
    @abstractmethod
    def can_fall(self) -> bool:
        """Whether a lower scale is possible after an overflow."""

    @abstractmethod
    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after an attempted step whose loss was finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, float]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class NoScale(LossScale):
    """No loss scale, for formats with fp32's range: the factor is always 1."""

    can_fall = False

    def update(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, float]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Accept an empty state; raise StateMismatch for the state of a loss scale."""
        if state:
            raise StateMismatch(
                f"a loss scale was saved ({', '.join(state)}), but this run has none",
                allowed="an empty state",
                do="resume in fp16, or drop the loss scale's state on purpose",
            )


class StaticScale(LossScale):
    """A constant loss scale. An overflow skips the step and does not change the scale.

    Args:
        scale: The scale, positive and finite.

    Raises:
        WrongUse: The scale is out of range.
    """

    def __init__(self, scale: float) -> None:
        self.value = _check_positive("scale", scale)

    @property
    def can_fall(self) -> bool:
        # Only names the reason of a skip: with a scale above 1 the overflow may be the scale's doing.
        return self.value > 1.0

    def update(self, *, overflow: bool) -> None: ...

    def state_dict(self) -> dict[str, float]:
        """Return the scale."""
        return {"scale": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the scale; raise StateMismatch if there is none."""
        self.value = _check_positive("scale", _require_keys(state, "scale")["scale"])


class DynamicScale(LossScale):
    """A loss scale that falls on an overflow and rises after `growth_interval` clean steps, within [floor, cap].

    `torch.amp.GradScaler` has neither bound: 166 bad batches take it to exactly 0.0, and the next clean one writes NaN
    into the weights.

    Args:
        init_scale: The first scale.
        growth_factor: The factor of each rise, above 1.
        backoff_factor: The factor of each fall, between 0 and 1.
        growth_interval: The clean steps before a rise.
        floor: The smallest scale.
        cap: The largest scale.

    Raises:
        WrongUse: A value is out of range.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        # Below 1 a scale would shrink the gradients that it is there to protect.
        floor: float = 1.0,
        cap: float = 2.0**24,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.floor = _check_positive("floor", floor)
        self.cap = _check_positive("cap", cap)
        # torch keeps its scale in an fp32 tensor; rounding here keeps the two equal to the bit.
        self.value = round_to_fp32(_check_positive("init_scale", init_scale))
        self.growth_tracker = 0
        self._check()

    @property
    def can_fall(self) -> bool:
        return self.value > self.floor

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale as `torch.amp.GradScaler` does, within the bounds."""
        if overflow:
            self.value = max(self.floor, round_to_fp32(self.value * self.backoff_factor))
            self.growth_tracker = 0
        # The comparison of torch's kernel, so that a loaded growth tracker behaves the same.
        elif self.growth_tracker + 1 == self.growth_interval:
            self.value = min(self.cap, round_to_fp32(self.value * self.growth_factor))
            self.growth_tracker = 0
        else:
            self.growth_tracker += 1

    def state_dict(self) -> dict[str, float]:
        """Return torch's keys, and the two bounds that torch does not have."""
        return {
            "scale": self.value,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
            "floor": self.floor,
            "cap": self.cap,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load our own state, or that of a `torch.amp.GradScaler`, which has no floor and cap.

        Raises StateMismatch for missing keys and for a scale that is not a finite number.
        """
        _require_keys(state, "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        cap = float(state.get("cap", self.cap))
        loaded = DynamicScale(
            init_scale=cap,  # any value within the bounds; the real one is set below
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
            floor=float(state.get("floor", self.floor)),
            cap=cap,
        )
        scale = float(state["scale"])
        if not math.isfinite(scale) or scale < 0:
            raise StateMismatch(f"a saved loss scale of {scale}", allowed="a finite number", do="start a new scale")
        loaded.value = min(max(round_to_fp32(scale), loaded.floor), loaded.cap)
        loaded.growth_tracker = int(state["_growth_tracker"])
        # Only after every check: a refused state leaves the scale unchanged.
        self.__dict__.update(loaded.__dict__)

    def _check(self) -> None:
        allowed = "growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1, floor <= init_scale <= cap"
        right = (
            self.growth_factor > 1
            and 0 < self.backoff_factor < 1
            and self.growth_interval >= 1
            and self.floor <= self.value <= self.cap
        )
        if not right:
            raise WrongUse(f"a loss scale with {self.state_dict()}", allowed=allowed, do="correct that setting")


def _check_positive(name: str, number: Any) -> float:
    value = float(number)
    if not 0 < value < math.inf:
        raise WrongUse(f"{name}={number!r}", allowed="a positive, finite number", do=f"{name}=65536.0, for example")
    return value


def _require_keys(state: Mapping[str, float], *keys: str) -> Mapping[str, float]:
    missing = [key for key in keys if key not in state]
    if missing:
        raise StateMismatch(
            f"a loss scale's state without {', '.join(missing)}",
            allowed=f"a mapping with {', '.join(keys)}",
            do="an empty state comes from a scaler that was disabled: save it from an fp16 run",
        )
    return state


def choose_loss_scale(precision: Precision, given: LossScale | None = None) -> LossScale:
    """Return the loss scale of a precision, or `given` if it fits; raise WrongUse if it does not.

    Only fp16 has one: without it small gradients underflow there, and elsewhere it has no benefit.
    """
    if given is None:
        return DynamicScale() if precision.scaled else NoScale()
    if isinstance(given, NoScale) == precision.scaled:
        raise WrongUse(
            f"{type(given).__name__} with precision {precision.name}",
            allowed="a loss scale with fp16, and only there",
            do="leave loss_scale out, or give StaticScale(1.0) to see fp16 without one",
        )
    return given
