"""The formats in which FSDP2 gathers and sums a model: what is reported is what is sent, and islands stay wide."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Stepper, island
from halfstep.errors import HalfstepError
from halfstep.precision.precision import resolve_precision_name
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.stop()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).relu()))


def by_parameter() -> bool:
    """Whether FSDP2 has a policy for each parameter: torch 2.15 and newer."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator)


def mse(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


class SentFormats(TorchDispatchMode):
    """The formats of the inputs of reduce-scatters, as gloo gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce_scatter" in func.overloadpacket.__name__:
            # (output, input, ...)
            self.formats.append(str(args[1].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def build_stepper(model: Any) -> tuple[Stepper, list[str]]:
    """Return a Stepper in fp32, for FSDP2 casts, and the ids of what it warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        stepper = Stepper(model, optimizer, precision=resolve_precision_name("fp32"), observe=False)
    return stepper, [finding.id for finding in stepper.findings]


# -- the format of sums --------------------------------------------------------------------------------------------


def reduced(rank: int, asked: str | None, stored: str) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = MLP().to(getattr(torch, stored))
    dtype = getattr(torch, asked) if asked else None
    fully_shard(model.up, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    stepper, findings = build_stepper(model)
    with SentFormats() as sent:
        assert stepper.step(mse, data(rank)).applied
    return {
        "said": {one.group: str(one.reduced).removeprefix("torch.") for one in stepper.shard_formats},
        "gathered": [one.gathered for one in stepper.shard_formats],
        "sent": sorted(sent.formats),
        "findings": findings,
        "repr": repr(stepper),
    }


@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
def test_the_reported_format_of_sums_is_the_one_that_is_sent(two: Ranks, asked: str | None) -> None:
    unasked = "float32" if by_parameter() else "bfloat16"
    expected = asked or unasked
    for found in two(reduced, asked, "float32"):
        assert found["said"] == {"": "float32", "up": expected}
        assert found["sent"] == sorted(["float32", expected])
        assert found["gathered"] == [("bf16",), ("bf16",)]
        narrow = asked is None and unasked == "bfloat16"
        assert found["findings"] == (["fsdp.reduces_unasked"] if narrow else [])
        assert f"summed in fp32{', 1 of 2 groups in bf16' if expected == 'bfloat16' else ''}" in found["repr"]


def groups_with_frozen_parameters(rank: int) -> tuple[list[Any], int]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = MLP()
    model.up.requires_grad_(False)
    fully_shard(model.up, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    stepper, _ = build_stepper(model)
    return [(one.group, one.gathered) for one in stepper.shard_formats], int(stepper.step(mse, data(rank)).applied)


def test_a_frozen_group_has_formats_too(two: Ranks) -> None:
    for formats, applied in two(groups_with_frozen_parameters):
        assert formats == [("", ("bf16",)), ("up", ("bf16",))]
        assert applied


def without_shards(rank: int) -> tuple[int, str]:
    stepper, _ = build_stepper(MLP())
    return len(stepper.shard_formats), repr(stepper)


def test_a_model_that_every_rank_holds_has_no_shard_formats(two: Ranks) -> None:
    for count, described in two(without_shards):
        assert count == 0
        assert "shards" not in described


# -- islands under FSDP2's own mixed precision -----------------------------------------------------------------------


def island_under_policy(rank: int, alone: bool, ran: bool = False) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model: Any = MLP()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fully_shard(model.up, mp_policy=policy)
    if alone:
        fully_shard(model.down, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    seen: list[str] = []
    for name in ("up", "down"):
        layer: Any = getattr(model, name)
        # After FSDP2's own hook, which gathers: a hook after forward would see shards.
        layer.register_forward_pre_hook(lambda m, args, name=name: seen.append(f"{name} {m.weight.dtype}"))
    if ran:
        model(data(rank)[0])
        model.reshard()
        seen.clear()
    island(model, "down")
    before = model.down.weight.full_tensor()
    try:
        stepper, _ = build_stepper(model)
        applied = stepper.step(mse, data(rank)).applied
    except HalfstepError as error:
        return {"applied": False, "seen": seen, "words": str(error)}
    grad = (before - model.down.weight.full_tensor()) / 0.5
    return {"applied": applied, "seen": seen, "words": "", "moved": grad.abs().sum().item(), "gradient": grad.tolist()}


WIDE = ["up torch.bfloat16", "down torch.float32"]


def test_an_island_that_is_sharded_by_itself_keeps_its_weights_in_fp32(two: Ranks) -> None:
    for found in two(island_under_policy, True):
        assert found["applied"], found["words"]
        assert found["seen"] == WIDE
        assert found["moved"] > 0


@pytest.mark.wording
def test_an_island_that_shares_a_shard_stays_in_fp32_or_is_refused(two: Ranks) -> None:
    alone = two(island_under_policy, True)[0] if by_parameter() else {}
    for found in two(island_under_policy, False):
        if by_parameter():
            assert found["applied"], found["words"]
            assert found["seen"] == WIDE
            assert found["gradient"] == alone["gradient"]
        else:
            assert not found["applied"]
            assert "fully_shard(model.down" in found["words"]


@pytest.mark.wording
def test_an_island_that_is_declared_after_a_forward_pass_is_refused(two: Ranks) -> None:
    for found in two(island_under_policy, True, True):
        assert not found["applied"]
        assert "before" in found["words"]
        assert "bfloat16" in found["words"]


def override_of_the_user(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model: Any = MLP()
    island(model, "down")
    held = set(model.down.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda p: p.dtype if p in held else None,
    )
    fully_shard(model, mp_policy=policy)
    seen: list[str] = []
    model.down.register_forward_pre_hook(lambda m, args: seen.append(str(m.weight.dtype)))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.5), precision="bf16", observe=False)
    applied = [stepper.step(mse, data(rank)).applied for _ in range(2)]
    skipped = stepper.step(mse, (data(rank)[0] * float("nan"), data(rank)[1])).applied
    return {"applied": applied, "skipped": skipped, "seen": seen, "gathered": stepper.shard_formats[0].gathered}


def test_an_override_of_the_user_keeps_an_island_wide(two: Ranks) -> None:
    if not by_parameter():
        pytest.skip("a policy for each parameter needs torch 2.15")
    for found in two(override_of_the_user):
        assert found["applied"] == [True, True]
        assert not found["skipped"]
        assert set(found["seen"]) == {"torch.float32"}
        assert set(found["gathered"]) == {"bf16", "fp32"}
