"""Meters on two processes: replicated and sharded models train as without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Ema, Stepper
from halfstep.guard.monitors.monitors import Meters
from halfstep.precision.precision import resolve_precision_name
from tests.support.models import buffered_model, plain_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def trained(rank: int, how: str, metered: bool) -> tuple[list[float], list[str], dict[str, object]]:
    if how == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = plain_model()
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = buffered_model()
    precision = resolve_precision_name("fp32" if how == "sharded" else "bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stepper = Stepper(model, optimizer, precision=precision, clip_norm=0.2, ema=Ema(model, 0.9))
    meters = Meters(stepper, every=2) if metered else None
    data = torch.Generator().manual_seed(rank)
    losses, found = [], []
    for step in range(9):
        batch = torch.randn(6, 8, generator=data), torch.randint(0, 4, (6,), generator=data)
        bad = float("nan") if step == 3 and rank == 1 else 1.0
        if meters is not None:
            meters.before()
        report = stepper.step(lambda m, b, bad=bad: entropy(m, b) * bad, batch)
        losses.append(report.loss)
        if meters is not None:
            found += [finding.id for finding in meters.after(report)]
    return losses, found, {} if meters is None else dict(meters.readings)


@pytest.mark.parametrize("how", ["replicated", "sharded"])
@pytest.mark.slow
def test_meters_on_two_ranks_change_nothing(on_ranks: Ranks, how: str) -> None:
    plain, watched = on_ranks(trained, how, False), on_ranks(trained, how, True)
    for rank in (0, 1):
        assert str(plain[rank][0]) == str(watched[rank][0])
        _, found, readings = watched[rank]
        assert found == []
        assert float(str(readings["headroom_bits"])) > 100
        assert readings["lost_update_share"] == 0.0
        assert float(str(readings["still_average_share"])) < 0.1
        assert readings["gradient_zero_share"] == 0.0
