"""A skip restores what the step wrote, whoever holds it: situations in which a search for holders found nothing."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.step.unseen_writes import UnseenWriteDetector
from tests.support.digest import digest_of

BAD = float("nan")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forget what other tests have compiled: a process that has compiled something is observed once only."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        dynamo.counters.clear()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sgd(model: nn.Module, **options: Any) -> Stepper:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Stepper(model, torch.optim.SGD(trained, 0.1), **{"precision": "fp32", **options})


def called(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def in_contexts(stepper: Stepper, loss_fn: Callable[..., Tensor], x: Tensor) -> Any:
    with stepper.forward():
        loss = loss_fn(stepper.model, x)
    stepper.backward(loss)
    return stepper.apply()


def ids(stepper: Stepper) -> list[str]:
    return [finding.id for finding in stepper.findings]


@torch.no_grad()
def pull(teacher: nn.Module, student: nn.Module, how: str = "lerp_") -> None:
    for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
        if how == "lerp_":
            own.lerp_(other, 0.1)
        else:
            own.data.mul_(0.9).add_(other.data, alpha=0.1)


# -- late writes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lerp_", ".data"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_teacher_that_is_moved_from_a_later_step_on(how: str, first: int) -> None:
    student, teacher, x = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False), torch.randn(4, 8)
    step = [0]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if step[0] >= first:
            pull(teacher, model, how)
        return (model(x) - teacher(x) - 1).square().mean()

    stepper = sgd(student)
    for step[0] in range(5):
        assert stepper.step(loss_fn, x).applied
    before = digest_of(teacher.state_dict())
    for _ in range(3):
        assert not stepper.step(loss_fn, x * BAD).applied
    assert digest_of(teacher.state_dict()) == before
    assert ids(stepper) == ([] if first == 0 else ["rollback.first_write"])


@pytest.mark.parametrize("columns", [12_000, 40_000])
def test_a_large_queue_that_data_fills_after_a_warm_up_loses_no_column(columns: int) -> None:
    """The larger one is not copied before each step until it is seen being written."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.on = nn.Linear(8, 16), False
            self.register_buffer("queue", torch.zeros(16, columns))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            encoded = self.encoder(x)
            if self.on:
                start = int(self.place)
                self.queue.data[:, start : start + len(x)] = encoded.detach().T
                self.place[0] = start + len(x)
            return encoded

    model, x = Queue(), torch.randn(12, 8)
    stepper = sgd(model)
    for number in range(8):
        model.on = number >= 3
        assert stepper.step(called, x).applied
    filled = model.queue.clone()
    assert int((filled != 0).any(0).sum()) == 60
    assert not stepper.step(called, x * BAD).applied
    assert torch.equal(model.queue, filled)
    assert int(model.place) == 60


@pytest.mark.wording
def test_a_first_write_in_the_skipped_step_itself_is_reported_by_name() -> None:
    model = nn.Linear(300, 300)
    stepper, x = sgd(model), torch.randn(4, 300)
    stepper.step(called, x)

    def clamps(model: nn.Module, x: Tensor) -> Tensor:
        model.weight.data.clamp_(-1e-3, 1e-3)
        return called(model, x)

    assert not stepper.step(clamps, x * BAD).applied
    (finding,) = stepper.findings
    assert (finding.id, finding.severity) == ("rollback.first_write", "warning")
    assert "wrote weight " in finding.evidence
    before = model.weight.detach().clone()
    model.weight.data.mul_(3)
    moved = model.weight.detach().clone()
    assert not torch.equal(before, moved)
    assert not stepper.step(clamps, x * BAD).applied
    assert torch.equal(model.weight, moved)


@pytest.mark.wording
def test_a_tensor_in_many_parts_is_noticed_within_the_stated_number_of_steps() -> None:
    """A bank of 8 MiB of which each step writes one row through `.data`: most checksums see another part."""

    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.row = nn.Linear(8, 8), -1
            self.register_buffer("bank", torch.zeros(2**18, 8))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            if self.row >= 0:
                self.bank.data[self.row] = out.detach()[0]
            return out

    model, x = Bank(), torch.randn(4, 8)
    stepper = sgd(model)
    for _ in range(stepper.steps_to_check):
        assert stepper.step(called, x).applied
    assert stepper.steps_to_check > 8
    for number in range(stepper.steps_to_check):
        model.row = number * 9973 % 2**18
        assert stepper.step(called, x).applied
    assert any("wrote bank " in finding.evidence for finding in stepper.findings)
    model.row = 5
    before = model.bank.clone()
    assert not stepper.step(called, x * BAD).applied
    assert torch.equal(model.bank, before)


def test_a_cpu_checks_a_share_of_a_large_model_in_each_step() -> None:
    """So the number of steps until all memory was checked does not grow with the model."""
    steps = []
    for megabytes in (1, 64, 256):
        unseen = UnseenWriteDetector()
        unseen.follow([("weight", torch.zeros(megabytes * 2**18))])
        steps.append(unseen.steps)
    assert steps == [9, 129, 129]


def test_a_teacher_that_the_loop_moves_between_steps_is_not_reported() -> None:
    """`.data` outside of the step is the loop's own affair, and is never undone."""
    student = nn.Linear(8, 8)
    teacher = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)), nn.Linear(300, 8)).requires_grad_(False)
    stepper, x = sgd(student), torch.randn(4, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - teacher(x.repeat(1, 38)[:, :300])).square().mean()

    for _ in range(3 * stepper.steps_to_check + 12):
        stepper.step(loss_fn, x)
        for parameter in teacher.parameters():
            parameter.data.mul_(0.99)
    before = digest_of(teacher.state_dict())
    assert not stepper.step(loss_fn, x * BAD).applied
    assert digest_of(teacher.state_dict()) == before
    assert ids(stepper) == []


# -- holders -------------------------------------------------------------------------------------------------------


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, out: Tensor) -> Tensor:
        loss = (out.float() - self.centre).square().mean()
        self.centre.mul_(0.9).add_(out.detach().float().mean(0), alpha=0.1)
        return loss


@pytest.mark.parametrize("run", [Stepper.step, in_contexts])
def test_a_criterion_next_to_the_model_in_both_forms(run: Callable[..., Any]) -> None:
    model, criterion, x = nn.Linear(16, 4), Centre(), torch.randn(8, 16)
    stepper = sgd(model)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return criterion(model(x))

    reasons = [run(stepper, loss_fn, batch).reason for batch in (x, x, x * BAD, x, x)]
    assert reasons == [None, None, "loss_not_finite", None, None]
    assert criterion.centre.isfinite().all()


class Student(nn.Module):
    """Holds its teacher outside of its children, to keep it out of parameters() and state_dict()."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, teacher = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)
        self.how = how
        if how == "list":
            self.teachers = [teacher]
        elif how == "tuple":
            self._teacher = (teacher,)
        elif how == "lambda":
            self.get = lambda: teacher
        else:
            object.__setattr__(self, "hidden", teacher)

    @property
    def teacher(self) -> nn.Module:
        found = {"list": lambda: self.teachers[0], "tuple": lambda: self._teacher[0], "lambda": lambda: self.get()}
        return found.get(self.how, lambda: self.hidden)()

    def forward(self, x: Tensor) -> Tensor:
        pull(self.teacher, self.net)
        return self.net(x) - self.teacher(x) - 1


@pytest.mark.parametrize("how", ["list", "tuple", "lambda", "object.__setattr__"])
@pytest.mark.parametrize("good_steps", [0, 1, 3])
@pytest.mark.parametrize("run", [Stepper.step, in_contexts])
def test_a_teacher_that_the_model_hides(how: str, good_steps: int, run: Callable[..., Any]) -> None:
    model, x = Student(how), torch.randn(4, 8)
    stepper = sgd(model)
    for _ in range(good_steps):
        assert run(stepper, called, x).applied
    before = digest_of(model.teacher.state_dict())
    assert not run(stepper, called, x * BAD).applied
    assert digest_of(model.teacher.state_dict()) == before
    assert stepper.findings == []


@dataclasses.dataclass(slots=True)
class Slots:
    teacher: Any


class Box:
    def __init__(self, teacher: Any = None) -> None:
        self.teacher = teacher


class Config:
    teacher: Any = None


NETS = types.ModuleType("nets")


def _slots(teacher: nn.Module) -> tuple[Callable[[], Any], Callable[[], object]]:
    box = Slots(teacher)
    return lambda: box.teacher, lambda: None


def _module(teacher: nn.Module) -> tuple[Callable[[], Any], Callable[[], object]]:
    NETS.teacher = teacher  # type: ignore[attr-defined]
    return lambda: NETS.teacher, lambda: None  # type: ignore[attr-defined]


def _class(teacher: nn.Module) -> tuple[Callable[[], Any], Callable[[], object]]:
    Config.teacher = teacher
    return lambda: Config.teacher, lambda: None


def _weakref(teacher: nn.Module) -> tuple[Callable[[], Any], Callable[[], object]]:
    return weakref.ref(teacher), lambda: None


def _later(teacher: nn.Module) -> tuple[Callable[[], Any], Callable[[], object]]:
    box = Box()
    return lambda: box.teacher, lambda: setattr(box, "teacher", teacher)


@pytest.mark.parametrize("hold", [_slots, _module, _class, _weakref, _later])
def test_a_teacher_that_no_search_finds(hold: Any) -> None:
    model, teacher, x = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False), torch.randn(4, 8)
    get, later = hold(teacher)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        held = get()
        if held is None:
            return called(model, x)
        pull(held, model)
        return (model(x) - held(x) - 1).square().mean()

    stepper = sgd(model)
    for number in range(4):
        if number == 2:
            later()
        assert stepper.step(loss_fn, x).applied
    before = digest_of(teacher.state_dict())
    assert not stepper.step(loss_fn, x * BAD).applied
    assert digest_of(teacher.state_dict()) == before


def test_a_teacher_that_is_only_written_and_never_runs() -> None:
    model, shadows, x = nn.Linear(8, 1), [torch.zeros(1, 8), torch.zeros(1)], torch.randn(4, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(shadows, list(model.parameters()), 0.5)
        return called(model, x)

    stepper = sgd(model)
    assert stepper.step(loss_fn, x).applied
    before = digest_of(dict(enumerate(shadows)))
    assert not stepper.step(loss_fn, x * BAD).applied
    assert digest_of(dict(enumerate(shadows))) == before


def test_coverage_keeps_no_tensor_alive() -> None:
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    held: dict[str, Any] = {"small": torch.zeros(8), "large": torch.zeros(300, 300), "net": nn.Linear(8, 1)}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if held:
            held["small"].add_(1)
            return (model(x) + held["large"].sum() + held["net"](x)).square().mean()
        return called(model, x)

    stepper = sgd(model)
    for _ in range(3):
        stepper.step(loss_fn, x)
    references = [weakref.ref(thing) for thing in (*held.values(), held["net"].weight)]
    held.clear()
    stepper.step(loss_fn, x)
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


# -- plain attributes ----------------------------------------------------------------------------------------------


def test_the_carried_state_of_a_recurrent_network() -> None:
    class Carries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out, self.state = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 1), None

        def forward(self, x: Tensor) -> Tensor:
            out, state = self.rnn(x, self.state)
            self.state = state.detach()
            return self.out(out)

    model, x = Carries(), torch.randn(4, 5, 8)
    stepper = sgd(model)
    reasons = [stepper.step(called, batch).reason for batch in (x * BAD, x, x, x * BAD, x)]
    assert reasons == ["loss_not_finite", None, None, "loss_not_finite", None]


class Rope(nn.Module):
    """A cache that grows with the longest sequence, guarded by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.layer = 4, nn.Linear(8, 1)
        self.register_buffer("cos", torch.ones(4, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("cos", torch.ones(self.length, 8), persistent=False)
        return self.layer(x * self.cos[: x.shape[1]])


def test_a_cache_and_the_number_that_guards_it_go_back_together() -> None:
    model = Rope()
    stepper = sgd(model)
    assert stepper.step(called, torch.ones(2, 4, 8)).applied
    assert not stepper.step(called, torch.full((2, 9, 8), BAD)).applied
    assert (model.length, model.cos.shape) == (4, (4, 8))
    assert stepper.step(called, torch.ones(2, 9, 8)).applied
    assert (model.length, model.cos.shape) == (9, (9, 8))


def test_attributes_of_all_plain_kinds_go_back_and_new_ones_leave() -> None:
    class Attributes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls, self.flag, self.word, self.nothing = self.calls + 1, True, "after", 1.5
            self.pair, self.new = (self.calls, torch.ones(2)), "new"
            self.train(False)
            return super().forward(x)

    model, pair = Attributes(8, 1), (0, torch.zeros(2))
    model.calls, model.flag, model.word, model.nothing, model.pair = 0, False, "before", None, pair  # type: ignore[assignment]
    stepper = sgd(model)
    assert not stepper.step(called, torch.full((4, 8), BAD)).applied
    assert (model.calls, model.flag, model.word, model.nothing) == (0, False, "before", None)
    assert model.pair is pair
    assert not hasattr(model, "new")
    assert model.training
    assert stepper.step(called, torch.ones(4, 8)).applied
    assert (model.calls, model.new, model.training) == (1, "new", False)


def test_llama_with_dynamic_positions_keeps_them_right() -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(**sizes, **heads, rope_parameters=rope)
    short, long = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 20))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, float]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[0]).loss * batch[1]

    def run(batches: list[tuple[Tensor, float]]) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        stepper = sgd(model)
        for batch in batches:
            report = stepper.step(loss_fn, batch)
        return model.model.rotary_emb.inv_freq, report.loss

    frequencies, loss = run([(short, 1.0), (long, 1.0)])
    others, other = run([(short, 1.0), (long, BAD), (long, 1.0)])
    assert torch.equal(frequencies, others)
    assert loss == other


# -- included, batches, formats ------------------------------------------------------------------------------------


def test_an_included_metric_counts_applied_steps() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model, mean, cat, x = nn.Linear(8, 1), torchmetrics.MeanMetric(), torchmetrics.CatMetric(), torch.randn(4, 8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = called(model, x)
        mean.update(1.0)
        cat.update(torch.ones(3))
        return loss

    stepper = sgd(model)
    stepper.include(mean)
    stepper.include(cat)
    for batch in (x, x * BAD, x, x * BAD):
        stepper.step(loss_fn, batch)
    assert float(mean.weight) == 2.0
    assert len(cat.compute()) == 6
    assert mean.update_count == 2


def test_a_buffer_in_fp8_is_restored() -> None:
    class Cache(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.cache.copy_(torch.ones(4).to(torch.float8_e4m3fn))
            return super().forward(x)

    model = Cache(8, 1)
    model.register_buffer("cache", torch.zeros(4).to(torch.float8_e4m3fn))
    stepper = sgd(model)
    assert not stepper.step(called, torch.full((4, 8), BAD)).applied
    assert model.cache.float().eq(0).all()
    assert stepper.step(called, torch.ones(4, 8)).applied
    assert model.cache.float().eq(1).all()


@pytest.mark.wording
@pytest.mark.parametrize("how", ["mul_", ".data"])
def test_a_batch_that_is_changed_in_place_is_reported(how: str) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        (batch["image"] if how == "mul_" else batch["image"].data).mul_(0.5)
        return called(model, batch["image"])

    stepper = sgd(nn.Linear(8, 1))
    for _ in range(2):
        assert stepper.step(loss_fn, {"image": torch.ones(4, 8)}).applied
    assert ids(stepper) == ["batch.written"]
    assert "batch[0]['image']" in stepper.findings[0].evidence or "batch['image']" in stepper.findings[0].evidence


@pytest.mark.wording
def test_a_tensor_that_a_closure_rebinds_in_a_skipped_step_is_reported() -> None:
    state = torch.zeros(1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal state
        out = model(x)
        state = state * 0.9 + out.detach().mean()
        return out.square().mean()

    stepper = sgd(nn.Linear(8, 1))
    assert stepper.step(loss_fn, torch.ones(4, 8)).applied
    assert ids(stepper) == []
    assert not stepper.step(loss_fn, torch.full((4, 8), BAD)).applied
    assert ids(stepper) == ["rollback.rebound"]
    assert "state" in stepper.findings[0].evidence
