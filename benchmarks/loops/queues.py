"""Queues, memory banks and replay buffers: tensors that a step writes a part of, and what points into them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    Seen,
    adamw,
    findings,
    limit,
    loop,
    mlp,
    named,
    normal,
    poisoned,
    promise,
    promise_in_three_calls,
    require,
    sgd,
    skips,
    trains,
    whole,
)

VIEWS = [(normal(8, 16, seed=i), normal(8, 16, seed=20 + i)) for i in range(6)]
LARGE = 100_000
"""Rows of 4 numbers: far more than the elements of a tensor that is copied in any case."""


def contrast(z: Tensor, bank: Tensor) -> Tensor:
    z = F.normalize(z.float(), dim=1)
    return torch.logsumexp(z @ bank.clone().T, dim=1).mean() - z.square().sum(1).mean()


class Queued(nn.Module):
    """A queue that is registered nowhere, and a pointer that is a Python number."""

    def __init__(self, rows: int = 32) -> None:
        super().__init__()
        self.net = mlp(16, 16, 4, norm=True)
        self.queue, self.at, self.full = F.normalize(torch.randn(rows, 4), dim=1), 0, False

    def push(self, keys: Tensor) -> None:
        rows = len(self.queue)
        self.queue[self.at : self.at + len(keys)] = keys
        self.at = (self.at + len(keys)) % rows
        self.full = self.full or self.at == 0

    def forward(self, batch: Any) -> Tensor:
        z = self.net(batch[0])
        loss = contrast(z, self.queue[:32])
        self.push(F.normalize(z.detach().float(), dim=1))
        return loss

    def seen(self) -> Seen:
        return Seen(lambda: {"queue": self.queue, "at": self.at, "full": self.full})


def queued_case(make: Callable[[], Any] = Queued) -> Callable[[], Case]:
    def build() -> Case:
        model = make()
        return Case(model, sgd(model, 0.05, momentum=0.9), lambda m, b: m(b), beside=[model.seen()])

    return build


@loop
def queue_and_pointer_as_plain_attributes() -> str:
    return promise(queued_case(), VIEWS)


@loop
def queue_and_pointer_in_three_calls() -> str:
    return promise_in_three_calls(queued_case(), VIEWS)


@loop
def queue_and_pointer_in_bf16() -> str:
    return promise(queued_case(), VIEWS, precision="bf16")


@loop
def large_queue_as_a_plain_attribute() -> str:
    return promise(queued_case(lambda: Queued(LARGE)), VIEWS)


class Late(Queued):
    """The queue is filled from the fourth call on, as SwAV's is from its second epoch on."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.calls = 0

    def push(self, keys: Tensor) -> None:
        self.calls += 1
        if self.calls > 3:
            super().push(keys)


@loop
def queue_filled_from_the_second_epoch_on() -> str:
    """Small enough for a copy before each step: the skip may be the very step that writes it first."""
    return promise(queued_case(lambda: Late(32)), VIEWS, at=(0, 3, 4))


@loop
def large_queue_filled_from_the_second_epoch_on() -> str:
    """Reported when first written; undone in every skip after that."""
    return promise(queued_case(lambda: Late(LARGE)), VIEWS, at=(0, 5))


@loop
def large_queue_whose_first_write_is_the_skipped_step() -> str:
    torch.manual_seed(0)
    case = queued_case(lambda: Late(LARGE))()
    stepper = case.start()
    trains(case, VIEWS[:3])
    require(not stepper.step(case.loss_fn, poisoned(VIEWS[0])).applied, "a bad batch was applied")
    require("rollback.first_write" in findings(stepper), f"not reported: {findings(stepper)}")
    require(case.model.at == 0 and case.model.calls == 3, "the pointer moved on a skip")
    with torch.no_grad():
        case.model.queue.copy_(F.normalize(normal(LARGE, 4), dim=1))
    trains(case, VIEWS[:2])
    skips(case, poisoned(VIEWS[0]))
    return limit(
        "that write is not rolled back, and the finding says so", "the first write was reported, the next skip undone"
    )


@loop
def queue_that_is_rebound_and_grows() -> str:
    """`self.bank = torch.cat([self.bank, z])[-48:]`: another tensor and another shape in each step."""

    class Growing(Queued):
        def push(self, keys: Tensor) -> None:
            self.queue = torch.cat([self.queue, keys])[-48:]

    return promise(queued_case(Growing), VIEWS)


@loop
def queue_of_the_criterion() -> str:
    """The queue belongs to the loss module, held by a closure, and is no buffer of it."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bank, self.at = F.normalize(torch.randn(32, 4), dim=1), 0

        def forward(self, z: Tensor) -> Tensor:
            loss = contrast(z, self.bank)
            self.bank[self.at] = F.normalize(z.detach().mean(0), dim=0)
            self.at += 1
            return loss

    def build() -> Case:
        model, criterion = mlp(16, 16, 4), Criterion()
        seen = Seen(lambda: {"bank": criterion.bank, "at": criterion.at})
        return Case(model, adamw(model), lambda m, b: criterion(m(b[0])), beside=[seen])

    return promise(build, VIEWS)


class Bank:
    """A plain object with a tensor and a pointer that is a tensor, too."""

    __slots__ = ("at", "rows")

    def __init__(self) -> None:
        self.rows, self.at = F.normalize(torch.randn(32, 4), dim=1), torch.zeros((), dtype=torch.long)

    def push(self, z: Tensor) -> None:
        self.rows.index_copy_(0, (self.at + torch.arange(len(z))) % 32, F.normalize(z.detach(), dim=1))
        self.at += len(z)


@loop
def bank_of_a_plain_object() -> str:
    def build() -> Case:
        model, bank = mlp(16, 16, 4), Bank()

        def loss(m: nn.Module, batch: Any) -> Tensor:
            z = m(batch[0])
            value = contrast(z, bank.rows)
            bank.push(z)
            return value

        return Case(model, adamw(model), loss, beside=[[bank.rows, bank.at]])

    return promise(build, VIEWS)


@loop
def bank_of_a_plain_object_in_three_calls() -> str:
    """The bank is filled inside `with stepper.forward()`."""

    def build() -> Case:
        model, bank = mlp(16, 16, 4), Bank()

        def loss(m: nn.Module, batch: Any) -> Tensor:
            z = m(batch[0])
            bank.push(z)
            return contrast(z, bank.rows)

        return Case(model, adamw(model), loss, beside=[[bank.rows, bank.at]])

    return promise_in_three_calls(build, VIEWS)


@loop
def pointer_of_a_plain_object() -> str:
    """The rows come back; the pointer is a Python number of a plain object, and does not."""

    class Counting:
        def __init__(self) -> None:
            self.rows, self.at = torch.zeros(32, 4), 0

    torch.manual_seed(0)
    model, bank = mlp(16, 16, 4), Counting()

    def loss(m: nn.Module, batch: Any) -> Tensor:
        z = m(batch[0])
        bank.rows[bank.at] = z.detach().mean(0)
        bank.at += 1
        return z.square().mean()

    case = Case(model, adamw(model), loss, beside=[bank.rows])
    case.start()
    trains(case, VIEWS[:2])
    skips(case, poisoned(VIEWS[0]))
    require(bank.at == 3, f"the pointer is {bank.at}")
    return limit("attributes of plain objects", "the rows bitwise as before, the pointer one further")


@loop
def pointer_of_a_plain_object_after_report_applied() -> str:
    """What the page advises: the loop moves its own pointer after `report.applied`."""
    torch.manual_seed(0)
    model, rows, at = mlp(16, 16, 4), torch.zeros(32, 4), 0

    def loss(m: nn.Module, batch: Any) -> Tensor:
        z = m(batch[0])
        rows[at] = z.detach().mean(0)
        return z.square().mean()

    case = Case(model, adamw(model), loss, beside=[rows])
    stepper = case.start()
    for i, batch in enumerate(VIEWS):
        if i % 2:
            skips(case, poisoned(batch))
        elif stepper.step(loss, batch).applied:
            at += 1
    require(at == 3 and not bool(rows[3:].any()) and bool(rows[:3].any(1).all()), f"{at} rows")
    return "3 rows of 3 applied steps, none of 3 skipped ones"


class ListMemory(nn.Module):
    """Tensors in a Python list and counts in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor] = []
        self.counts: dict[str, int] = {"seen": 0}
        self.kinds: set[int] = set()

    def forward(self, z: Tensor) -> Tensor:
        self.items.append(z.detach().mean(0))
        self.counts["seen"] += 1
        self.kinds.add(len(self.items))
        return z.square().mean() + torch.stack(self.items).mean()


@loop
def list_of_a_module_that_is_included() -> str:
    """An included module's lists, dicts and sets follow the step."""
    torch.manual_seed(0)
    model, memory = mlp(16, 16, 4), ListMemory()
    seen = Seen(lambda: {"items": list(memory.items), "counts": dict(memory.counts), "kinds": sorted(memory.kinds)})
    case = Case(model, adamw(model), lambda m, b: memory(m(b[0])), beside=[seen])
    case.start().include(memory)
    for batch in VIEWS:
        skips(case, poisoned(batch))
        trains(case, [batch])
    require(len(memory.items) == 6 and memory.counts["seen"] == 6, f"{len(memory.items)} items")
    return "6 skips left list, dict and set as they were"


@loop
def list_of_a_module_that_is_not_included() -> str:
    torch.manual_seed(0)
    model, memory = mlp(16, 16, 4), ListMemory()
    seen = Seen(lambda: {"items": list(memory.items), "counts": dict(memory.counts), "kinds": sorted(memory.kinds)})
    case = Case(model, adamw(model), lambda m, b: memory(m(b[0])), beside=[seen])
    case.start()
    for batch in VIEWS:
        skips(case, poisoned(batch))
        trains(case, [batch])
    require(len(memory.items) == 6 and memory.counts["seen"] == 6, f"{len(memory.items)} items")
    return "6 skips left list, dict and set as they were"


@loop
def long_list_of_a_module_that_is_not_included() -> str:
    """A list of more than 64 members: what a skipped step adds stays, and is reported."""
    torch.manual_seed(0)
    model, memory = mlp(16, 16, 4), ListMemory()
    memory.items += [torch.zeros(4)] * 64
    case = Case(model, adamw(model), lambda m, b: memory(m(b[0])))
    stepper = case.start()
    trains(case, [VIEWS[0]])
    skips(case, poisoned(VIEWS[1]))
    require([finding.id for finding in stepper.findings] == ["rollback.rebound"], "the list was not reported")
    return limit(
        "larger containers and arrays of a module", f"{len(memory.items) - 65} item of a skipped step is in it"
    )


@loop
def bank_of_tensors_in_a_deque_written_in_place() -> str:
    """A deque that never grows: its tensors are written in place, and are tensors like any other."""

    def build() -> Case:
        model = mlp(16, 16, 4)
        ring = deque([torch.zeros(8, 4) for _ in range(3)], maxlen=3)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            z = m(batch[0])
            for i, old in enumerate(ring):
                old.lerp_(z.detach(), 0.1 * (i + 1))
            return F.mse_loss(z, sum(ring))

        return Case(model, adamw(model), loss, beside=[Seen(lambda: {str(i): t for i, t in enumerate(ring)})])

    return promise(build, VIEWS)


@loop
def memory_bank_by_index() -> str:
    """Instance discrimination: a row for each image of the data set, of which a step writes eight."""

    def build() -> Case:
        model, bank = mlp(16, 16, 4), F.normalize(torch.randn(LARGE, 4), dim=1)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            x, index = batch
            z = F.normalize(m(x), dim=1)
            value = F.cross_entropy(z @ bank[:64].T.clone() / 0.07, index % 64)
            with torch.no_grad():
                bank[index] = F.normalize(0.5 * bank[index] + 0.5 * z, dim=1)
            return value

        return Case(model, adamw(model), loss, beside=[bank])

    return promise(build, [(x, whole(LARGE, 8, seed=i)) for i, (x, _) in enumerate(VIEWS)])


@loop
def replay_buffer_of_priorities() -> str:
    """Prioritised replay: the loss writes new priorities, which the next draw reads."""

    def build() -> Case:
        model, priorities = mlp(16, 16, 1), torch.ones(64)
        states, returns = normal(64, 16, seed=3), normal(64, 1, seed=4)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            index = torch.multinomial(priorities, 8)
            error = (m(states[index]) - returns[index] * batch[0]).squeeze(1)
            priorities[index] = error.detach().abs() + 1e-3
            return error.square().mean()

        return Case(model, adamw(model), loss, beside=[priorities])

    return promise(build, [(torch.tensor(1.0 + i),) for i in range(5)])


# -- every way to write a tensor ----------------------------------------------------------------------------------


def _out(bank: Tensor, z: Tensor) -> None:
    torch.add(bank, z, out=bank)


def _scatter(bank: Tensor, z: Tensor) -> None:
    bank.scatter_add_(0, torch.arange(8)[:, None].expand(8, 4), z)


def _index_add(bank: Tensor, z: Tensor) -> None:
    bank.index_add_(0, torch.tensor([3, 3, 1, 0, 0, 7, 6, 5]), z)


def _masked(bank: Tensor, z: Tensor) -> None:
    bank.masked_scatter_(~(z < 0), z)
    bank.masked_fill_(z < -0.5, 0.25)


def _view(bank: Tensor, z: Tensor) -> None:
    bank.view(-1)[::2].add_(z.reshape(-1)[::2])


def _strided(bank: Tensor, z: Tensor) -> None:
    torch.as_strided(bank, (4,), (5,)).mul_(0.5).add_(z[0])


def _alias(bank: Tensor, z: Tensor) -> None:
    bank.detach().T.chunk(2)[1].copy_(z.T[2:])


def _set_item(bank: Tensor, z: Tensor) -> None:
    bank[~(z.abs() < 0.3)] = 0.75


def _diagonal(bank: Tensor, z: Tensor) -> None:
    bank.fill_diagonal_(float(z.mean().nan_to_num()))


def _sorted(bank: Tensor, z: Tensor) -> None:
    torch.sort(z, dim=0, out=(bank, torch.empty(0, dtype=torch.long)))


def _ema_by_addcmul(bank: Tensor, z: Tensor) -> None:
    bank.mul_(0.9).addcmul_(z, z, value=0.1).clamp_(max=1.0)


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], None], ...]] = {
    "by_index": (_scatter, _index_add, _masked, _set_item),
    "through_views": (_view, _strided, _alias, _diagonal),
    "as_a_whole": (_out, _sorted, _ema_by_addcmul),
}


def _written(writes: tuple[Callable[[Tensor, Tensor], None], ...]) -> str:
    def build(write: Callable[[Tensor, Tensor], None]) -> Case:
        model, bank = mlp(16, 16, 4), torch.zeros(8, 4)

        def loss(m: nn.Module, batch: Any) -> Tensor:
            z = m(batch[0])
            write(bank, z.detach())
            return (z - bank.clone()).square().mean()

        return Case(model, adamw(model), loss, beside=[bank])

    for write in writes:
        said = promise(partial(build, write), VIEWS)
    return f"{len(writes)} kinds of write: {said}"


for _name, _writes in WRITES.items():
    named(f"outside_tensor_written_{_name}", partial(_written, _writes), "queues")
