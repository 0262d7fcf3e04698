"""Meters look without a trace: same numbers, same reads by the host, nothing left on the model."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfstep import Ema, Stepper, Window, island
from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.guard.monitors.base import PLACES, AsyncScalars, list_metered_modules
from halfstep.guard.monitors.headroom import AT_ONCE, ExtremaHook
from halfstep.guard.monitors.monitors import FIRST, Meters
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model, plain_model


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module | None = None, **given: Any) -> Stepper:
    model = plain_model() if model is None else model
    given = {"precision": "fp32", "observe": False, **given}
    return Stepper(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), **given)


def run(stepper: Stepper, meters: Meters | None, steps: int, loss: Any = mse, batch: Any = None) -> list[Finding]:
    found: list[Finding] = []
    batches = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(6, 8, generator=batches) if batch is None else batch
        if meters is not None:
            meters.before()
        report = stepper.step(loss, x)
        if meters is not None:
            found += meters.after(report)
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(hooks_of(module)) for module in model.modules())


def hooks_of(module: nn.Module) -> list[Any]:
    return list(module._forward_hooks.values())


class Counts(TorchDispatchMode):
    """Operations by name, below every Python wrapper; reads through tolist() are counted beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._tolist = Tensor.tolist

    def __enter__(self) -> Any:
        def tolist(tensor: Tensor) -> Any:
            self.operations["tolist"] += 1
            return self._tolist(tensor)

        Tensor.tolist = tolist  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return self.operations["tolist"] + self.operations["aten._local_scalar_dense"]


# -- nothing changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_is_bitwise_the_same_with_meters_and_without(precision: str) -> None:
    def trained(every: int | None) -> str:
        torch.manual_seed(0)
        model = buffered_model()
        model.append(nn.Dropout(0.2))
        stepper = make(model, precision=precision, clip_norm=0.5, ema=Ema(model, 0.9))
        meters = None if every is None else Meters(stepper, every=every)
        assert all(finding.id != "meter-off" for finding in run(stepper, meters, 14))
        if meters is not None:
            assert meters.readings["headroom_bits"]
        return digest_of_run(stepper)

    assert trained(1) == trained(3) == trained(None)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_host_reads_no_more_with_meters_than_without(precision: str) -> None:
    def reads(metered: bool) -> list[int]:
        model = plain_model()
        stepper = make(model, precision=precision, ema=Ema(model))
        meters = Meters(stepper, every=4) if metered else None
        found = []
        for _ in range(14):
            with Counts() as counts:
                run(stepper, meters, 1)
            found.append(counts.reads)
        assert meters is None or "lost_update_share" in meters.readings
        return found

    assert reads(True) == reads(False) == [1] * 14


def test_a_step_that_is_not_sampled_runs_no_operation_of_the_meters() -> None:
    def operations(meters_every: int | None) -> list[Counter[str]]:
        stepper = make(precision="bf16")
        meters = None if meters_every is None else Meters(stepper, every=meters_every)
        found = []
        for _ in range(12):
            with Counts() as counts:
                run(stepper, meters, 1)
            found.append(counts.operations)
        return found

    plain, watched = operations(None), operations(8)
    differing = [step for step, (a, b) in enumerate(zip(plain, watched, strict=True), 1) if a != b]
    assert differing == [8]


def test_the_first_sample_comes_early_and_then_every_so_often() -> None:
    stepper = make()
    meters = Meters(stepper, every=50)
    sampled = []
    for step in range(1, 160):
        meters.before()
        if hooks(stepper.model):
            sampled.append(step)
        meters.after(stepper.step(mse, torch.randn(2, 8)))
        assert not hooks(stepper.model)
    assert sampled == [FIRST, 50, 100, 150]


def test_a_resumed_run_is_sampled_at_the_same_steps() -> None:
    stepper = make()
    stepper.counts.attempted = 128
    meters, sampled = Meters(stepper, every=50), []
    for step in range(129, 210):
        meters.before()
        if hooks(stepper.model):
            sampled.append(step)
        meters.after(stepper.step(mse, torch.randn(2, 8)))
    assert sampled == [150, 200]


def test_samples_that_would_overlap_take_their_turn() -> None:
    stepper = make()
    meters = Meters(stepper, every=1)
    sampled = []
    for step in range(1, 8):
        meters.before()
        if hooks(stepper.model):
            sampled.append(step)
        meters.after(stepper.step(mse, torch.randn(2, 8)))
    assert sampled == [1, 3, 5, 7]


@pytest.mark.wording
def test_never_is_not_a_rhythm() -> None:
    with pytest.raises(WrongUse, match="every 0 steps"):
        Meters(make(), every=0)


# -- the model ------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_model_made_in_a_sampled_step_has_no_hook_of_ours() -> None:
    stepper = make()
    meters = Meters(stepper, every=2)
    copies: list[nn.Module] = []

    def copying(model: nn.Module, x: Tensor) -> Tensor:
        copies.append(copy.deepcopy(model))
        buffer = io.BytesIO()
        pickle.dump(model, buffer)
        copies.append(pickle.loads(buffer.getvalue()))
        assert not any(type(hook) is ExtremaHook for other in copies for m in other.modules() for hook in hooks_of(m))
        shallow = copy.copy(model)
        shallow._modules = {name: copy.copy(child) for name, child in model.named_children()}
        for other in (*copies[-2:], shallow):
            other(1e30 * x)  # must not be taken for an output of the model
        return mse(model, x)

    run(stepper, meters, 5, copying)
    assert float(meters.readings["headroom_bits"]) > 100
    for other in copies:
        assert torch.equal(other(torch.ones(1, 8)), other(torch.ones(1, 8)))
    assert not hooks(stepper.model)


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.last = plain_model(), nn.Linear(4, 2)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x.requires_grad_(), use_reentrant=self._reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_goes_on(reentrant: bool) -> None:
    def trained(metered: bool) -> str:
        torch.manual_seed(0)
        stepper = make(Recomputing(reentrant), precision="bf16")
        meters = Meters(stepper, every=2) if metered else None
        run(stepper, meters, 6)
        assert meters is None or float(meters.readings["headroom_bits"]) > 100
        return digest_of_run(stepper)

    assert trained(True) == trained(False)


def test_inside_an_island_nothing_is_near_the_end_of_16_bits() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 4))
    assert [path for path, _ in list_metered_modules(model)] == ["0", "1.0", "1.1", "2"]
    island(model, "1")
    assert [path for path, _ in list_metered_modules(model)] == ["0", "2"]
    assert [path for path, _ in list_metered_modules(nn.Linear(2, 2))] == [""]


def test_many_modules_take_turns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(AT_ONCE + 10)))
    stepper = make(model)
    meters = Meters(stepper, every=2)
    seen: set[str] = set()
    for _ in range(6):
        meters.before()
        seen |= {path for path, module in model.named_modules() if module._forward_hooks}
        assert hooks(model) <= AT_ONCE
        meters.after(stepper.step(mse, torch.randn(2, 2)))
    assert len(seen) == AT_ONCE + 10


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


@pytest.mark.parametrize("what", ["part", "loss"])
def test_compiled_code_gets_no_hooks_and_is_not_compiled_anew(what: str) -> None:
    torch.compiler.reset()
    # torch passes over its own modules in silence: only a person's are compiled.
    stepper, compiled, loss = make(nn.Sequential(Own(), Own())), [], mse

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    if what == "loss":
        loss = torch.compile(mse, backend=backend)
    else:
        stepper.model[0].compile(backend=backend)
    meters = Meters(stepper, every=3)
    run(stepper, meters, 2, loss, torch.ones(6, 8))
    before = len(compiled)
    run(stepper, meters, 8, loss, torch.ones(6, 8))
    assert len(compiled) == before > 0
    assert "not metered" in str(meters.readings["headroom"])
    assert "compiled" in str(meters.readings["headroom"])
    assert "lost_update_share" in meters.readings
    torch.compiler.reset()


def test_after_an_error_in_a_step_the_hooks_go_and_metering_goes_on() -> None:
    stepper = make()
    meters = Meters(stepper, every=2)

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise ZeroDivisionError

    run(stepper, meters, 1)
    with pytest.raises(ZeroDivisionError):
        run(stepper, meters, 1, fails)
    assert hooks(stepper.model)
    run(stepper, meters, 4)
    assert not hooks(stepper.model)
    assert "headroom_bits" in meters.readings


def test_closed_meters_leave_nothing_behind() -> None:
    stepper = make()
    meters = Meters(stepper, every=2)
    run(stepper, meters, 1)
    meters.before()
    meters.close()
    assert not hooks(stepper.model)
    assert meters not in stepper.guards


def test_windows_and_turns_and_odd_outputs() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Many(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found = self.a(x)
            return self.b(found["x"]) + found["rest"][0].sum()

    class Many(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)

        def forward(self, x: Tensor) -> Any:
            rest = (torch.zeros(0), torch.arange(3), None, x.to_sparse(), x.to(torch.complex64))
            return {"x": super().forward(x) * 1024, "rest": rest}

    model = Odd()
    optimizers = {"a": torch.optim.SGD(model.a.parameters(), 1e-9), "b": torch.optim.SGD(model.b.parameters(), 1e-9)}
    stepper = Stepper(model, optimizers, precision="fp32", observe=False)
    meters = Meters(stepper, every=2)
    found = []
    for name in ["a", "b"] * 5:
        meters.before()
        window = Window([torch.ones(2, 8), torch.ones(2, 8) * 3])
        report = stepper.step(lambda m, x: dict.fromkeys("ab", mse(m, x)), window, only=name)
        found += meters.after(report)
    assert "meter-off" not in {finding.id for finding in found}
    assert meters.readings["headroom_module"] == "a"
    largest = model.a(torch.ones(2, 8) * 3)["x"].abs().max().item()
    bits = torch.log2(torch.tensor(torch.finfo(torch.float32).max / largest)).item()
    assert float(meters.readings["headroom_bits"]) == pytest.approx(bits, abs=0.01)


@pytest.mark.wording
def test_a_meter_that_fails_is_switched_off_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("no such kernel")

    def losses(broken: bool) -> list[float]:
        stepper = make()
        meters = Meters(stepper, every=2)
        if broken:
            monkeypatch.setattr("halfstep.guard.monitors.headroom._iterate_float_tensors", fails)
            monkeypatch.setattr("halfstep.guard.monitors.gradients.view_local_part", fails)
        seen, found = [], []
        for _ in range(8):
            meters.before()
            report = stepper.step(mse, torch.ones(6, 8))
            seen.append(report.loss)
            found += meters.after(report)
        off = [finding.evidence.split()[0] for finding in found if finding.id == "meter-off"]
        assert sorted(off) == (["Headroom", "VanishingGradients"] if broken else [])
        assert "lost_update_share" in meters.readings
        assert not hooks(stepper.model)
        return seen

    assert losses(False) == losses(True)


def test_a_skipped_sample_says_nothing_of_updates() -> None:
    stepper = make()
    meters = Meters(stepper, every=2)
    found = run(stepper, meters, 6, lambda m, x: mse(m, x) * float("nan"))
    assert [finding.id for finding in found] == ["steps-skipped"]
    assert "lost_update_share" not in meters.readings
    assert "headroom_bits" in meters.readings


def test_a_step_that_a_guard_refuses_after_the_meters_looked_says_nothing_of_updates() -> None:
    class Refuses:
        name = "refuses"

        def passes(self, report: Any) -> bool:
            return False

    model = plain_model()
    stepper = make(model, ema=Ema(model), guards=[Refuses()])
    for average in stepper.ema.averages().values():  # elsewhere than the weights, and yet it must not move
        average.add_(1.0)
    meters = Meters(stepper, every=2)
    found = run(stepper, meters, 6)
    assert [finding.id for finding in found] == ["steps-skipped"]
    assert "gradient_zero_share" in meters.readings
    assert not {"lost_update_share", "still_average_share"} & set(meters.readings)


# -- the way to the host -------------------------------------------------------------------------------------------


def test_what_was_sent_stays_while_the_next_is_written() -> None:
    scalars = AsyncScalars(torch.device("cpu"))
    numbers = [1.5, -0.0, float("inf"), 2.0**24]
    assert [scalars.note(torch.tensor(n, dtype=torch.float64)) for n in numbers] == [0, 1, 2, 3]
    scalars.send()
    scalars.wipe()
    scalars.note(torch.tensor(9.0))
    assert scalars.arrived
    scalars.send()
    assert scalars.read() == [9.0]


def test_a_full_slate_refuses() -> None:
    scalars = AsyncScalars(torch.device("cpu"))
    for _ in range(PLACES):
        scalars.note(torch.ones(()))
    with pytest.raises(IndexError):
        scalars.reserve_slot()


def test_the_largest_sample_fits_the_slate() -> None:
    from halfstep.guard.monitors import gradients, headroom

    assert 2 * headroom.AT_ONCE + 2 * gradients.AT_ONCE + 4 <= PLACES
