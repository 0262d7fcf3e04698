"""DistributedDataParallel on two ranks: the same as one process with the whole batch, and nobody hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.loops.harness import (
    NAN,
    Broken,
    Case,
    Counted,
    adamw,
    differences,
    flat,
    mlp,
    mse,
    named,
    normal,
    require,
    sgd,
    skips,
    trains,
)
from benchmarks.loops.ranks import on_ranks
from halfstep import Ema, Stepper, Window

SOON = 20.0
"""Seconds after which a rank that waits for another one has hung: the group's own timeout is 40."""


def same_on_all(case: Case) -> None:
    """Every rank holds the same weights."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [p.detach().clone() for p in case.model.parameters()])
    equal = all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))
    require(equal, "ranks hold different weights")


def batches(rank: int, many: int = 3, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    """This rank's half of the batches that `whole_batches` gives."""
    return [(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]) for x, y in whole_batches(many, n)]


def whole_batches(many: int = 3, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(normal(2 * n, 16, seed=i), normal(2 * n, 4, seed=50 + i)) for i in range(many)]


def case_of(norm: bool = False, **options: Any) -> Case:
    torch.manual_seed(0)
    model = mlp(norm=norm)
    return Case(model, sgd(model, momentum=0.9), mse, options=options)


def by_one(loss: Callable[..., Any], whole: list[Any], clip: float | None = None) -> nn.Module:
    """The same training by hand, by one process, over whole batches."""
    case = case_of()
    for batch in whole:
        case.optimizer.zero_grad()
        result = loss(case.model, batch)
        (result.sum / result.count if isinstance(result, Counted) else result).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(case.model.parameters(), clip)
        case.optimizer.step()
    return case.model


def close(one: nn.Module, other: nn.Module) -> float:
    far = max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))
    require(far < 1e-5, f"{far:.2e} away from one process with the whole batch")
    return far


def counted(m: nn.Module, b: Any) -> Counted:
    return Counted((m(b[0]) - b[1]).square().sum(), b[1].numel())


# -- each runs on a rank ------------------------------------------------------------------------------------------


def as_one_process(rank: int) -> str:
    case = case_of(clip_norm=0.5)
    case.start()
    trains(case, batches(rank))
    same_on_all(case)
    return f"{close(by_one(mse, whole_batches(), 0.5), case.model):.1e} from one process"


def uneven_counts(rank: int) -> str:
    """Rank 0 has 3 rows, rank 1 has 13; the update is that of 16."""
    case = case_of(clip_norm=0.5)
    case.start()
    cut = [(x[:3], y[:3]) if rank == 0 else (x[3:], y[3:]) for x, y in whole_batches()]
    for batch in cut:
        require(case.stepper.step(counted, batch).applied, "not applied")
    same_on_all(case)
    return f"{close(by_one(counted, whole_batches(), 0.5), case.model):.1e} from one process"


def uneven_windows(rank: int) -> str:
    """Micro-batches of unequal counts, also across ranks."""
    case = case_of()
    case.start()
    for x, y in whole_batches():
        mine = (x[:5], y[:5]) if rank == 0 else (x[5:], y[5:])
        sizes = [4, 1] if rank == 0 else [2, 9]
        window = Window(zip(mine[0].split(sizes), mine[1].split(sizes), strict=True))
        require(case.stepper.step(counted, window).applied, "not applied")
    same_on_all(case)
    return f"{close(by_one(counted, whole_batches()), case.model):.1e} from one process"


def bad_batch_on_one_rank(rank: int) -> str:
    """NaN on rank 1 only: both skip, and BatchNorm of both is as before."""
    case = case_of(norm=True)
    case.start()
    for batch in batches(rank):
        skips(case, (batch[0] * (NAN if rank == 1 else 1.0), batch[1]))
        trains(case, [batch])
    require(case.stepper.counts.applied == 3, f"{case.stepper.counts}")
    same_on_all(case)
    return "3 skips on both ranks, bitwise undone"


def bad_buffer_on_one_rank(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    case = Case(model, sgd(model), lambda m, b: m(b[0]).square().mean())
    case.start()
    trains(case, [(normal(8, 4),)])
    report = skips(case, (normal(8, 4) * (1e25 if rank == 1 else 1.0),))
    trains(case, [(normal(8, 4),)])
    return f"both skipped: {report.reason}"


def method_of_the_model(rank: int) -> str:
    """The loss function calls `model.encode`, not forward: gradients synchronize all the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def encode(self, x: Tensor) -> Tensor:
            return self.net(x)

    torch.manual_seed(0)
    model = Model()
    case = Case(model, sgd(model, momentum=0.9), lambda m, b: (m.encode(b[0]) - b[1]).square().mean())
    case.start()
    trains(case, batches(rank))
    same_on_all(case)
    return f"{close(by_one(mse, whole_batches()), model):.1e} from one process"


def unused_parameters(rank: int) -> str:
    """A branch that only rank 1 uses, with `ddp={"find_unused_parameters": True}`."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"always": nn.Linear(16, 4), "sometimes": nn.Linear(16, 4)})

    def loss(m: Any, b: Any) -> Tensor:
        out = m["always"](b[0])
        return ((out + m["sometimes"](b[0]) if b[2] else out) - b[1]).square().mean()

    case = Case(model, sgd(model), loss)
    case.start(ddp={"find_unused_parameters": True})
    trains(case, [(*batch, rank == 1) for batch in batches(rank)])
    same_on_all(case)
    return "a branch used on one rank: same weights on both"


def unused_everywhere(rank: int) -> str:
    """A parameter that no rank reaches keeps its value and gets no optimizer state."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"always": nn.Linear(16, 4), "never": nn.Linear(16, 4)})
    case = Case(model, adamw(model), lambda m, b: mse(m["always"], b))
    before = model["never"].weight.detach().clone()
    case.start(ddp={"find_unused_parameters": True})
    trains(case, batches(rank))
    require(torch.equal(before, model["never"].weight), "an unused parameter moved")
    return "the unused parameter did not move"


def exception_on_one_rank(rank: int, norm: bool = False) -> str:
    """Rank 1 cannot read a sample. Rank 0 is told and does not wait; both go on."""
    case = case_of(norm=norm)
    case.start()
    mine = batches(rank)
    trains(case, mine[:1])
    before = case.state()

    def loss(m: nn.Module, b: Any) -> Tensor:
        if rank == 1:
            raise ValueError("unreadable sample")
        return mse(m, b)

    begun = time.monotonic()
    try:
        case.stepper.step(loss, mine[1])
        raise Broken("nothing was raised on this rank")
    except Broken:
        raise
    except Exception as error:
        said = type(error).__name__
    took = time.monotonic() - begun
    require(took < SOON, f"waited {took:.0f} s, then {said}")
    require(said == ("ValueError" if rank == 1 else "RankFailed"), f"rank {rank} got {said}")
    differ = differences(before, case.state())
    require(not differ, f"after the error: {differ[:3]}")
    trains(case, mine[1:])
    same_on_all(case)
    return f"rank {rank}: {said}, as before, and both went on"


def exception_in_the_last_micro_batch(rank: int) -> str:
    case = case_of(norm=True)
    case.start()
    mine = batches(rank)
    trains(case, mine[:1])
    before = case.state()

    def loss(m: nn.Module, b: Any) -> Tensor:
        if b is None:
            raise ValueError("unreadable sample")
        return mse(m, b)

    try:
        case.stepper.step(loss, Window([mine[1], None if rank == 0 else mine[2]]))
        raise Broken("nothing was raised on this rank")
    except Broken:
        raise
    except Exception as error:
        said = type(error).__name__
    require(said == ("ValueError" if rank == 0 else "RankFailed"), f"rank {rank} got {said}")
    require(not differences(before, case.state()), "not as before")
    trains(case, mine[1:])
    same_on_all(case)
    return f"rank {rank}: {said}, and both went on"


def a_rank_without_a_batch(rank: int) -> str:
    """The loader of rank 1 is shorter: `step(None)`. The update is that of rank 0's batch alone."""
    case = case_of()
    case.start()
    mine = batches(rank)
    trains(case, mine[:2])
    report = case.stepper.step(None) if rank == 1 else case.stepper.step(mse, mine[2])
    require(report.applied, str(report))
    same_on_all(case)
    whole = whole_batches()
    alone = [*whole[:2], (whole[2][0][:8], whole[2][1][:8])]
    return f"{close(by_one(mse, alone), case.model):.1e} from one process"


def a_rank_without_a_batch_counted(rank: int) -> str:
    case = case_of(norm=False, clip_norm=0.5)
    case.start()
    mine = batches(rank)
    for batch in mine[:2]:
        case.stepper.step(counted, batch)
    report = case.stepper.step(None) if rank == 0 else case.stepper.step(counted, mine[2])
    require(report.applied, str(report))
    same_on_all(case)
    whole = whole_batches()
    alone = [*whole[:2], (whole[2][0][8:], whole[2][1][8:])]
    return f"{close(by_one(counted, alone, 0.5), case.model):.1e} from one process"


def no_rank_has_a_batch(rank: int) -> str:
    case = case_of()
    case.start()
    trains(case, batches(rank)[:1])
    before = case.state()
    said = case.stepper.step(None)
    require(said is None, f"step(None) gave {said}, where its docstring says None once no rank has a batch")
    require(not differences(before, case.state()), "something moved")
    trains(case, batches(rank))
    return "None, and nothing moved"


def micro_batches_differ_in_number(rank: int) -> str:
    """Rank 0 has 3 micro-batches, rank 1 has 1, all counted: the update is that of all rows."""
    case = case_of()
    case.start()
    for x, y in whole_batches():
        mine = (x[:8], y[:8]) if rank == 0 else (x[8:], y[8:])
        sizes = [3, 3, 2] if rank == 0 else [8]
        window = Window(zip(mine[0].split(sizes), mine[1].split(sizes), strict=True))
        require(case.stepper.step(counted, window).applied, "not applied")
    same_on_all(case)
    return f"{close(by_one(counted, whole_batches()), case.model):.1e} from one process"


def ranks_begin_with_different_weights(rank: int) -> str:
    """Another seed on every rank: rank 0's weights are everybody's, as under DDP."""
    torch.manual_seed(rank)
    model = mlp()
    case = Case(model, sgd(model), mse)
    case.start()
    trains(case, batches(rank))
    same_on_all(case)
    return "same weights on both after 3 steps"


def ema_and_schedule(rank: int) -> str:
    torch.manual_seed(0)
    model = mlp(norm=True)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    case = Case(model, optimizer, mse, schedule=schedule, options={"ema": Ema(model, 0.9)})
    case.start()
    for batch in batches(rank):
        trains(case, [batch])
        skips(case, (batch[0] * (NAN if rank == 0 else 1.0), batch[1]))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, [v for _, v in flat(case.options["ema"].averages())])
    require(all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "averages differ")
    return "averages and schedules moved alike"


def disjoint_groups(rank: int) -> str:
    """Two jobs in one world: each rank a group of its own, its own model, its own number of steps."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    case = case_of()
    torch.manual_seed(rank)
    case.model = mlp(norm=True)
    case.optimizer = sgd(case.model)
    case.start(process_group=groups[rank])
    trains(case, batches(rank)[: 1 + rank])
    skips(case, (batches(rank)[0][0] * NAN, batches(rank)[0][1]))
    dist.barrier()
    return f"{1 + rank} steps in a group of its own"


def gan_in_turns(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": mlp(16, 16), "d": mlp(16, 1)})
    case = Case(model, {name: sgd(model[name]) for name in model}, None)  # type: ignore[arg-type]
    stepper = case.start()
    for x, _ in batches(rank):
        d = stepper.step(lambda m, x: m["d"](m["g"](x).detach()).square().mean(), x, only="d")
        g = stepper.step(lambda m, x: (m["d"](m["g"](x)) - 1).square().mean(), x, only="g")
        require(d.applied and g.applied, f"{d}; {g}")
    same_on_all(case)
    return "d and g in turns, same weights on both"


def wrapped_by_the_user(rank: int) -> str:
    """One's own DistributedDataParallel, in the three-call form."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = sgd(model, momentum=0.9)
    stepper = Stepper(model, optimizer, precision="fp32")
    for batch in batches(rank):
        for i, micro in enumerate(zip(batch[0].split(4), batch[1].split(4), strict=True)):
            with stepper.forward(last=i == 1):
                loss = mse(model, micro)
            stepper.backward(loss)
        require(stepper.apply().applied, "not applied")
    return f"{close(by_one(mse, whole_batches()), model.module):.1e} from one process"


def fp16_overflow_on_one_rank(rank: int) -> str:
    """Both ranks skip, both lower the scale."""
    case = case_of()
    case.loss_fn = lambda m, b: mse(m, b) * (1e4 if rank == 0 else 1.0)
    case.start(precision="fp16")
    report = skips(case, batches(rank)[0], ("gradient_overflow",))
    scales: list[Any] = [None, None]
    dist.all_gather_object(scales, case.stepper.loss_scales)
    require(scales[0] == scales[1], f"scales {scales}")
    return f"both skipped ({report.reason}), both at {scales[0]}"


def _on_two(function: Callable[..., str], *arguments: Any) -> str:
    return on_ranks(2, function, *arguments)[0]


LOOPS_ON_RANKS: tuple[Callable[..., str], ...] = (
    as_one_process,
    uneven_counts,
    uneven_windows,
    bad_batch_on_one_rank,
    bad_buffer_on_one_rank,
    method_of_the_model,
    unused_parameters,
    unused_everywhere,
    a_rank_without_a_batch,
    a_rank_without_a_batch_counted,
    no_rank_has_a_batch,
    micro_batches_differ_in_number,
    ranks_begin_with_different_weights,
    ema_and_schedule,
    disjoint_groups,
    gan_in_turns,
    wrapped_by_the_user,
    fp16_overflow_on_one_rank,
    exception_on_one_rank,
    exception_in_the_last_micro_batch,
)
for _function in LOOPS_ON_RANKS:
    named(f"ddp_{_function.__name__}", partial(_on_two, _function), "data_parallel")
named("ddp_exception_on_one_rank_with_buffers", partial(_on_two, exception_on_one_rank, True), "data_parallel")
