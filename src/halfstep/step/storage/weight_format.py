"""Store trained weights in bf16 and update them in fp32: the other 16 bits next to them, or rounded at random.

`bf16-split` is fp32, cut in two: the low 16 bits as an int16, and the high 16 bits, plus one where the int16 is
negative, as the bf16 weight. That is rounding to nearest, with ties away from zero: to nearest even, a tie would need a
remainder of +32768, which no int16 holds. `bf16-stochastic` keeps no remainder, and rounds up or down with the
probability that keeps the mean.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.errors import StateMismatch, WrongUse, build_unknown_name_error, check_same_keys
from halfstep.finding import Finding
from halfstep.formats import BF16, FP32, is_narrow
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.precision.island import find_islands
from halfstep.precision.precision import Precision
from halfstep.step.census import list_optimizer_parameters
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.ranks import Ranks
from halfstep.step.synchronizers.replicated import broadcast_tensors_
from halfstep.step.synchronizers.shard_units import NORM_LAYERS

PLAIN, SPLIT, STOCHASTIC = "fp32", "bf16-split", "bf16-stochastic"
WEIGHT_FORMATS = (PLAIN, SPLIT, STOCHASTIC)
SMALLEST_PIECE, LARGEST_PIECE, PIECES = 2**20, 2**24, 16
"""Elements that are in fp32 at once in an update: a 16th of all, within limits. A larger parameter is updated alone."""
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
_STEPPED_IN_PIECES = ("torch.optim.", "torchao.optim.", "halfstep.")
"""Modules of optimizers that treat every parameter by itself."""


# -- bits -------------------------------------------------------------------------------------------------------------


def _view_as_row(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _view_as_halves(wide: Tensor) -> Tensor:
    return _view_as_row(wide).view(torch.int16).view(-1, 2)


def split_into_halves_(wide: Tensor, high: Tensor, low: Tensor) -> None:
    """Write an fp32 tensor into a bf16 and an int16 tensor of the same strides."""
    halves = _view_as_halves(wide)
    rest = _view_as_row(low).copy_(halves[:, _LOW])
    torch.sub(halves[:, _HIGH], rest >> 15, out=_view_as_row(high).view(torch.int16))
    # The NaN of a GPU has all bits set: with the carry it would be a zero.
    _view_as_row(high).masked_fill_(_view_as_row(wide).isnan(), math.nan)


def merge_halves(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 tensor that `split_into_halves_` was given, bit by bit; a NaN may have another payload."""
    wide = torch.empty_like(high, dtype=torch.float32)
    halves, rest = _view_as_halves(wide), _view_as_row(low)
    halves[:, _LOW] = rest
    # No zero has a carry: one that was written into a weight since, as pruning does, would become a NaN.
    carry = (rest >> 15).masked_fill_(_view_as_row(high) == 0, 0)
    halves[:, _HIGH] = carry.add_(_view_as_row(high).view(torch.int16))
    return wide


def round_stochastically_(wide: Tensor, high: Tensor, generator: torch.Generator | None) -> None:
    """Round an fp32 tensor to one of the two nearest bf16 numbers, by chance; `wide` is overwritten."""
    bits, nan = _view_as_row(wide).view(torch.int32), _view_as_row(wide).isnan()
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    _view_as_row(high).view(torch.int16).copy_(_view_as_halves(wide)[:, _HIGH])
    _view_as_row(high).masked_fill_(nan, math.nan)


# -- weights ----------------------------------------------------------------------------------------------------------


class WeightFormatState(TypedDict):
    """The saved state of narrow weights; the bf16 weights are the model's own."""

    format: str
    seed: int
    low_bits: dict[str, Tensor]


class _NarrowParameter(NamedTuple):
    """A parameter in bf16."""

    name: str
    low: Tensor | None
    """The low 16 bits, in the strides of the parameter; None if rounding is stochastic."""


class NarrowWeights:
    """The trained parameters of a model in bf16, and their updates in fp32.

    Parameters of islands, normalization and recurrent layers stay in fp32: their kernels need it. So do those of
    torch.jit modules, which may be such layers.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[OptimizerSlot],
        weight_format: str,
        *,
        seed: int = 0,
        sums: str = FP32.name,
        applied: Callable[[], int] = lambda: 0,
        emit: Callable[[Sequence[Finding]], None] = lambda _: None,
    ) -> None:
        """Convert the model; raise WrongUse for parameters and optimizers that cannot be handled.

        `sums` is the format in which gradients are added up over micro-batches and ranks; `applied` returns the number
        of applied updates, from which the noise of stochastic rounding is drawn together with `seed`.
        """
        self.format, self.seed, self.sums = weight_format, seed, sums
        self._model, self._slots, self._applied = model, list(slots), applied
        self._narrow: dict[Tensor, _NarrowParameter] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.gradient_format = sums
        """The format of the gradients of the last window."""
        for slot in self._slots:
            _check_no_inner_optimizer(slot.name, slot.optimizer)
            slot.weights = self
        self.follow()
        emit([_build_whole_step_finding(slot) for slot in self._slots if not _can_step_in_pieces(slot.optimizer)])

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters in bf16."""
        return list(self._narrow)

    def follow(self) -> None:
        """Convert parameters that were added or unfrozen, and widen those that became a part of an island."""
        wide = set(map(id, _list_wide_parameters(self._model)))
        names = {id(p): strip_compile_wrappers(name) for name, p in self._model.named_parameters()}
        for p in [p for p in self._narrow if p.dtype is not torch.bfloat16]:  # widened by an island, or by the user
            del self._narrow[p]
            p.grad_dtype = p.dtype  # type: ignore[attr-defined]
        for slot in self._slots:
            for place, p in enumerate(list_optimizer_parameters(slot.optimizer)):
                name = names.get(id(p), f"{slot.name}.{place}")
                if id(p) in wide:
                    self._widen(p)
                elif p.requires_grad and p.is_floating_point() and p not in self._narrow:
                    self._convert(name, p, slot.optimizer)
            slot.follow()

    def _convert(self, name: str, p: Tensor, optimizer: torch.optim.Optimizer) -> None:
        _check_parameter(name, p)
        wide = torch.empty_like(p, dtype=torch.float32).copy_(p.detach())
        high, low = torch.empty_like(wide, dtype=torch.bfloat16), None
        if self.format == SPLIT:
            low = torch.empty_like(wide, dtype=torch.int16)
            split_into_halves_(wide, high, low)
        else:
            high.copy_(wide)
        p.grad = None
        p.data = high
        self._narrow[p] = _NarrowParameter(name, low)
        # Adagrad makes its state when it is built, in the format that the weights have then.
        state: Any = optimizer.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and is_narrow(value.dtype):
                state[key] = value.float()

    def _widen(self, p: Tensor) -> None:
        if p in self._narrow:
            wide = self.wide(p)
            del self._narrow[p]
            p.grad = None
            p.data, p.grad_dtype = wide, torch.float32  # type: ignore[attr-defined]

    def compute_in(self, precision: Precision) -> None:
        """Follow the model in a precision; one that does not compute from bf16 has all parameters in fp32."""
        if can_take_bf16_weights(precision):
            self.follow()
            return
        for p in self.parameters:
            self._widen(p)
        for slot in self._slots:
            slot.follow()

    def share(self, ranks: Ranks) -> None:
        """Send rank 0's low bits to the other ranks, which have its weights already."""
        # As bytes: gloo sends no int16.
        low = [_view_as_row(kept.low).view(torch.uint8) for kept in self._narrow.values() if kept.low is not None]
        if ranks.size > 1 and low:
            broadcast_tensors_(low, ranks)

    def wide(self, p: Tensor) -> Tensor:
        """Return the value of a parameter in fp32, as a new tensor; one that is wide already is returned itself."""
        kept = self._narrow.get(p)
        if kept is None:
            return p.detach()
        return p.detach().float() if kept.low is None else merge_halves(p.detach(), self._read_low_bits(p, kept.low))

    def rounds_at_random(self, p: Tensor) -> bool:
        """Return whether an update may leave an element unchanged, and be right on average."""
        return p in self._narrow and self.format == STOCHASTIC

    def put(self, p: Tensor, value: Tensor) -> None:
        """Set a parameter to an fp32 value."""
        kept = self._narrow.get(p)
        if kept is None or kept.low is None:
            p.detach().copy_(value)
        else:
            wide = torch.empty_like(p, dtype=torch.float32).copy_(value)
            split_into_halves_(wide, p.detach(), self._read_low_bits(p, kept.low))

    def _read_low_bits(self, p: Tensor, low: Tensor) -> Tensor:
        """Return the low bits of a parameter, which may have been moved or laid out anew since they were stored."""
        if low.device != p.device or low.stride() != p.stride():
            low = torch.empty_like(p, dtype=torch.int16).copy_(low)
            self._narrow[p] = self._narrow[p]._replace(low=low)
        return low

    # -- gradients ----------------------------------------------------------------------------------------------------

    def begin(self, *, adds_up: bool) -> None:
        """Choose the format of the window's gradients: bf16, as backward computes them, unless some are added up."""
        wanted = FP32 if adds_up and self.sums == FP32.name else BF16
        self.gradient_format = wanted.name
        for p in self._narrow:
            if p.grad_dtype is not wanted.dtype:  # type: ignore[attr-defined]
                p.grad_dtype = wanted.dtype  # type: ignore[attr-defined]

    # -- update -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, factor: float, limit: float | None) -> None:
        """Step an optimizer over fp32 copies of the parameters, a piece at a time, and round them back once.

        Gradients in bf16 are multiplied by `factor` and clamped to `limit` where they are widened.
        """
        groups = optimizer.param_groups
        before = [group["params"] for group in groups]
        try:
            for piece in self._pieces(optimizer):
                self._step_piece(optimizer, piece, factor, limit)
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters

    def _pieces(self, optimizer: torch.optim.Optimizer) -> list[list[list[Tensor]]]:
        """Return the parameters with a gradient, by piece and by group."""
        groups = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
        if not _can_step_in_pieces(optimizer):
            return [groups]
        found: list[list[list[Tensor]]] = []
        room, whole = 0, sum(p.numel() for parameters in groups for p in parameters)
        most = min(LARGEST_PIECE, max(SMALLEST_PIECE, whole // PIECES))
        for place, parameters in enumerate(groups):
            for p in parameters:
                size = p.numel() if p in self._narrow else 0
                if not found or (size > room and any(found[-1])):
                    found.append([[] for _ in groups])
                    room = most
                found[-1][place].append(p)
                room -= size
        return found

    def _step_piece(
        self, optimizer: torch.optim.Optimizer, piece: list[list[Tensor]], factor: float, limit: float | None
    ) -> None:
        copies = {p: self._copy(p, factor, limit) for parameters in piece for p in parameters if p in self._narrow}
        state: Any = optimizer.state
        for p, copy in copies.items():
            if p in state:
                state[copy] = state.pop(p)
        try:
            for group, parameters in zip(optimizer.param_groups, piece, strict=True):
                group["params"] = [copies.get(p, p) for p in parameters]
            optimizer.step()
        finally:
            for p, copy in copies.items():
                if copy in state:
                    state[p] = state.pop(copy)
        for p, copy in copies.items():
            self._round(p, copy.detach())

    def _copy(self, p: Tensor, factor: float, limit: float | None) -> nn.Parameter:
        """Return a parameter in fp32 with its gradient.

        Another object, not other data in the same: autograd would forget the hooks of a parameter whose format changes.
        """
        copy = nn.Parameter(self.wide(p))
        gradient = p.grad
        assert gradient is not None
        if is_narrow(gradient.dtype):
            gradient = gradient.float().mul_(factor)
            if limit is not None and gradient.is_sparse:
                gradient = gradient.coalesce()
                gradient._values().clamp_(-limit, limit)
            elif limit is not None:
                gradient.clamp_(-limit, limit)
        copy.grad = gradient
        return copy

    def _round(self, p: Tensor, wide: Tensor) -> None:
        kept, high = self._narrow[p], p.detach()
        if kept.low is not None:
            split_into_halves_(wide, high, kept.low)
        else:
            round_stochastically_(wide, high, self._generator(kept.name, p.device))

    def _generator(self, name: str, device: torch.device) -> torch.Generator | None:
        """Return a generator seeded by seed, update and parameter: the same on every rank, and after a resume."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        digest = sha256(f"{self.seed}/{self._applied()}/{name}".encode()).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest[:7], "little"))

    # -- state --------------------------------------------------------------------------------------------------------

    def wide_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the model by name; those in bf16 in fp32, on the host."""
        return {name: self._copy_to_host(p) for name, p in self._model.named_parameters()}

    def wide_state(self, value: Callable[[Tensor], Tensor | None] | None = None) -> dict[str, Tensor]:
        """Return parameters and buffers likewise; `value` returns another value of a parameter, such as its average."""
        state = self._model.state_dict(keep_vars=True)
        return {name: self._copy_to_host(held, value) for name, held in state.items() if isinstance(held, Tensor)}

    def _copy_to_host(self, held: Tensor, value: Callable[[Tensor], Tensor | None] | None = None) -> Tensor:
        if held not in self._narrow:
            return held
        other = None if value is None else value(held)
        return (self.wide(held) if other is None else other).to(torch.empty(0).device)

    def state_dict(self) -> WeightFormatState:
        """Return format, seed and low bits."""
        low = {kept.name: kept.low for kept in self._narrow.values() if kept.low is not None}
        return {"format": self.format, "seed": self.seed, "low_bits": low}

    def check_state(self, state: WeightFormatState) -> None:
        """Raise StateMismatch for the state of other parameters."""
        check_same_keys("the weights", self.state_dict(), state)
        own = self.state_dict()["low_bits"]
        check_same_keys("the low bits of the weights", own, state["low_bits"])
        for name, low in own.items():
            if low.shape != state["low_bits"][name].shape:
                raise StateMismatch(
                    f"the low bits of {name} were saved with shape {tuple(state['low_bits'][name].shape)}",
                    allowed=str(tuple(low.shape)),
                    do="build the model as in the saved run",
                )

    def load_state_dict(self, state: WeightFormatState) -> None:
        """Load a state that `check_state` has accepted."""
        self.seed = int(state["seed"])
        for name, low in self.state_dict()["low_bits"].items():
            low.copy_(state["low_bits"][name])


def _list_wide_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of layers that need them in fp32."""
    for module in find_islands(model).values():
        yield from module.parameters()
    for module in model.modules():
        # Those of torch.jit may be such layers, and have no class of their own.
        if isinstance(module, (*NORM_LAYERS, nn.RNNBase, torch.jit.ScriptModule)):
            yield from module.parameters()


def _can_step_in_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer may be stepped several times an update, each time for other parameters."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return type(optimizer).step.__module__.startswith(_STEPPED_IN_PIECES) and not hooks


def _build_whole_step_finding(slot: OptimizerSlot) -> Finding:
    kind = type(slot.optimizer).__name__
    return Finding(
        "weights.whole_update",
        "note",
        f"all weights of optimizer {slot.name!r} are in fp32 at once during an update, 4 bytes for each: {kind} may "
        "keep numbers for a group, or has hooks on its step, and is called once",
        "use an optimizer of torch.optim without hooks, or ignore this if the memory suffices",
    )


# -- checks -----------------------------------------------------------------------------------------------------------


def check_weight_format(name: object, sums: object, precision: Precision) -> None:
    """Raise UnknownName for unknown formats of weights and sums, and WrongUse for an unsuitable precision."""
    if name not in WEIGHT_FORMATS:
        raise build_unknown_name_error("weight_format", name, WEIGHT_FORMATS)
    if sums not in (FP32.name, BF16.name):
        raise build_unknown_name_error("gradient_sums", sums, (FP32.name, BF16.name))
    if not can_take_bf16_weights(precision):
        raise WrongUse(
            f"weight_format={name!r} in {precision.name}",
            allowed="a precision whose products are computed from bf16 weights",
            do="precision='bf16', or leave weight_format out",
        )


def can_take_bf16_weights(precision: Precision) -> bool:
    """Return whether a precision computes with weights in bf16, so that they may be stored as such."""
    return precision.narrow is torch.bfloat16


def _check_parameter(name: str, p: Tensor) -> None:
    if p.dtype not in (torch.float32, torch.bfloat16):
        raise WrongUse(
            f"{name} in {str(p.dtype).removeprefix('torch.')}, with weights to be stored in bf16",
            allowed="trained weights in float32 or bfloat16",
            do="model.float() before the optimizer is built",
        )
    if distributed.is_dtensor_shard(p):
        raise WrongUse(
            f"{name} under fully_shard, with weights to be stored in bf16",
            allowed="weight_format on one process, or on several that hold all weights",
            do="leave fully_shard out (world: ddp), or leave weight_format out",
        )
    if not hasattr(p, "grad_dtype"):
        raise WrongUse(
            f"weight_format with torch {torch.__version__}, whose parameters have gradients in their own format only",
            allowed="a torch with Tensor.grad_dtype",
            do="pip install -U torch",
        )


def _check_no_inner_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    inner = [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)]
    if inner:
        raise WrongUse(
            f"optimizer {name!r} is {type(optimizer).__name__}, which wraps {type(inner[0]).__name__}, "
            "with weights stored in bf16",
            allowed="an optimizer that updates the parameters of its own groups",
            do=f"use {type(inner[0]).__name__} itself, or leave weight_format out",
        )
