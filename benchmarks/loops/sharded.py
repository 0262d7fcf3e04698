"""FSDP2 on two ranks and FSDP2 with tensor parallelism on four: norms, abandoned windows, validation between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.loops.data_parallel import batches, whole_batches
from benchmarks.loops.harness import NAN, Broken, Case, HalfstepError, mlp, mse, named, poisoned, require, skips, trains
from benchmarks.loops.ranks import on_ranks
from halfstep import Ema, Stepper, Window


def sharded(**options: Any) -> Case:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    case = Case(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mse, options=options)
    case.start()
    return case


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_one(whole: list[Any], clip: float | None = None) -> nn.Module:
    model, optimizer = plain()
    for batch in whole:
        optimizer.zero_grad()
        mse(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def full(p: Tensor) -> Tensor:
    gather = getattr(p, "full_tensor", None)
    return (gather() if gather else p).detach()


def close(one: nn.Module, other: nn.Module) -> str:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    far = max((full(a) - full(b)).abs().max().item() for a, b in pairs)
    require(far < 1e-5, f"{far:.2e} away from one process")
    return f"{far:.1e} from one process"


# -- each runs on a rank ------------------------------------------------------------------------------------------


def as_one_process(rank: int) -> str:
    case = sharded(clip_norm=0.3)
    trains(case, batches(rank))
    return close(by_one(whole_batches(), 0.3), case.model)


def norm_of_one_process(rank: int) -> str:
    case = sharded()
    report = trains(case, batches(rank)[:1])[0]
    model, _ = plain()
    mse(model, whole_batches()[0]).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    require(abs(report.grad_norm / norm - 1) < 1e-5, f"norm {report.grad_norm}, by one process {norm}")
    return f"norm {report.grad_norm:.6f}, by one process {norm:.6f}"


def bad_batch_on_one_rank(rank: int) -> str:
    case = sharded()
    for x, y in batches(rank):
        skips(case, (x * (NAN if rank == 1 else 1.0), y))
        trains(case, [(x, y)])
    return close(by_one(whole_batches()), case.model)


def window_abandoned_by_an_error(rank: int) -> str:
    """Gradients of an abandoned window must not be part of the next update."""
    case = sharded()
    mine = batches(rank)
    huge = mine[0][0] * 100, mine[0][1]

    def loss(m: nn.Module, b: Any) -> Tensor:
        if b is None:
            raise ValueError("unreadable sample")
        return mse(m, b)

    try:
        case.stepper.step(loss, Window([huge, None]))
        raise Broken("the error was swallowed")
    except ValueError:
        pass
    trains(case, mine)
    return close(by_one(whole_batches()), case.model)


def window_abandoned_by_discard(rank: int) -> str:
    case = sharded()
    mine = batches(rank)
    with case.stepper.forward(last=False):
        loss = mse(case.model, (mine[0][0] * 100, mine[0][1]))
    case.stepper.backward(loss)
    case.stepper.discard()
    trains(case, mine)
    return close(by_one(whole_batches()), case.model)


def validation_between_steps(rank: int) -> str:
    """One no-grad forward between steps leaves parameters unsharded: the Stepper goes on."""
    case = sharded()
    for batch in batches(rank):
        trains(case, [batch])
        case.model.eval()
        with torch.no_grad():
            case.model(batch[0])
        case.model.train()
    return close(by_one(whole_batches()), case.model)


def caught_error_in_forward(rank: int) -> str:
    case = sharded()
    mine = batches(rank)

    def boom(m: nn.Module, b: Any) -> Tensor:
        m(b[0])
        raise ValueError("mine")

    for batch in mine:
        try:
            case.stepper.step(boom, batch)
            raise Broken("the error was swallowed")
        except ValueError:
            pass
        trains(case, [batch])
    return close(by_one(whole_batches()), case.model)


def evaluating_with_the_average(rank: int) -> str:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        stepper = Stepper(model, optimizer, precision="fp32", ema=Ema(model, 0.5))
    except HalfstepError as refusal:
        return f"refused: {str(refusal).splitlines()[0][:80]}"
    mean = [full(p).clone() for p in model.parameters()]
    for batch in batches(rank):
        require(stepper.step(mse, batch).applied, "not applied")
        for m, p in zip(mean, model.parameters(), strict=True):
            m.lerp_(full(p), 0.5)
    with stepper.evaluating(ema=True) as worn:
        far = max((full(p) - m).abs().max().item() for p, m in zip(worn.parameters(), mean, strict=True))
        worn(batches(rank)[0][0])
    require(far < 1e-6, f"the average is {far} away")
    require(stepper.step(mse, batches(rank)[0]).applied, "did not go on")
    return f"average within {far:.1e}"


def micro_batches(rank: int) -> str:
    case = sharded()
    for x, y in batches(rank):
        window = Window(zip(x.split(4), y.split(4), strict=True))
        trains(case, [window])
        skips(case, poisoned(window))
    return close(by_one(whole_batches()), case.model)


def two_optimizers_one_loss(rank: int) -> str:
    torch.manual_seed(0)
    model = mlp(16, 32, 32, 4)
    fully_shard(model)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    rest = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, momentum=0.9)
    case = Case(model, {"first": first, "rest": rest}, mse, options={"clip_norm": 0.3})
    case.start()
    trains(case, batches(rank))
    return close(by_one(whole_batches(), 0.3), model)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def _two_by_two() -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def _whole_mlp(clip: float | None, many: int) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = 0.0
    for batch in whole_batches(many):
        optimizer.zero_grad()
        mse(model, batch).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, norm


def two_by_two_norm(rank: int) -> str:
    """FSDP2 × tensor parallel: the norm and the clipped update are those of one process."""
    model, _ = _two_by_two()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32", clip_norm=0.3)
    report = stepper.step(mse, batches(rank // 2)[0])
    whole, norm = _whole_mlp(0.3, 1)
    require(abs(report.grad_norm / norm - 1) < 1e-5, f"norm {report.grad_norm}, by one process {norm}")
    return f"norm {report.grad_norm:.5f}, by one process {norm:.5f}; {close(whole, model)}"


def two_by_two_skip(rank: int) -> str:
    model, _ = _two_by_two()
    case = Case(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    case.start()
    for x, y in batches(rank // 2):
        skips(case, (x * (NAN if rank // 2 else 1.0), y))
        trains(case, [(x, y)])
    return close(_whole_mlp(None, 3)[0], model)


def fsdp1_is_refused(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    before = [p.detach().clone() for p in model.parameters()]
    try:
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    except HalfstepError as refusal:
        require("fully_shard" in str(refusal) or "FSDP" in str(refusal), str(refusal))
        now = list(model.parameters())
        require(all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), "its shards changed")
        return f"refused: {str(refusal).splitlines()[0][:80]}"
    raise Broken("FSDP1 was not refused")


def pairs_of_ranks(rank: int) -> str:
    """Four ranks, two jobs of two: each pair trains its own model by its own process group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    torch.manual_seed(rank // 2)
    model = mlp()
    case = Case(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    case.start(process_group=mine)
    trains(case, batches(rank % 2)[: 2 + rank // 2])
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, model[0].weight.detach().clone())
    require(torch.equal(found[0], found[1]) and torch.equal(found[2], found[3]), "a pair differs")
    require(not torch.equal(found[0], found[2]), "the pairs are the same")
    return "2 and 3 steps, each pair the same"


def _on(many: int, function: Callable[..., str]) -> str:
    return on_ranks(many, function)[0]


ON_TWO = (
    as_one_process,
    norm_of_one_process,
    bad_batch_on_one_rank,
    window_abandoned_by_an_error,
    window_abandoned_by_discard,
    validation_between_steps,
    caught_error_in_forward,
    evaluating_with_the_average,
    micro_batches,
    two_optimizers_one_loss,
    fsdp1_is_refused,
)
for _function in ON_TWO:
    named(f"fsdp2_{_function.__name__}".replace("fsdp2_fsdp1", "fsdp1"), partial(_on, 2, _function), "sharded")
for _function in (two_by_two_norm, two_by_two_skip):
    named(f"fsdp2_tp_{_function.__name__.removeprefix('two_by_two_')}", partial(_on, 4, _function), "sharded")
named("ddp_pairs_of_ranks", partial(_on, 4, pairs_of_ranks), "sharded")
