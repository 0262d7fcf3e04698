"""`halfstep.watch`: a loop that stays as it is, the operation and the line of its first non-finite number."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from benchmarks import watch as bench
from halfstep.adapters.replay import replay
from halfstep.adapters.watch import SKIPS_IN_A_ROW, Watch
from halfstep.errors import WrongUse
from halfstep.guard.verdict import CODE, GuardEvent
from tests.support.digest import digest_of

NAN = float("nan")


class Net(nn.Module):
    """A model with statistics, a counter and dropout: state that a rerun must not see changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.hidden, self.head = nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Linear(12, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(F.dropout(torch.relu(self.hidden(self.norm(x))), 0.2, self.training))


def batches(bad: int | None = None, steps: int = 6) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    made = [(torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.rand(8) + 0.5) for _ in range(steps)]
    if bad is not None:
        made[bad][2][3] = 0.0
    return made


def make(scaler: bool = False) -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, torch.amp.GradScaler("cpu") if scaler else None


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    before_step: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Six steps of a plain loop; weights of 0 have a logarithm of -inf, whose gradient is not finite either."""
    losses = []
    for x, y, w in data:
        optimizer.zero_grad()
        out = model(x)
        w = w.clone().requires_grad_()
        loss = F.cross_entropy(out, y) + (out.float().mean() * torch.log(w)).mean()  # the line of the plant
        losses.append(loss.item())
        loss.backward()
        if before_step():
            continue
        optimizer.step()
    return losses


PLANT = f"test_watch.py:{train.__code__.co_firstlineno + 12}"


def train_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, data: Any, factor: float = 1.0
) -> None:
    for x, y, _ in data:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y) * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_the_operation_and_the_line_before_the_weights_change() -> None:
    model, optimizer, _ = make()
    seen: list[tuple[GuardEvent, bool]] = []

    def tell(event: GuardEvent) -> None:
        seen.append((event, all(bool(p.isfinite().all()) for p in model.parameters())))

    watch = halfstep.watch(model, optimizer, tell=tell)
    losses = train(model, optimizer, batches(bad=3))
    assert len(losses) == 6, "the statements of the loop do not run for it twice"
    ((event, finite),) = seen
    assert finite, "it is told before the step"
    assert watch.verdict is not None
    assert watch.verdict.cause == CODE
    culprit = watch.verdict.culprit
    assert culprit is not None
    assert culprit.operation == "aten.log"
    assert culprit.line is not None
    assert culprit.line.endswith(PLANT)
    assert event.facts["attempt"] == 4
    assert not all(bool(p.isfinite().all()) for p in model.parameters()), "the step runs as written"
    assert watch.counts["finite"] == 3
    watch.close()


@pytest.mark.wording
def test_the_text_ends_in_something_to_paste() -> None:
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, tell=events.append)
    train(model, optimizer, batches(bad=3))
    text = events[0].text
    assert text.startswith("4th step: the loss is")
    assert "takes the logarithm of 0" in text
    assert "paste: torch.log(w.clamp(min=1e-6))" in text
    assert "the weights become NaN. Two lines prevent it:" in text
    assert "if watched.skip_nonfinite(): continue" in text
    watch.close()


def test_two_lines_keep_the_weights() -> None:
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    watched = halfstep.watch(model, optimizer, tell=events.append)
    train(model, optimizer, batches(bad=3), watched.skip_nonfinite)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert watched.counts["finite"] == 5
    assert sum(watched.counts.values()) == 6
    assert len(events) == 1
    watched.close()


@pytest.mark.parametrize("bad", [None, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_number_changes(bad: int | None, scaled: bool) -> None:
    digests = []
    for watched in (False, True):
        model, optimizer, scaler = make(scaled)
        watch = halfstep.watch(model, optimizer, scaler, tell=lambda event: None) if watched else None
        if scaled:
            data = batches()
            if bad is not None:
                data[bad][0][0, 0] = NAN
            train_scaled(model, optimizer, scaler, data)
        else:
            train(model, optimizer, batches(bad))
        state = scaler.state_dict() if scaled else {}
        digests.append((digest_of((model, optimizer)), state, model.calls, torch.get_rng_state().tolist()))
        if watch is not None:
            watch.close()
    assert str(digests[0]) == str(digests[1])


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
def test_one_host_read_a_step(monkeypatch: pytest.MonkeyPatch, scaled: bool) -> None:
    """`tolist` reads without an operation: it is counted by name, and `item` by its operation."""
    reads = {}
    for watched in (False, True):
        model, optimizer, scaler = make(scaled)
        watch = halfstep.watch(model, optimizer, scaler) if watched else None
        listed = [0]
        plain = Tensor.tolist

        def tolist(self: Tensor, listed: list[int] = listed, plain: Any = plain) -> Any:
            listed[0] += 1
            return plain(self)

        data = batches(steps=2)
        with monkeypatch.context() as patched:
            step = (lambda some, m=model, o=optimizer, s=scaler: train_scaled(m, o, s, some)) if scaled else (
                lambda some, m=model, o=optimizer: _bare_steps(m, o, some)
            )  # fmt: skip
            step(data[:1])
            patched.setattr(Tensor, "tolist", tolist)
            with _Reads() as counted:
                step(data[1:])
        reads[watched] = counted.count, listed[0]
        if watch is not None:
            watch.close()
    assert reads[True][0] == reads[False][0]
    assert reads[True][1] == reads[False][1] + 1


def _bare_steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for x, y, _ in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_scale_that_is_found_is_one_line() -> None:
    model, optimizer, scaler = make(scaled := True)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    # Gradients of 4 at a scale of 65,536 overflow fp16; a few halvings later they fit.
    train_scaled(model, optimizer, scaler, batches(steps=12), factor=300.0)
    assert scaled
    assert scaler.get_scale() < 65536.0
    assert [event.level for event in events] == ["info"]
    assert watch.verdict is None
    assert watch.counts["gradient_overflow"] > 1
    watch.close()


def test_a_loss_that_is_not_finite_is_named_under_a_scaler() -> None:
    model, optimizer, scaler = make(True)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    data = batches()
    data[2][0][5, 1] = NAN
    train_scaled(model, optimizer, scaler, data)
    assert watch.verdict is not None
    assert watch.verdict.cause == "data"
    assert watch.verdict.sentence == "data: x, sample 5 contains nan"
    assert len(events) == 1
    watch.close()


class Huge(nn.Module):
    """A gradient that overflows fp16 in backward at any scale, and not in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        h = (h.float() * 1e-12).to(h.dtype) + h if not h.requires_grad else _Steep.apply(h)
        return self.head(h)


class _Steep(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1e9


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**40])
def test_skips_without_an_end_are_reported(init_scale: float) -> None:
    """Below a scale of 1, or after twenty skips in a row: not before, as fp32 is finite."""
    torch.manual_seed(0)
    model = Huge()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    done = 0
    for data in batches(steps=30):
        train_scaled(model, optimizer, scaler, [data])
        done += 1
        if any(event.level == "warning" for event in events):
            break
    expected = SKIPS_IN_A_ROW if init_scale > 2.0**16 else 17
    assert done == expected, [event.text for event in events]
    watch.close()


def test_diagnose_of_a_scaler() -> None:
    model, optimizer, _ = make()
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    scaler.include(model)
    with pytest.raises(WrongUse):
        halfstep.diagnose(scaler, scaler.report)  # type: ignore[arg-type]
    watch = halfstep.watch(model, optimizer, scaler, tell=lambda event: None)
    for x, y, w in batches(bad=2):
        loss = F.cross_entropy(model(x), y) + torch.log(w).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report = scaler.report
        assert report is not None
        if not report.applied:
            found = halfstep.diagnose(scaler, report)
            assert found.culprit is not None
            assert found.culprit.operation == "aten.log"
            break
    else:
        pytest.fail("no step was skipped")
    watch.close()


def test_diagnose_of_an_unwatched_scaler_says_what_to_do() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = halfstep.GradScaler("cpu", precision="bf16")
    loss = model(torch.tensor([[1.0, NAN]])).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.report is not None
    with pytest.raises(WrongUse) as caught:
        halfstep.diagnose(scaler, scaler.report)
    assert "halfstep.watch(model, optimizer, scaler)" in caught.value.do


def test_a_record_is_replayed(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    watch = halfstep.watch(model, optimizer, record=tmp_path, tell=lambda event: None)
    train(model, optimizer, batches(bad=3))
    assert watch.verdict is not None
    watch.close()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        out = model(batch["x"])
        return F.cross_entropy(out, batch["y"]) + (out.float().mean() * torch.log(batch["w"])).mean()

    again = replay(tmp_path, Net(), loss_fn)
    assert again.culprit is not None
    assert again.culprit.operation == "aten.log"


def test_each_cause_is_told_once() -> None:
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    watched = halfstep.watch(model, optimizer, tell=events.append)
    data = batches(bad=1, steps=9)
    for n in (3, 4, 6, 7):
        data[n][2][0] = 0.0
    train(model, optimizer, data, watched.skip_nonfinite)
    assert [event.kind for event in events] == ["verdict", "alarm", "alarm"], "the first, the second, the fourth"
    watched.close()


def test_nothing_of_the_batch_is_kept() -> None:
    model, optimizer, _ = make()
    watch = halfstep.watch(model, optimizer)
    kept: list[Any] = []

    def steps() -> None:
        for _ in range(3):
            x = torch.randn(4, 6)
            kept.append(weakref.ref(x))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            del x, loss
            gc.collect()
            assert kept[-1]() is None

    steps()
    watch.close()


def test_a_watched_loop_is_collected() -> None:
    model, optimizer, scaler = make(True)
    halfstep.watch(model, optimizer, scaler)
    train_scaled(model, optimizer, scaler, batches(steps=2))
    gone = weakref.ref(model)
    del model, optimizer, scaler
    gc.collect()
    assert gone() is None
    assert not hasattr(torch.autograd.backward, "__wrapped__"), "torch's own function is back"


def test_close_leaves_no_trace() -> None:
    plain = torch.autograd.backward
    model, optimizer, scaler = make(True)
    before = dict(vars(scaler))
    watch = halfstep.watch(model, optimizer, scaler)
    assert torch.autograd.backward is not plain
    watch.close()
    assert torch.autograd.backward is plain
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert vars(scaler).keys() == before.keys()


def test_an_error_in_the_watch_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    halfstep.watch(model, optimizer, tell=events.append)

    def broken(_self: Any, *_arguments: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Watch, "_read_plain", broken)
    _bare_steps(model, optimizer, batches())
    assert len(events) == 1
    assert "ZeroDivisionError" in events[0].text
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_refusals() -> None:
    model, optimizer, _ = make()
    watch = halfstep.watch(model, optimizer)
    with pytest.raises(WrongUse):
        halfstep.watch(nn.ModuleList([model]), optimizer)
    watch.close()
    with pytest.raises(WrongUse):
        halfstep.watch(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(WrongUse):
        halfstep.watch(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(WrongUse):
        halfstep.watch(model, optimizer, scaler=object())  # type: ignore[arg-type]


def test_two_forward_passes_of_one_loss() -> None:
    """The statements start with the first of them, also where a loop makes them."""
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, tell=events.append)
    for step, (x, _, w) in enumerate(batches(steps=4)):
        optimizer.zero_grad()
        views = []
        for noise in (0.0, 0.1):
            z = model(x + noise)
            if step == 2:
                z = torch.log(z - z.detach())
            views.append(z)
        loss = (views[0] * views[1]).mean() * w.mean()
        loss.backward()
        optimizer.step()
    assert watch.verdict is not None
    culprit = watch.verdict.culprit
    assert culprit is not None
    assert culprit.operation == "aten.log"
    watch.close()


def test_a_model_that_is_watched_is_saved_and_copied(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    watch = halfstep.watch(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    twin = copy.deepcopy(model)
    _bare_steps(model, optimizer, batches())
    for other in (again, twin):
        other(torch.zeros(2, 6)).sum().backward()
    assert watch.counts["finite"] == 6
    watch.close()


def test_a_closure_ends_the_watch_with_a_word() -> None:
    model, optimizer, _ = make()
    events: list[GuardEvent] = []
    halfstep.watch(model, optimizer, tell=events.append)
    x, y, _ = batches()[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert len(events) == 1
    assert "closure" in events[0].text


def test_two_optimizers_of_one_scaler() -> None:
    one, other = make(), make()
    scaler = torch.amp.GradScaler("cpu")
    first = halfstep.watch(one[0], one[1], scaler)
    second = halfstep.watch(other[0], other[1], scaler)
    for x, y, _ in batches(steps=3):
        for model, optimizer, _ in (one, other):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
        scaler.update()
    assert first.counts["finite"] == second.counts["finite"] == 3
    first.close()
    second.close()


@pytest.mark.parametrize(("loop", "plant", "variant"), [("kaggle", "", "half"), ("pix2pix", "l1", "half")])
def test_loops_of_the_benchmark(loop: str, plant: str, variant: str) -> None:
    outcome = bench.judge(bench.WATCHED / f"{loop}.txt", plant, variant)
    assert outcome.named, outcome.said
    assert outcome.equal
