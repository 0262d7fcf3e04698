"""Before an operation writes into a tensor, those who ask are told which one, while its old numbers are still there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from halfstep.observe.precision_check import PrecisionObserver
from halfstep.observe.recorder import Recorder
from halfstep.precision.precision import resolve_precision_name


class Memory:
    """A listener that calls `write` with each tensor that an operation is about to write into."""

    def __init__(self, write: Callable[[Tensor], object] = lambda tensor: None) -> None:
        self._write = write
        self.modules: list[nn.Module] = []
        self.read: list[Tensor] = []

    def module_runs(self, module: nn.Module) -> None:
        self.modules.append(module)

    def before_use(self, written: Sequence[Tensor], read: Sequence[Tensor], line: str | None) -> None:
        for tensor in written:
            self._write(tensor)
        self.read += read

    def before_replace(self, tensor: Tensor, line: str | None) -> None:
        self._write(tensor)


def announced(run: Callable[[], object], tensor: Tensor) -> list[Tensor]:
    """Copies of a tensor, made each time that a write into it was announced."""
    copies: list[Tensor] = []

    def write(written: Tensor) -> None:
        if written.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            copies.append(tensor.detach().clone())

    with Recorder(nn.Identity(), lambda operation: None, memory=Memory(write)):
        run()
    return copies


def _writes(x: Tensor) -> dict[str, Callable[[], object]]:
    other = torch.full_like(x, 7.0)
    return {
        "lerp_": lambda: x.lerp_(other, 0.5),
        "data.copy_": lambda: x.data.copy_(other),
        "foreach": lambda: torch._foreach_lerp_([x], [other], 0.5),
        "out": lambda: torch.add(other, 1, out=x),
        "index_copy_": lambda: x.index_copy_(0, torch.tensor([1]), other[:1]),
        "setitem": lambda: x.__setitem__(0, 3.0),
        "view": lambda: x[1:].mul_(2),
        "embedding max_norm": lambda: nn.functional.embedding(torch.tensor([0]), x, max_norm=0.1),
        "detached": lambda: x.detach().zero_(),
        "data =": lambda: setattr(x, "data", other),
        "where the mode is inference": lambda: _in_inference(x),
    }


def _in_inference(x: Tensor) -> None:
    with torch.inference_mode():
        x.add_(1)


@pytest.mark.parametrize("how", list(_writes(torch.ones(1, 1))))
def test_a_write_is_announced_while_the_old_numbers_are_there(how: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    before = x.clone()
    copies = announced(_writes(x)[how], x)
    assert copies
    assert torch.equal(copies[0], before)
    assert not torch.equal(x, before)


def test_what_only_reads_is_not_announced() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    assert announced(lambda: (x @ x).relu().sum().backward(), x) == []


@pytest.mark.parametrize("make", [nn.BatchNorm1d, lambda c: nn.InstanceNorm1d(c, track_running_stats=True)])
@pytest.mark.parametrize("statistic", ["running_mean", "running_var"])
def test_running_statistics_are_announced(make: Callable[[int], nn.Module], statistic: str) -> None:
    norm = make(4)
    buffer = getattr(norm, statistic)
    before = buffer.clone()
    copies = announced(lambda: norm(torch.randn(3, 4, 5) * 3 + 1), buffer)
    assert copies
    assert torch.equal(copies[0], before)
    assert not torch.equal(buffer, before)


def test_statistics_that_are_only_used_are_not_announced() -> None:
    norm = nn.BatchNorm1d(4).eval()
    assert isinstance(norm.running_mean, Tensor)
    assert announced(lambda: norm(torch.randn(3, 4, requires_grad=True)).sum().backward(), norm.running_mean) == []


def test_backward_of_a_batch_norm_writes_no_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    assert isinstance(norm.running_mean, Tensor)
    out = norm(torch.randn(3, 4)).sum()
    assert announced(out.backward, norm.running_mean) == []


def test_the_watch_of_a_step_announces_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    written: list[int] = []
    norm = model[1]
    precision = resolve_precision_name("fp32")
    watch = PrecisionObserver(
        precision.scope(torch.device("cpu")),
        model,
        precision,
        done=lambda inner, seen: None,
        emit=lambda findings: None,
        memory=Memory(lambda tensor: written.append(id(tensor))),
    )
    with watch:
        model(torch.randn(3, 4)).sum().backward()
    assert {id(norm.running_mean), id(norm.running_var), id(norm.num_batches_tracked)} <= set(written)


def test_a_write_that_may_not_be_is_stopped_before_it_happens() -> None:
    class No(Exception): ...

    def refuse(written: Tensor) -> None:
        raise No

    x = torch.ones(3)
    with pytest.raises(No), Recorder(nn.Identity(), lambda operation: None, memory=Memory(refuse)):
        x.add_(1)
    assert torch.equal(x, torch.ones(3))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_memory_that_the_step_made_is_not_announced() -> None:
    written: list[Tensor] = []
    x, table = torch.ones(3), torch.zeros(3)
    with Recorder(nn.Identity(), lambda operation: None, memory=Memory(written.append)) as _:
        made = x * 2
        made.add_(1)
        torch.tensor([1.0, 2.0]).mul_(2)
        torch.empty(4).normal_()
        table.data.add_(made)
    assert [w.data_ptr() for w in written] == [table.data_ptr()]


def test_modules_outside_the_model_and_tensors_that_are_read_are_announced() -> None:
    memory, outside, table = Memory(), nn.Linear(3, 3), torch.ones(3)
    with Recorder(nn.Identity(), lambda operation: None, memory=memory):
        outside(table + 1)
    assert memory.modules == [outside]
    assert {t.data_ptr() for t in memory.read} >= {table.data_ptr(), outside.weight.data_ptr()}


def test_gradients_that_are_accumulated_are_not_announced() -> None:
    written: list[Tensor] = []
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).sum().backward()
    with Recorder(model, lambda operation: None, memory=Memory(written.append)):
        model(torch.ones(2, 3)).sum().backward()
    assert written == []
