"""The formats in which FSDP2 gathers and reduces the parameters of each shard group; islands stay as they are stored.

torch 2.15 has a policy for each parameter (`param_dtype_override_fn`), and sums gradients in the format of the stored
parameter if `reduce_dtype` is None. Earlier versions have one policy for a group, and sum in its `param_dtype`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.formats import name_dtype
from halfstep.precision.island import find_islands


@dataclass(frozen=True)
class ShardFormats:
    """The formats of one shard group of FSDP2."""

    group: str
    """The path of the module that the group belongs to; empty for the model."""
    gathered: tuple[str, ...]
    """The formats in which parameters are gathered, the most frequent first."""
    reduced: torch.dtype
    """The format in which gradients are summed over the ranks."""
    chosen: bool
    """Whether the policy sets `reduce_dtype`; if not, the version of torch decides."""
    stored: torch.dtype
    """The widest format in which trained parameters are stored."""

    @property
    def is_reduced_unasked(self) -> bool:
        """Whether gradients are summed in fewer bits than the parameters have, and the policy does not say so."""
        return not self.chosen and self.reduced.itemsize < self.stored.itemsize


def iterate_param_groups(model: Any) -> Iterator[Any]:
    """Yield the shard groups of a model under `fully_shard`."""
    for state in _list_fsdp_states(model):
        yield from _list_state_groups(state)


def read_param_policy(group: Any, parameter: Any) -> Any:
    """Return the `MixedPrecisionPolicy` of one parameter of a shard group."""
    # Before torch 2.15 a parameter also has a policy, which FSDP2 does not read: that of its group decides.
    return getattr(group, "mp_policy", None) or parameter.mp_policy


def list_shard_formats(model: Any) -> list[ShardFormats]:
    """Return the formats of the shard groups of a model under `fully_shard`, in the order of its modules."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for group in iterate_param_groups(model):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad and _is_floating(p)]
        held = trained or [p for p in group.fsdp_params if _is_floating(p)]
        if not held:
            continue
        gathered = Counter(name_dtype(_resolve_gather_dtype(group, p)) for p in held)
        found.append(
            ShardFormats(
                group=names.get(group.modules[0], ""),
                gathered=tuple(name for name, _ in gathered.most_common()),
                reduced=_find_widest(_resolve_reduce_dtype(group, p) for p in held),
                chosen=read_param_policy(group, held[0]).reduce_dtype is not None,
                stored=_find_widest(p.sharded_param.dtype for p in held),
            )
        )
    return found


def describe_shard_formats(found: Sequence[ShardFormats]) -> str:
    """Return a clause such as `gathered in bf16 and fp32, summed in fp32`; empty without shard groups.

    Groups with another reduce format than most are counted: `summed in fp32, 2 of 9 groups in bf16`.
    """
    if not found:
        return ""
    gathered = Counter(name for one in found for name in one.gathered)
    (most, _), *others = Counter(name_dtype(one.reduced) for one in found).most_common()
    differing = "".join(f", {count} of {len(found)} groups in {name}" for name, count in others)
    return f"gathered in {' and '.join(name for name, _ in gathered.most_common())}, summed in {most}{differing}"


def build_unasked_reduction_findings(found: Sequence[ShardFormats]) -> tuple[Finding, ...]:
    """Return a finding if gradients are summed in fewer bits than the parameters have, because nothing is set."""
    narrow = [one for one in found if one.is_reduced_unasked]
    if not narrow:
        return ()
    groups = ", ".join(repr(one.group) if one.group else "the model" for one in narrow[:3])
    more = f" and {len(narrow) - 3} more" if len(narrow) > 3 else ""
    return (
        Finding(
            "fsdp.reduces_unasked",
            "warning",
            f"FSDP2 sums the gradients of {len(narrow)} of {len(found)} shard groups in "
            f"{name_dtype(narrow[0].reduced)} ({groups}{more}): the policy sets no reduce_dtype; without it, "
            f"torch {torch.__version__} sums in param_dtype, torch 2.15 in {name_dtype(narrow[0].stored)}",
            f"MixedPrecisionPolicy(..., reduce_dtype=torch.float32), or reduce_dtype={narrow[0].reduced} to keep "
            "this sum with each version of torch",
        ),
    )


def keep_islands_wide(model: Any) -> None:
    """Make FSDP2 gather the weights of islands as they are stored, not in its 16-bit `param_dtype`.

    Raises `WrongUse` where that is impossible: after the first forward pass and, before torch 2.15, where an island
    shares a group with other modules.
    """
    for path, module in find_islands(model).items():
        inside, held = set(module.modules()), {id(p) for p in module.parameters()}
        for state in _list_fsdp_states(model):
            for group in _list_state_groups(state):
                narrow = [p for p in group.fsdp_params if id(p.sharded_param) in held and _is_narrowed(group, p)]
                if narrow:
                    _keep_wide(state, group, narrow, path, inside)


def _keep_wide(state: Any, group: Any, narrow: Sequence[Any], path: str, inside: set[nn.Module]) -> None:
    whole = inside.issuperset(group.modules)
    by_parameter = not hasattr(group, "mp_policy")
    # FSDP2 resolves the policy in its first forward. Before torch 2.15 a group has one policy for all of its modules.
    if state._is_root is not None or not (whole or by_parameter):
        dtype = read_param_policy(group, narrow[0]).param_dtype
        raise WrongUse(
            f"the island {path!r} in a shard that FSDP2 gathers in {dtype}",
            allowed="an island that is known before the first forward pass"
            if by_parameter
            else "an island that is sharded by itself, before its first forward pass",
            do=f"halfstep.island(model, {path!r}) before the first forward pass"
            if by_parameter
            else f"fully_shard(model.{path}, mp_policy=MixedPrecisionPolicy()) before fully_shard(model)",
        )
    if by_parameter:
        for parameter in narrow:
            parameter.mp_policy = replace(parameter.mp_policy, param_dtype=None)
    else:
        group.mp_policy = replace(group.mp_policy, param_dtype=None)
    if whole:
        # FSDP2 also casts the inputs of these modules.
        state._mp_policy = replace(state._mp_policy, param_dtype=None)


def _is_narrowed(group: Any, parameter: Any) -> bool:
    return _is_floating(parameter) and _resolve_gather_dtype(group, parameter) != parameter.sharded_param.dtype


def _resolve_gather_dtype(group: Any, parameter: Any) -> torch.dtype:
    asked: torch.dtype | None = read_param_policy(group, parameter).param_dtype
    return asked or parameter.sharded_param.dtype


def _resolve_reduce_dtype(group: Any, parameter: Any) -> torch.dtype:
    policy = read_param_policy(group, parameter)
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype  # type: ignore[no-any-return]
    if not hasattr(type(parameter), "unsharded_grad_dtype"):
        return _resolve_gather_dtype(group, parameter)
    stored = parameter.sharded_param
    # None accepts the gradient of any format: that of the gathered parameter.
    asked = stored.grad_dtype if stored._has_grad_dtype_override else stored.dtype
    return asked or _resolve_gather_dtype(group, parameter)


def _find_widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _is_floating(parameter: Any) -> bool:
    return bool(parameter.sharded_param.dtype.is_floating_point)


def _list_fsdp_states(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule  # slow to load, and loaded already where it is needed

    sharded: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in sharded]
    return list({id(state): state for state in states}.values())


def _list_state_groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
