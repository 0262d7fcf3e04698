"""One optimizer in a step: its parameters and their gradients, its clipping, its schedule, its state."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, Protocol, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from halfstep import distributed
from halfstep.errors import StateMismatch, WrongUse, check_same_keys, check_same_presence
from halfstep.formats import FP32, FP64, Format, is_narrow, round_to_fp32
from halfstep.observe.identities import strip_compile_wrappers
from halfstep.step.census import IS_SPARSE, drop_gradients, list_optimizer_parameters, read_gradients

# -- gradients --------------------------------------------------------------------------------------------------------
# Gradients as plain local tensors. A NaN or an infinity anywhere makes their norm non-finite, so the norm that clipping
# needs anyway is the finite check as well, in one pass. A norm beyond fp32's range counts as non-finite: nothing could
# be clipped by it.


def move_number_to_device(device: torch.device, number: Tensor) -> Tensor:
    """Return a number on `device`; with model parallelism, copied without making the host wait."""
    return number if number.device == device else number.to(device, non_blocking=True)


def stack_numbers(numbers: Sequence[Tensor]) -> Tensor:
    """Return numbers as one row on the device of the first."""
    return torch.stack([move_number_to_device(numbers[0].device, number) for number in numbers])


class Gradients:
    """The gradients of some parameters, treated as one vector over all ranks."""

    def __init__(
        self, parameters: Sequence[Tensor], *, may_be_narrow: bool = False, places: Sequence[int] = ()
    ) -> None:
        self.parameters = list(parameters)
        self.places = places
        """The place of each parameter in the model, if norms are summed in the model's order."""
        self.may_be_narrow = may_be_narrow
        """Whether some may be in bf16; these are multiplied and clamped where they are widened, in the update."""
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.sharded = distributed.is_sharded(self.parameters)
        # get_total_norm groups by device and dtype first; with one of each that only costs time.
        self._norm: Callable[[list[Tensor]], Tensor] = (
            _compute_norm if len({(t.device, t.dtype) for t in self.parameters}) == 1 else get_total_norm
        )
        if may_be_narrow:
            self._norm = compute_fp32_norm
        self._some_fp64 = any(p.dtype in _FP64 for p in self.parameters)
        self.local: list[Tensor] = []
        """The gradients that backward left on this rank; parameters that it did not reach have none."""
        self._summed: list[Tensor] = []
        """The same with repeated indices of sparse gradients summed, for norms."""

    def collect(self) -> bool:
        """Collect the gradients after the last backward; return whether there are any."""
        self.local = self._summed = found = read_gradients(self.parameters)
        sparse = any(map(IS_SPARSE, found))
        if self.sharded or sparse:
            self.local = self._summed = [_extract_dense_gradient(p) for p in self.parameters if p.grad is not None]
        if sparse:
            # Autograd may repeat an index in a sparse gradient. Only norms see the sum: optimizers differ in how they
            # coalesce, and get what autograd made.
            both = zip(found, self.local, strict=True)
            self._summed = [g.coalesce()._values() if g.is_sparse else plain for g, plain in both]
        return bool(found)

    def with_places(self) -> list[tuple[int, Tensor]]:
        """Return the gradients on this rank, each with the place of its parameter in the model."""
        reached = [place for place, p in zip(self.places, self.parameters, strict=True) if p.grad is not None]
        return list(zip(reached, self.local, strict=True))

    def norm(self) -> Tensor:
        """Return the 2-norm, as torch computes it."""
        return self._norm(self._summed)

    @property
    def norm_format(self) -> Format:
        """The format of the norm: fp64 if any gradient is in float64."""
        return FP64 if self._some_fp64 and any(g.dtype in _FP64 for g in self.local) else FP32

    def squared_share(self) -> Tensor:
        """Return this rank's share of the squared norm: summed over ranks, each element counts once."""
        if not self.sharded:
            return self.norm().double().square() / distributed.count_ranks()
        shares = [
            # Squared in float64: a norm near the end of fp32's range must not overflow on its way into the agreement.
            (compute_fp32_norm if self.may_be_narrow else _compute_norm)([local]).double().square()
            / distributed.count_holding_ranks(whole)
            for local, whole in zip(self._summed, (p.grad for p in self.parameters if p.grad is not None), strict=True)
        ]
        return stack_numbers(shares).sum()

    def first_not_finite(self) -> Tensor | None:
        """Return the first parameter with a non-finite gradient here, or None; one host read, for skipped steps."""
        reached = [p for p in self.parameters if p.grad is not None]
        finite = torch.stack([norm.isfinite().cpu() for norm in torch._foreach_norm(self.local)]).tolist()
        return next((p for p, good in zip(reached, finite, strict=True) if not good), None)

    def multiply_(self, factor: float) -> None:
        """Multiply all gradients in place."""
        if factor != 1.0:
            torch._foreach_mul_(self.local, factor)

    def multiply_all_but_bf16_(self, factor: float) -> None:
        """Multiply those that are not in bf16, in place."""
        if factor != 1.0 and (wide := self._wide()):
            torch._foreach_mul_(wide, factor)

    def clamp_all_but_bf16_(self, limit: float) -> None:
        """Clamp the elements of those that are not in bf16 to [-limit, limit], in place."""
        if self._summed is not self.local:  # repeated indices are summed first: each part could pass the limit alone
            for p in self.parameters:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
            self.local = [_extract_dense_gradient(p) for p in self.parameters if p.grad is not None]
        if wide := self._wide():
            torch._foreach_clamp_min_(wide, -limit)
            torch._foreach_clamp_max_(wide, limit)

    def _wide(self) -> list[Tensor]:
        return [g for g in self.local if not is_narrow(g.dtype)] if self.may_be_narrow else self.local

    def release(self) -> None:
        """Hold no gradient any longer: those that the loop drops must be free before the next backward pass."""
        self.local = self._summed = []

    def clear(self) -> None:
        """Drop all gradients."""
        self.local = self._summed = []
        drop_gradients(self.parameters)


_FP64 = (torch.float64, torch.complex128)
_EPSILON = round_to_fp32(1e-6)


def is_clearly_below(norm: float, largest: float) -> bool:
    """Return whether a norm is so far below a limit that its clip factor is 1 in any format."""
    return norm <= 0.999 * largest - 1e-5


def compute_clip_factor(norm: float, largest: float, norm_format: Format = FP32) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`, computed on the host with the same roundings."""
    if norm_format is FP64:
        return min(1.0, 1.0 / (norm + 1e-6) * largest)
    # torch evaluates `max_norm / tensor` as `tensor.reciprocal() * max_norm`: two roundings, not one.
    return min(1.0, round_to_fp32(round_to_fp32(1.0 / round_to_fp32(norm + _EPSILON)) * round_to_fp32(largest)))


def _compute_norm(gradients: list[Tensor]) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return total


def compute_fp32_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm in fp32 of tensors that may be in bf16, where a norm has three digits."""
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)
    total: Tensor = torch.linalg.vector_norm(stack_numbers(norms))
    return total


def _extract_dense_gradient(parameter: Tensor) -> Tensor:
    """Return the dense local tensor with a gradient's values."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        return gradient._values()
    if not distributed.is_dtensor_shard(gradient):
        return gradient
    part, whole = cast(Any, gradient), cast(Any, parameter)
    if any(placement.is_partial() for placement in part.placements):
        parameter.grad = part = part.redistribute(placements=whole.placements)  # a sum that is still pending
    local: Tensor = part.to_local()
    return local


# -- optimizer slot ---------------------------------------------------------------------------------------------------


class OptimizerSlotState(TypedDict):
    """The saved state of an optimizer and its schedule."""

    kind: str
    optimizer: dict[str, Any]
    schedule_kind: str | None
    schedule: dict[str, Any] | None
    parameters: NotRequired[list[str]]
    """The names of the parameters in the optimizer's order, if all are the model's."""


class WeightUpdater(Protocol):
    """Steps an optimizer whose weights are stored in 16 bits: those of `halfstep.step.storage.weight_format`."""

    def step(self, optimizer: torch.optim.Optimizer, factor: float, limit: float | None) -> None: ...


class OptimizerSlot:
    """One optimizer by name, with its gradients, limits and schedule. Raises WrongUse for an unusable schedule."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Any = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        # Here, because halfstep's GradScaler uses only the functions of this file.
        from halfstep.step.direct_update import update_directly

        self._update_directly = update_directly
        self.name, self.optimizer, self.schedule = name, optimizer, check_schedule(schedule, optimizer)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self._model = self._ordered_by = model
        self.weights: WeightUpdater | None = None
        self.follow()
        self.norm = self.multiplier = math.nan
        """The norm of its gradients, unscaled and before clipping, and the factor that they were multiplied by."""

    def order_by_groups(self) -> None:
        """Sum norms in the optimizer's order instead of the model's, for a loop that clips the optimizer's parameters.

        An optimizer with several groups has another order, and a sum in another order rounds differently.
        """
        self._ordered_by = None
        self.follow()

    def follow(self) -> None:
        """Rebuild the list of parameters after some were added, removed or unfrozen."""
        owned = list_optimizer_parameters(self.optimizer)
        own_places: list[int] = []
        if self._ordered_by is not None:
            places = {id(p): place for place, p in enumerate(self._ordered_by.parameters())}
            owned.sort(key=lambda p: places.get(id(p), len(places)))
            own_places = [places.get(id(p), len(places)) for p in owned]
        self.gradients = Gradients(owned, may_be_narrow=self.weights is not None, places=own_places)

    def apply(self) -> None:
        """Step the optimizer, then its schedule."""
        if self.weights is None:
            if not self._update_directly(self.optimizer):
                self.optimizer.step()
        else:
            self.weights.step(self.optimizer, self.multiplier, self.clip_value)
        if self.schedule is not None:
            # After the optimizer: torch's schedules set the lr of the next step.
            self.schedule.step()

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> OptimizerSlotState:
        """Return the states of optimizer and schedule, with their types."""
        state: OptimizerSlotState = {
            "kind": type(self.optimizer).__name__,
            "optimizer": self._read_plain_state(),
            "schedule_kind": None if self.schedule is None else type(self.schedule).__name__,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }
        if names := self._list_names():
            state["parameters"] = names
        return state

    def _list_names(self) -> list[str]:
        """Return the names of the parameters in the optimizer's order; empty if one is not the model's."""
        if self._model is None:
            return []
        # The names of a compiled model, and of one in DistributedDataParallel, are those of the plain model.
        known = {id(p): strip_compile_wrappers(name) for name, p in self._model.named_parameters()}
        names = [known.get(id(p), "").removeprefix("module.") for p in list_optimizer_parameters(self.optimizer)]
        return names if all(names) and len(set(names)) == len(names) else []

    def _match_by_name(self, state: OptimizerSlotState) -> dict[str, Any]:
        """Return the saved state of the optimizer with its parameters in this optimizer's order.

        States without names, and of other names, are matched by position. Raises StateMismatch if a parameter is in
        another group.
        """
        saved, theirs, ours = state["optimizer"], state.get("parameters", []), self._list_names()
        if theirs == ours or set(theirs) != set(ours) or not {"state", "param_groups"} <= set(saved):
            return saved
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        by_name = dict(zip(theirs, keys, strict=True))
        held, at = [], 0
        for group in self.optimizer.param_groups:
            held.append(ours[at : at + len(group["params"])])
            at += len(group["params"])
        of_key = {key: name for name, key in by_name.items()}
        groups = {frozenset(of_key[key] for key in group["params"]): group for group in saved["param_groups"]}
        found = [groups.get(frozenset(names)) for names in held]
        moved = [group is not saved["param_groups"][place] for place, group in enumerate(found) if group is not None]
        if None in found or (any(moved) and self.schedule is not None):
            raise StateMismatch(
                f"optimizer {self.name!r} was saved with its parameters in other groups",
                allowed="the same parameters in each group, in any order, and with a schedule the same order of groups",
                do="build the optimizer's groups as in the saved run",
            )
        places = iter(range(len(ours)))
        return {
            **saved,
            "state": {
                place: saved["state"][key]
                for place, name in enumerate(ours)
                if (key := by_name[name]) in saved["state"]
            },
            "param_groups": [
                {**(group or {}), "params": [next(places) for _ in names]}
                for group, names in zip(found, held, strict=True)
            ],
        }

    def _read_plain_state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        if "torchao.optim" not in sys.modules:
            return state
        from halfstep.step.storage.small_states import convert_to_plain_states, find_small_state_kind

        return (
            convert_to_plain_states(state)
            if any(find_small_state_kind(v) for kept in _list_saved_states(state) for v in kept.values())
            else state
        )

    def check_state(self, state: OptimizerSlotState) -> None:
        """Raise StateMismatch for the state of another optimizer, schedule or model; nothing is changed."""
        ours = self.state_dict()
        named = {"parameters"}  # states of earlier versions have no names
        check_same_keys(f"optimizer {self.name!r}", set(ours) - named, set(state) - named)
        self._check_kind("optimizer", ours["kind"], state["kind"])
        check_same_presence("a schedule", "schedule", ours, state)
        self._check_kind("schedule", ours["schedule_kind"], state["schedule_kind"])
        if ours["schedule"] is not None and state["schedule"] is not None:
            check_same_keys(f"the {ours['schedule_kind']} of {self.name!r}", ours["schedule"], state["schedule"])
        saved, held = self._match_by_name(state), ours["optimizer"]
        # A wrapper around another optimizer may nest its state, or use a different format.
        torchs = {"state", "param_groups"}
        check_same_keys(f"the {ours['kind']} of {self.name!r}", torchs & set(held), torchs & set(saved))
        if torchs <= set(held):
            self._check_groups(saved["param_groups"])
            self._check_tensors(saved["state"])

    def _check_kind(self, what: str, ours: str | None, saved: str | None) -> None:
        if ours != saved:
            raise StateMismatch(
                f"the {what} of {self.name!r} was saved as {saved}",
                allowed=f"the state of {ours}, which this Stepper has",
                do=f"build the Stepper with {saved}, or start with a new {what}",
            )

    def _check_groups(self, saved: list[dict[str, Any]]) -> None:
        held = self.optimizer.param_groups
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in held]:
            many = [sum(len(group["params"]) for group in groups) for groups in (saved, held)]
            raise StateMismatch(
                f"optimizer {self.name!r} was saved with {many[0]} parameters in {len(saved)} groups",
                allowed=f"{many[1]} in {len(held)}",
                do="build the model and the optimizer as in the saved run",
            )
        for mine, theirs in zip(held, saved, strict=True):
            # Newer versions of torch add options, so an older state may lack some; options are never renamed. Other
            # optimizers write options while they step, which a new one lacks; its constructor's own are in the state.
            unknown = sorted(set(theirs) - set(mine) - _SCHEDULES_OWN)
            own = set(getattr(self.optimizer, "defaults", ()))  # a wrapper may have none
            if unknown and (_has_torch_step(self.optimizer) or not own <= set(theirs)):
                raise StateMismatch(
                    f"optimizer {self.name!r} was saved with the options {', '.join(unknown)}",
                    allowed=", ".join(sorted(set(mine) - {"params"})),
                    do=f"build the saved {type(self.optimizer).__name__} with the same version; "
                    "set your own options on its groups before loading",
                )

    def _check_tensors(self, saved: Mapping[Any, Any]) -> None:
        as_torch = _has_torch_step(self.optimizer)
        for index, parameter in enumerate(list_optimizer_parameters(self.optimizer)):
            own, theirs = self.optimizer.state.get(parameter, {}), saved.get(index, {})
            if as_torch and own and theirs:
                check_same_keys(f"the state of parameter {index} of {self.name!r}", own, theirs)
            for name, value in theirs.items() if isinstance(theirs, Mapping) else ():
                known = as_torch or _is_moment(name, own, parameter)
                # A state in 8 bits is a dict; one in 4 bits has two codes in a byte.
                held = value.get("codes") if isinstance(value, Mapping) and "shape" not in value else value
                if known and not _fits_parameter(held, parameter):
                    raise StateMismatch(
                        f"{name} of parameter {index} was saved with shape {tuple(getattr(held, 'shape', ()))}",
                        allowed=str(tuple(parameter.shape)),
                        do="build the model as in the saved run",
                    )

    def load_state_dict(self, state: OptimizerSlotState) -> None:
        """Load the states of optimizer and schedule."""
        saved = self._match_by_name(state)
        small = any(isinstance(v, Mapping) for kept in _list_saved_states(saved) for v in kept.values())
        if small:
            from halfstep.step.storage.small_states import convert_to_small_states, share_quantization_tables

            saved = convert_to_small_states(saved)
        self.optimizer.load_state_dict(saved)
        if self.weights is not None:
            self._load_wide_states(saved)
        if small:
            share_quantization_tables(self.optimizer.state.values())
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])

    def _load_wide_states(self, saved: Mapping[str, Any]) -> None:
        """Set the states again: torch rounds the moments of a parameter to the format of the parameter."""
        for index, parameter in enumerate(list_optimizer_parameters(self.optimizer)):
            for name, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    self.optimizer.state[parameter][name] = value.to(parameter.device)


def _list_saved_states(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    states = saved.get("state")
    return [kept for kept in states.values() if isinstance(kept, Mapping)] if isinstance(states, Mapping) else []


_SCHEDULES_OWN = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Options that schedules write into an optimizer's groups."""


def _has_torch_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step is torch's own: it writes no options, and the shapes of its state are known."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


_MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "exp_inf"}
"""Names of torch's moments, which others use too."""


def _is_moment(name: str, own: Any, parameter: Tensor) -> bool:
    """Return whether another optimizer than torch's keeps this value for each element of the parameter."""
    held = own.get(name) if isinstance(own, Mapping) else None
    if isinstance(held, Tensor):
        return held.shape == parameter.shape
    # By name only in one dimension: GaLore projects the exp_avg of a matrix to fewer rows or columns.
    return name in _MOMENTS and parameter.ndim == 1


def _fits_parameter(value: Any, parameter: Tensor) -> bool:
    """Return whether a saved value can belong to a parameter of this shape."""
    # Factored or scalar state has other shapes; a full moment has as many dimensions as its parameter and must fit.
    full = isinstance(value, Tensor) and value.ndim == parameter.ndim > 0 and value.numel() > 1
    return not full or all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))


def check_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return `schedule`; raise WrongUse if it does not step this optimizer once per applied update."""
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise WrongUse(
            f"a {type(schedule).__name__} of another optimizer",
            allowed="a schedule of the optimizer that it is given with",
            do=f"{type(schedule).__name__}(optimizer, ...)",
        )
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise WrongUse(
            "ReduceLROnPlateau as the schedule of a step",
            allowed="a schedule that is a function of the number of updates",
            do="call plateau.step(metric) in your loop, after the evaluation",
        )
    return schedule
