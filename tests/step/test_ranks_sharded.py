"""FSDP2, over replicas and over tensor parallel: the numbers of one process, and nothing left of a lost window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper, Window
from halfstep.precision.precision import resolve_precision_name
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    started.stop()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x).relu()))


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def data(part: int, parts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 3, generator=generator)
    return x.chunk(parts)[part], y.chunk(parts)[part]


def stepper_for(model: Any, **options: Any) -> Stepper:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return Stepper(model, optimizer, precision=resolve_precision_name("fp32"), clip_norm=0.3, observe=False, **options)


def trained(model: Any, batch: Any) -> tuple[list[float], list[float], Tensor]:
    stepper = stepper_for(model)
    reports = [stepper.step(mse, batch) for _ in range(3)]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [r.loss for r in reports], [r.grad_norm for r in reports], torch.cat([p.detach().flatten() for p in whole])


MESHES = {
    "shard": {"shard": 4},
    "replicas of shards": {"replicate": 2, "shard": 2},
    "shards of tensor parallel": {"shard": 2, "tp": 2},
    "replicas, shards, tensor parallel": {"replicate": 1, "shard": 2, "tp": 2},
    "tensor parallel": {"shard": 1, "tp": 4},
}


def on_mesh(rank: int, kind: str) -> tuple[list[float], list[float], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    sizes = MESHES[kind]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    model: Any = MLP()
    if "tp" in sizes:
        up, down = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"up": up, "down": down})
    data_parallel = mesh[tuple(name for name in sizes if name != "tp")]
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=data_parallel)
    parts = 4 // sizes.get("tp", 1)
    losses, norms, weights = trained(model, data(rank * parts // 4, parts))
    return losses, norms, weights.tolist()


@pytest.mark.parametrize("kind", list(MESHES))
def test_norm_and_clipping_are_those_of_one_process(four: Ranks, kind: str) -> None:
    torch.manual_seed(0)
    losses, norms, weights = trained(MLP(), data(0, 1))
    for found in four(on_mesh, kind):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=1e-6)
        torch.testing.assert_close(torch.tensor(found[2]), weights, rtol=1e-5, atol=1e-6)


# -- nothing of a lost window stays --------------------------------------------------------------------------------


def sharded_model() -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = MLP()
    fully_shard(model.up)
    return fully_shard(model)


def one_step(rank: int, before: str) -> tuple[float, float, bool]:
    model = sharded_model()
    stepper = stepper_for(model)
    batch = data(rank, 4)
    huge = batch[0] * 100, batch[1]

    def fails(m: nn.Module, b: Any) -> Tensor:
        if b is None:
            raise ValueError("unreadable")
        return mse(m, b)

    if before == "error":
        with pytest.raises(ValueError, match="unreadable"):
            stepper.step(fails, Window([huge, None]))
    if before == "discard":
        with stepper.forward(last=False):
            loss = mse(model, huge)
        stepper.backward(loss)
        stepper.discard()
    if before == "validation":
        with torch.no_grad():
            model.eval()(huge[0])
        model.train()
    if before == "failed validation":
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 16, 5))
    report = stepper.step(mse, batch)
    return report.loss, report.grad_norm, report.applied


@pytest.mark.parametrize("before", ["error", "discard", "validation", "failed validation"])
def test_nothing_stays_of_what_was_before_a_window(four: Ranks, before: str) -> None:
    clean = four(one_step, "")
    assert four(one_step, before) == clean


def built_after_validation(rank: int) -> bool:
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.no_grad():
        model(data(rank, 4)[0])
    return Stepper(model, optimizer, precision=resolve_precision_name("fp32")).step(mse, data(rank, 4)).applied


def test_a_stepper_is_made_after_a_validation(four: Ranks) -> None:
    assert four(built_after_validation) == [True] * 4


# -- torch's distributed checkpoints -------------------------------------------------------------------------------


def adam_for(model: Any) -> Stepper:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return Stepper(model, optimizer, precision=resolve_precision_name("fp32"), schedule=schedule, observe=False)


def local_weights(model: nn.Module) -> list[list[float]]:
    return [p.to_local().flatten().tolist() for p in model.parameters()]  # type: ignore[attr-defined]


def saved_and_loaded(rank: int, folder: str) -> tuple[list[list[float]], list[list[float]]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    stepper = adam_for(sharded_model())
    for _ in range(3):
        stepper.step(mse, data(rank, 4))
    dcp.save({"model": get_model_state_dict(stepper.model), "stepper": stepper.state_dict()}, checkpoint_id=folder)
    fresh = adam_for(sharded_model())
    get_optimizer_state_dict(fresh.model, fresh.optimizers["loss"])  # makes the moments that the file is read into
    state = {"model": get_model_state_dict(fresh.model), "stepper": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.model.load_state_dict(state["model"])
    fresh.load_state_dict(state["stepper"])
    for each in (stepper, fresh):
        for _ in range(2):
            each.step(mse, data(rank, 4))
    assert fresh.counts.applied == 5
    return local_weights(stepper.model), local_weights(fresh.model)


def test_a_steppers_state_goes_through_torchs_distributed_checkpoint(four: Ranks, tmp_path: Any) -> None:
    for went_on, loaded in four(saved_and_loaded, str(tmp_path / "checkpoint")):
        assert went_on == loaded
