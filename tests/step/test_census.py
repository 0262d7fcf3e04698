"""What a step watches is read in a few passes; nothing that changes between two steps may escape them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.observe.precision_check import ObservationCost
from halfstep.step.census import Census
from halfstep.step.memory import CopiedTensor, MemoryCopies, copy_tensors
from halfstep.step.report import BUFFER_NOT_FINITE

MANY, FEW = 40, 2
KINDS = (torch.float32, torch.float16, torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float64)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Any:
    """A process that has compiled anything observes no step again."""
    from torch._dynamo.utils import counters

    counters.clear()


class Buffered(nn.Module):
    """A model with buffers of all formats and odd sizes; `act` is run on it in each forward pass."""

    def __init__(self, many: int, act: Any = None) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 1), act
        for number in range(many):
            kind = KINDS[number % len(KINDS)]
            self.register_buffer(f"b{number}", torch.arange(1 + number % 5).to(kind))
        self.register_buffer("level", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.act is not None:
            self.act(self)
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


def call(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def make(model: nn.Module, **options: Any) -> halfstep.Stepper:
    return halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", **options)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("many", [FEW, MANY])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_buffer_that_gets_infinite_memory_through_data_is_skipped_and_restored(many: int, after: int) -> None:
    model = Buffered(many)
    stepper = make(model)
    for _ in range(after):
        assert stepper.step(call, torch.ones(2, 4)).applied
    before, level = buffers(model), model.level

    def give_infinite_memory(module: Any) -> None:
        module.level.data = torch.full((3,), float("inf"))

    model.act = give_infinite_memory
    report = stepper.step(call, torch.ones(2, 4))
    assert report.reason == BUFFER_NOT_FINITE
    assert model.level is level
    assert is_same(buffers(model), before)
    model.act = None
    assert stepper.step(call, torch.ones(2, 4)).applied


@pytest.mark.parametrize("how", ["resize", "set", "write", "rebind", "strided"])
def test_a_buffer_that_becomes_infinite_in_any_way_is_skipped_and_restored(how: str) -> None:
    model = Buffered(MANY)
    if how == "strided":
        model.level = torch.ones(6)[::2]
    stepper = make(model)
    for _ in range(3):
        assert stepper.step(call, torch.ones(2, 4)).applied
    before = buffers(model)

    def act(module: Any) -> None:
        infinite = torch.full((3,), float("inf"))
        if how == "resize":
            module.level.resize_(5)[4] = float("nan")
        elif how == "set":
            module.level.set_(infinite)
        elif how == "rebind":
            module.level = module.level.copy_(infinite)
        else:
            module.level.copy_(infinite)

    model.act = act
    assert stepper.step(call, torch.ones(2, 4)).reason == BUFFER_NOT_FINITE
    assert is_same(buffers(model), before)


def test_many_buffers_of_all_formats_are_restored_to_the_bit() -> None:
    model = Buffered(MANY)
    stepper, guardian_buffers = make(model), {}
    for _ in range(4):
        assert stepper.step(call, torch.ones(2, 4)).applied
    before = buffers(model)

    def write_all(module: Any) -> None:
        for buffer in module.buffers():
            buffer.copy_(torch.ones_like(buffer) if buffer.dtype is torch.bool else buffer + 1)
        guardian_buffers.update({n: b for n, b in stepper.buffers_to_keep().items() if b is not None})

    model.act = write_all
    assert not stepper.step(lambda m, x: m(x) * float("nan"), torch.ones(2, 4)).applied
    assert is_same(buffers(model), before)
    # A guard that keeps a copy of the run inside a step gets the buffers from before it.
    assert is_same({name: buffer.clone() for name, buffer in guardian_buffers.items()}, before)


def test_copies_in_one_memory_keep_their_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 2, (1 + number % 7,), generator=generator).to(KINDS[number % len(KINDS)])
        for number in range(50)
    ]
    entries: list[CopiedTensor] = copy_tensors([(str(number), tensor) for number, tensor in enumerate(tensors)])
    copies = MemoryCopies(entries)
    for turn in range(4):
        for tensor in tensors:
            tensor.copy_(tensor + turn if tensor.dtype is not torch.bool else ~tensor)
        copies.renew()
        held = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        assert all(torch.equal(entry.before(), then) for entry, then in zip(entries, held, strict=True))
        copies.write_back()
        assert all(torch.equal(tensor, then) for tensor, then in zip(tensors, held, strict=True))


def test_each_change_of_modules_and_parameters_gives_a_version() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    census = Census(model, [optimizer])

    def versions() -> tuple[int, int]:
        census.update()
        return census.members, census.kinds

    first: Any = model[0]
    seen = [versions(), versions()]
    assert seen[0] == seen[1]
    changes: list[Any] = [
        lambda: model.append(nn.ReLU()),
        lambda: setattr(first, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: first._parameters.__setitem__("other", first._parameters.pop("bias")),  # renamed, in the same place
        lambda: optimizer.add_param_group({"params": [first.weight]}),
        lambda: first.weight.requires_grad_(False),
        lambda: setattr(first.weight, "data", first.weight.data.double()),
        lambda: model.__delitem__(2),
    ]
    for change in changes:
        change()
        seen.append(versions())
        assert seen[-1] != seen[-2]
        assert versions() == seen[-1]
    assert [b[0] > a[0] for a, b in itertools.pairwise(seen[1:])] == [True, True, True, True, False, False, True]


def test_a_parameter_renamed_in_a_step_that_is_skipped_has_its_name_again() -> None:
    model = Buffered(FEW)
    stepper = make(model)
    assert stepper.step(call, torch.ones(2, 4)).applied

    def rename(module: Any) -> None:
        module.linear._parameters["other"] = module.linear._parameters.pop("bias")
        module._buffers["last"] = module._buffers.pop("level")

    def loss(m: Any, x: Tensor) -> Tensor:
        found = m(x) * float("nan")
        rename(m)
        return found

    names = list(model.state_dict())
    assert not stepper.step(loss, torch.ones(2, 4)).applied
    assert sorted(model.state_dict()) == sorted(names)


TEACHER: Any = None


def distil(model: nn.Module, batch: Tensor) -> Any:
    return model(batch) if TEACHER is None else model(batch) + 0.0 * TEACHER(batch).sum()


def test_a_global_that_gets_a_module_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, teacher = Buffered(FEW), nn.BatchNorm1d(4)
    stepper = make(model)
    for _ in range(3):
        assert stepper.step(distil, torch.ones(2, 4)).applied
    monkeypatch.setitem(globals(), "TEACHER", teacher)
    before = buffers(teacher)
    assert not stepper.step(distil, torch.full((2, 4), float("nan"))).applied
    assert is_same(buffers(teacher), before)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_closure_that_gets_a_module_is_noticed(fresh: bool) -> None:
    model, teacher = Buffered(FEW), nn.BatchNorm1d(4)
    stepper, held = make(model), nn.Module()
    extra: Any = None

    def make_loss() -> Any:
        def loss(m: nn.Module, x: Tensor) -> Any:
            return m(x) if extra is None else m(x) + 0.0 * extra(x).sum()

        return loss

    loss = make_loss()
    for _ in range(3):
        assert stepper.step(make_loss() if fresh else loss, torch.ones(2, 4)).applied
    extra, before = teacher, buffers(teacher)
    assert not stepper.step(make_loss() if fresh else loss, torch.full((2, 4), float("nan"))).applied
    assert is_same(buffers(teacher), before)
    assert not list(held.buffers())


@pytest.mark.parametrize("drops", [False, True])
def test_a_skipped_step_has_the_random_states_that_it_started_with(drops: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 if drops else 0.0) if drops else nn.Identity())
    stepper = make(model)
    for _ in range(3):
        assert stepper.step(lambda m, x: m(x).mean(), torch.ones(2, 4)).applied
        torch.rand(3)  # the loop draws, too
    state = torch.get_rng_state()
    assert not stepper.step(lambda m, x: m(x).mean() * float("nan"), torch.ones(2, 4)).applied
    assert stepper.attempt is not None
    assert torch.equal(stepper.attempt.generators[0], state)
    assert torch.equal(torch.get_rng_state(), state) is not drops


def test_a_step_that_draws_is_recorded_from_its_next_observation_on() -> None:
    stepper = make(nn.Linear(4, 1))
    draws = False

    def loss(m: nn.Module, x: Tensor) -> Any:
        return m(x + torch.rand_like(x)).mean() if draws else m(x).mean()

    for _ in range(3):
        stepper.step(loss, torch.ones(2, 4))
    assert stepper.attempt is not None
    assert not stepper.attempt.generators
    draws = True
    stepper.counts.applied = 1000
    for _ in range(2):
        state = torch.get_rng_state()
        stepper.step(loss, torch.ones(2, 4))
    assert torch.equal(stepper.attempt.generators[0], state)


@pytest.mark.parametrize(
    ("first", "plain", "high"), [(2.0, 0.1, True), (2.0, 0.5, False), (0.2, 0.01, False), (0.0, 0.0, False)]
)
def test_an_observation_that_costs_much_is_not_repeated_at_once(
    first: float, plain: float, high: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("halfstep.observe.precision_check.time.perf_counter", lambda: now)
    cost = ObservationCost()
    for took, observed in ((first, True), (plain, False), (3 * plain, False)):
        cost.begin()
        now += took
        cost.end(observed=observed)
    assert cost.is_high is high


@pytest.mark.parametrize("high", [False, True])
def test_the_tenth_update_is_observed_unless_that_costs_much(high: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObservationCost, "is_high", property(lambda _: high))
    stepper = make(nn.Linear(4, 1))
    seen = []
    for _ in range(102):
        stepper.step(lambda m, x: m(x).mean(), torch.ones(2, 4))
        seen.append(id(stepper.observed))
    changed = [number for number, (a, b) in enumerate(itertools.pairwise(seen), 1) if a != b]
    assert changed == ([100] if high else [10, 100])


def test_a_large_number_of_random_changes_is_restored() -> None:
    """Buffers are replaced, resized and written at random; each skip restores them, however often they change."""
    chosen = random.Random(0)
    model = Buffered(MANY)
    stepper = make(model)
    for turn in range(60):
        name = chosen.choice([n for n, _ in model.named_buffers()])
        buffer: Any = getattr(model, name)
        if chosen.random() < 0.3:
            setattr(model, name, torch.zeros(chosen.randrange(1, 9)).to(buffer.dtype))
        bad = chosen.random() < 0.5
        before = buffers(model)

        def loss(m: Any, x: Tensor, name: str = name, bad: bool = bad) -> Any:
            held = getattr(m, name)
            held.copy_(torch.ones_like(held))
            return m(x) * (float("nan") if bad else 1.0)

        report = stepper.step(loss, torch.ones(2, 4))
        assert report.applied is not bad, turn
        if bad:
            assert is_same(buffers(model), before), turn
