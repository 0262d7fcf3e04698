"""`halfstep.watch` where loops, sources and scalers are not as in a script: cells, `exec`, iterators, later groups."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import halfstep
from halfstep import distributed
from halfstep.adapters.watch import Watch
from halfstep.errors import WrongUse
from halfstep.guard.verdict import CODE, PRECISION, STATE, GuardEvent
from halfstep.numbers import format_ordinal


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batches(steps: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(steps)]


def fail(loss: Tensor) -> Tensor:
    return loss * torch.log(loss.detach() * 0)


def is_named(watch: Watch) -> bool:
    """Whether the verdict names the line of `fail`."""
    verdict = watch.verdict
    if verdict is None or verdict.cause != CODE or verdict.culprit is None:
        return False
    line = f"test_watch_situations.py:{fail.__code__.co_firstlineno + 1}"
    return verdict.culprit.operation == "aten.log" and (verdict.culprit.line or "").endswith(line)


CELL = """\
for step, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if step == 3:
        loss = loss / (loss.detach() * 0)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("file", ["<ipython-input-3-5f2b>", "<python-input-7>"])
def test_a_cell_is_named_with_its_line(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(keepends=True), file))
    exec(compile(CELL, file, "exec"), {"F": F, "model": model, "optimizer": optimizer, "data": batches()})
    assert watch.verdict is not None
    assert watch.verdict.culprit is not None
    assert watch.verdict.culprit.operation == "aten.div"
    assert watch.verdict.culprit.line == f"{file}:5"
    watch.close()


def test_text_without_a_file_is_not_run_again() -> None:
    """Its caller is a file: to run the caller's statement again would run the complete loop."""
    model, optimizer = make()
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, tell=events.append)
    data = iter(batches(12))
    taken = [next(data) for _ in range(6)]
    exec(CELL, {"F": F, "model": model, "optimizer": optimizer, "data": taken})
    assert len(list(data)) == 6
    assert len(events) == 1
    assert watch.verdict is None
    watch.close()


def test_statements_in_one_line(tmp_path: Path) -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    file = tmp_path / "train.py"
    file.write_text(
        "for step, (x, y) in enumerate(data):\n"
        "    loss = F.cross_entropy(model(x), y) / (step != 3)\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
    )
    names = {"F": F, "model": model, "optimizer": optimizer, "data": batches()}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert watch.verdict is not None
    assert watch.verdict.culprit is not None
    assert watch.verdict.culprit.line == f"{file}:2"
    watch.close()


def test_an_item_that_the_loop_has_taken_is_used_again() -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    data = iter(batches(12))
    for step in range(5):
        optimizer.zero_grad()
        x, y = next(data)
        logits = model(x)
        x, other = next(data)
        loss = F.cross_entropy(logits, y) + F.cross_entropy(model(x), other)
        loss = fail(loss) if step == 3 else loss
        loss.backward()
        optimizer.step()
    assert len(list(data)) == 2, "a rerun takes none"
    assert is_named(watch)
    watch.close()


class Trainer:
    """A loop whose method hands out batches."""

    def __init__(self) -> None:
        self.model, self.optimizer = make()
        self.data: Iterator[tuple[Tensor, Tensor]] = iter(batches(12))

    def read(self) -> tuple[Tensor, Tensor]:
        return next(self.data)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        x, y = self.read()
        logits = self.model(x)
        x, other = self.read()
        loss = F.cross_entropy(logits, y) + F.cross_entropy(self.model(x), other)
        loss = fail(loss) if step == 3 else loss
        loss.backward()
        self.optimizer.step()


def test_a_rerun_takes_nothing_from_an_iterator() -> None:
    trainer = Trainer()
    events: list[GuardEvent] = []
    watch = halfstep.watch(trainer.model, trainer.optimizer, tell=events.append)
    for step in range(5):
        trainer.step(step)
    assert len(list(trainer.data)) == 2
    assert len(events) == 1
    watch.close()


def test_a_second_watch_of_a_loop_replaces_the_first() -> None:
    """As in a notebook, where the cell with the line runs twice."""
    model, optimizer = make()
    first: list[GuardEvent] = []
    second: list[GuardEvent] = []
    halfstep.watch(model, optimizer, tell=first.append)
    watch = halfstep.watch(model, optimizer, tell=second.append)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = fail(loss) if step == 3 else loss
        loss.backward()
        optimizer.step()
    assert (len(first), len(second)) == (0, 1)
    assert len(model._forward_pre_hooks) == 1
    watch.close()
    assert not model._forward_pre_hooks


class Scaled:
    """A trainer with a scaler of its own."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("is_attribute", [False, True])
def test_the_scaler_of_the_loop_is_found(is_attribute: bool) -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    trainer = Scaled()
    scaler = torch.amp.GradScaler("cpu", enabled=False) if is_attribute else trainer.scaler
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
            loss = fail(loss) if step == 3 else loss
        (trainer.scaler if is_attribute else scaler).scale(loss).backward()
        trainer.scaler.step(optimizer)
        trainer.scaler.update()
    assert watch.counts["finite"] == 5
    assert is_named(watch)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    watch.close()
    assert "step" not in vars(trainer.scaler)


def test_weights_in_bf16_without_autocast() -> None:
    model, optimizer = make()
    model.to(torch.bfloat16)
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()), y)
        loss = fail(loss) if step == 3 else loss
        loss.backward()
        optimizer.step()
    assert is_named(watch)
    watch.close()


def test_a_group_of_processes_that_is_formed_later_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of processes is replaced: with real ones, a rerun would wait for the other."""
    model, optimizer = make()
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, tell=events.append)
    for step, (x, y) in enumerate(batches()):
        if step == 3:
            monkeypatch.setattr(distributed, "count_ranks", lambda: 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = fail(loss) if step == 3 else loss
        loss.backward()
        optimizer.step()
    assert len(events) == 1
    assert watch.verdict is None
    assert not model._forward_pre_hooks


def test_an_interrupt_and_an_error_in_forward_leave_the_watch_in_order() -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)

    def step(x: Tensor, y: Tensor, error: Any = None, *, bad: bool = False) -> None:
        optimizer.zero_grad()
        logits = model(x if error is not ValueError else x[:, :2])
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt
        loss = F.cross_entropy(logits, y)
        loss = fail(loss) if bad else loss
        loss.backward()
        optimizer.step()

    data = batches()
    step(*data[0])
    with pytest.raises(KeyboardInterrupt):
        step(*data[1], KeyboardInterrupt)
    with pytest.raises(RuntimeError):
        step(*data[2], ValueError)
    step(*data[3])
    assert watch.counts["finite"] == 2
    step(*data[4], bad=True)
    assert is_named(watch)
    watch.close()


class Statistics(nn.Module):
    """A model that divides by zero once its running mean is above a half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm.running_mean
        assert mean is not None
        return self.head(self.norm(x)) / (mean.mean() < 0.5).float()


def test_a_rerun_has_the_statistics_from_before_the_step() -> None:
    """The kernels write them without a new version of the tensor."""
    torch.manual_seed(0)
    model = Statistics()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    for x, y in batches(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + 1.0), y)
        loss.backward()
        optimizer.step()
    assert watch.counts["finite"] > 3
    assert watch.verdict is not None
    assert watch.verdict.culprit is not None
    assert watch.verdict.culprit.operation == "aten.div"
    watch.close()


ACCUMULATED = """\
import torch
for step in range(2):
    optimizer.zero_grad()
    for part, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        if step == 1 and part == 0:
            loss = loss / (loss.detach() * 0)
        loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("size", "is_found"), [(10**6, True), (100, False)])
def test_micro_batches_are_kept_up_to_their_bound(
    size: int, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that a script imports are no part of its batch; of the batch, the oldest parts are dropped first."""
    monkeypatch.setattr("halfstep.adapters.watch.MOST_BATCH_BYTES", size)
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    file = tmp_path / "train.py"
    file.write_text(ACCUMULATED)
    names = {"F": F, "model": model, "optimizer": optimizer, "data": batches(3)}
    exec(compile(ACCUMULATED, str(file), "exec"), names)
    assert watch.verdict is not None
    culprit = watch.verdict.culprit
    assert (culprit is not None and culprit.line == f"{file}:7") is is_found
    watch.close()


class Steep(nn.Module):
    """A model with logits of this size, whose probability is 1 in bf16; with `inside`, it returns the probability."""

    def __init__(self, logit: float, inside: bool) -> None:
        super().__init__()
        self.head, self.inside = nn.Linear(4, 1), inside
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.fill_(logit)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return torch.sigmoid(logits) if self.inside else logits


def bce(p: Tensor, y: Tensor) -> Tensor:
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


wide_bce = halfstep.island(bce)


def energy(z: Tensor) -> Tensor:
    return (z @ z.T).mean() * 1e-3


@pytest.mark.parametrize("loss", [bce, wide_bce], ids=["plain", "an island already"])
@pytest.mark.parametrize("inside", [False, True])
def test_an_island_without_an_effect_is_not_proposed(loss: Any, inside: bool) -> None:
    """The probability is rounded to 1 before it enters the island."""
    model = Steep(9.0, inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, tell=events.append)
    with torch.autocast("cpu", torch.bfloat16):
        p = model(torch.ones(8, 4))
        p = p if inside else torch.sigmoid(p)
        value = loss(p, torch.zeros(8, 1))
    value.backward()
    optimizer.step()
    assert watch.verdict is not None
    assert watch.verdict.cause == PRECISION
    assert "island(" not in events[0].text
    by_kind = {remedy.kind: remedy.works for remedy in watch.verdict.remedies}
    assert by_kind["island_function"] is False
    assert by_kind["float_output"] is not inside
    assert ("paste: model(x).float()" in events[0].text) is not inside
    with torch.autocast("cpu", torch.bfloat16):
        p = Steep(9.0, inside)(torch.ones(8, 4)).float()
        p = p if inside else torch.sigmoid(p)
        assert bool(bce(p, torch.zeros(8, 1)).isfinite()) is not inside
    watch.close()


def test_an_island_that_helps_is_proposed_by_the_name_of_its_function() -> None:
    model = Steep(300.0, inside=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    events: list[GuardEvent] = []
    code = energy.__code__
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    with torch.autocast("cpu", torch.float16):
        value = energy(model(torch.ones(8, 4)))
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    assert "paste: energy = halfstep.island(energy)" in events[0].text
    assert energy.__code__ is code, "the function is as before"
    assert energy.__kwdefaults__ is None
    watch.close()


class Overflowing(torch.autograd.Function):
    """A factor of the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, factor: float) -> Tensor:
        _ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient * _ctx.factor, None


@pytest.mark.parametrize("factor", [1.0, 1e30], ids=["an operation", "the norm of the gradients"])
def test_a_cause_is_counted_by_its_place_and_without_an_end(factor: float) -> None:
    """The sentence has another number in each step."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    weights = [p.clone() for p in model.parameters()]
    for step in range(70):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = Overflowing.apply(model(torch.ones(8, 6)), factor * (1 + step))
            out = (out * (1e4 + 100 * step)).square()
            loss = (out if factor > 1.0 else out / out).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 1e-6
    assert all(map(torch.equal, weights, model.parameters()))
    assert [event.kind for event in events].count("verdict") == 1
    said = [event.text.partition("\n")[0] for event in events]
    assert [text.partition(" times")[0].rpartition(" ")[2] for text in said if "the same cause" in text] == [
        "2",
        "4",
        "8",
    ]
    counted = [text.partition(" failed steps")[0].rpartition(" ")[2] for text in said if "failed steps" in text]
    assert counted == ["16", "32", "64"]
    in_a_row = [text.partition(" skips in a row")[0].rpartition(" ")[2] for text in said if "skips in a row" in text]
    assert in_a_row == ["20", "32", "64"]
    assert sum("the loss scale falls below 1" in text for text in said) == 1
    assert watch.counts["finite"] == 0
    assert sum(watch.counts.values()) == 70
    watch.close()


def test_the_count_of_skips_has_no_end_at_a_high_scale() -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    events: list[GuardEvent] = []
    watch = halfstep.watch(model, optimizer, scaler, tell=events.append)
    for x, y in batches(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    said = "\n".join(event.text for event in events)
    assert "20th step: 20 skips in a row; the weights are unchanged since the start" in said
    assert "32nd step: 32 skips in a row" in said
    assert sum(watch.counts.values()) == 40
    watch.close()


def test_weights_that_were_bad_before_the_first_step() -> None:
    model, optimizer = make()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    events: list[GuardEvent] = []
    watched = halfstep.watch(model, optimizer, tell=events.append)
    for x, y in batches(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert watched.verdict is not None
    assert watched.verdict.cause == STATE
    assert "Two lines prevent it" not in events[0].text
    assert "weight 0.weight was not finite before this step" in events[0].text
    watched.close()


def test_an_optimizer_of_a_stepper_is_refused() -> None:
    model, optimizer = make()
    stepper = halfstep.Stepper(model, optimizer, precision="fp32")
    with pytest.raises(WrongUse) as caught:
        halfstep.watch(model, optimizer)
    assert "halfstep.Guardian(stepper)" in caught.value.do
    assert "halfstep.diagnose(stepper, report)" in caught.value.do
    assert not model._forward_pre_hooks
    del stepper, caught
    gc.collect()
    halfstep.watch(model, optimizer).close()


@pytest.mark.filterwarnings("ignore")
def test_lightning_has_its_own_plugin() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    model, optimizer = make()
    events: list[GuardEvent] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    halfstep.watch(model, optimizer, tell=events.append)
    trainer = pl.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(batches(2), batch_size=None))
    assert len(events) == 1
    assert "halfstep.adapters.lightning import HalfstepPrecision" in events[0].text
    assert "Call the closure" not in events[0].text


@pytest.mark.parametrize(("number", "text"), [(1, "1st"), (2, "2nd"), (11, "11th"), (23, "23rd"), (1112, "1,112th")])
def test_steps_in_words(number: int, text: str) -> None:
    assert format_ordinal(number) == text


def test_a_watch_prints_its_state() -> None:
    model, optimizer = make()
    watch = halfstep.watch(model, optimizer, tell=lambda event: None)
    assert repr(watch) == "<halfstep.watch: 0 steps, 0 finite>"
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss = loss / (y < 0).sum() if step == 3 else loss
        loss.backward()
        optimizer.step()
    assert watch.verdict is not None
    assert repr(watch) == f"<halfstep.watch: 6 steps, 3 finite; {watch.verdict.sentence}>"
    assert watch.verdict.culprit is not None
    assert watch.verdict.culprit.divisor == "count"
    watch.close()
    assert repr(watch) == "<halfstep.watch: closed after 6 steps>"
