"""State that a module keeps in lists, dicts, deques, arrays and data objects: a skipped step restores it."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep.step.containers import MOST_ARRAY_BYTES, MOST_MEMBERS

NAN = float("nan")


@dataclasses.dataclass
class Cache:
    state: Tensor


def _append(held: Any, new: Tensor) -> None:
    held.append(new)


def _set_first(held: Any, new: Tensor) -> None:
    held[0] = new


def _set_state(held: Any, new: Tensor) -> None:
    held.state = new


def _set_item(held: Any, new: Tensor) -> None:
    held["state"] = new
    held["another"] = new


def _write_array(held: Any, new: Tensor) -> None:
    held += new.numpy()


def _zeros() -> Tensor:
    return torch.zeros(4)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "list": (lambda: [_zeros()], _set_first),
    "grown list": (lambda: [_zeros()], _append),
    "full list": (lambda: [_zeros() for _ in range(MOST_MEMBERS)], _set_first),
    "deque": (lambda: deque([_zeros()], maxlen=1), _append),
    "dict": (lambda: {"state": _zeros()}, _set_item),
    "ordered": (lambda: OrderedDict(state=_zeros()), _set_item),
    "set": (set, lambda held, new: held.add(new)),
    "namespace": (lambda: types.SimpleNamespace(state=_zeros()), _set_state),
    "data class": (lambda: Cache(_zeros()), _set_state),
    "array": (lambda: np.zeros(4, "f4"), _write_array),
}


class Keeps(nn.Module):
    """Writes its result into what it keeps, in each forward pass."""

    def __init__(self, kept: Any, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.kept, self.write = kept, write

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        self.write(self.kept, y.detach().mean(0))
        return y


def _members(kept: Any) -> list[Any]:
    if isinstance(kept, np.ndarray):
        return list(kept.tolist())
    kept = kept if isinstance(kept, (list, deque, dict, set)) else vars(kept)
    return [*kept.keys(), *kept.values()] if isinstance(kept, dict) else list(kept)


def _loss(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean()


def _build(model: nn.Module, **options: Any) -> halfstep.Stepper:
    return halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32", **options)


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("kind", KEPT)
def test_a_skip_restores_the_members(kind: str, at: int) -> None:
    build, write = KEPT[kind]
    model = Keeps(build(), write)
    stepper = _build(model)
    for _ in range(at):
        assert stepper.step(_loss, torch.randn(2, 4)).applied
    held, before = model.kept, _members(model.kept)
    assert not stepper.step(_loss, torch.full((2, 4), NAN)).applied
    assert model.kept is held
    after = _members(held)
    assert len(after) == len(before)
    assert all(a is b or a == b for a, b in zip(after, before, strict=True))
    assert stepper.findings == []


@pytest.mark.parametrize("kind", KEPT)
def test_a_skip_in_the_three_call_form_restores_the_members(kind: str) -> None:
    build, write = KEPT[kind]
    model = Keeps(build(), write)
    stepper = _build(model, observe=False)
    before = _members(model.kept)
    with stepper.forward():
        loss = model(torch.full((2, 4), NAN)).mean()
    stepper.backward(loss)
    assert not stepper.apply().applied
    assert all(a is b or a == b for a, b in zip(_members(model.kept), before, strict=True))


class Rebinds(nn.Module):
    """Binds a new container in each forward pass."""

    def __init__(self, build: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.build, self.kept = nn.Linear(4, 4), build, None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        self.kept = self.build(y.detach().mean(0))
        self.made_here = [1]
        return y


class Opaque:
    def __init__(self, state: Tensor) -> None:
        self.state = state


@pytest.mark.parametrize(
    "build",
    [lambda t: [t], lambda t: {"h": t}, lambda t: deque([t]), lambda t: t.numpy(), Opaque, lambda t: [t] * 1000],
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_skip_binds_the_container_from_before_it(build: Callable[[Tensor], Any], at: int) -> None:
    model = Rebinds(build)
    stepper = _build(model)
    for _ in range(at):
        assert stepper.step(_loss, torch.randn(2, 4)).applied
    before = dict(vars(model))
    assert not stepper.step(_loss, torch.full((2, 4), NAN)).applied
    assert model.kept is before["kept"]
    assert vars(model).keys() == before.keys()


def test_a_container_made_by_the_first_forward_pass_is_restored() -> None:
    class Lazy(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = {}
            return super().forward(x)

    model = Lazy(None, _set_item)
    stepper = _build(model, observe=False)
    stepper.step(_loss, torch.randn(2, 4))
    state = model.kept["state"]
    assert not stepper.step(_loss, torch.full((2, 4), NAN)).applied
    assert model.kept["state"] is state


@pytest.mark.parametrize(
    ("kept", "write"),
    [
        (lambda: [_zeros() for _ in range(MOST_MEMBERS + 1)], _append),
        (lambda: deque([_zeros() for _ in range(100)], maxlen=100), _append),
        (lambda: {i: _zeros() for i in range(100)}, _set_item),
        (lambda: np.zeros((MOST_ARRAY_BYTES, 4), "f4"), _write_array),
        (lambda: Opaque(_zeros()), _set_state),
    ],
)
def test_what_is_not_restored_is_reported_once(kept: Any, write: Callable[[Any, Tensor], None]) -> None:
    model = nn.Sequential(Keeps(kept(), write))
    stepper = _build(model)
    assert stepper.step(_loss, torch.randn(2, 4)).applied
    assert stepper.findings == []
    with pytest.warns(UserWarning, match=r"0\.kept"):
        stepper.step(_loss, torch.full((2, 4), NAN))
    stepper.step(_loss, torch.full((2, 4), NAN))
    assert [finding.id for finding in stepper.findings] == ["rollback.rebound"]


def test_an_included_model_is_restored_at_any_size() -> None:
    model = Keeps([_zeros() for _ in range(1000)], _append)
    stepper = _build(model)
    stepper.include(model)
    before = list(model.kept)
    assert not stepper.step(_loss, torch.full((2, 4), NAN)).applied
    assert len(model.kept) == 1000
    assert all(a is b for a, b in zip(model.kept, before, strict=True))
    assert stepper.findings == []


def test_applied_steps_keep_what_they_wrote() -> None:
    model = Keeps([_zeros()], _append)
    stepper = _build(model)
    for _ in range(5):
        stepper.step(_loss, torch.randn(2, 4))
    assert len(model.kept) == 6


def test_a_module_outside_of_the_model_is_covered_when_it_runs() -> None:
    model, other = nn.Linear(4, 4), Keeps([_zeros()], _append)
    stepper = _build(model)
    registry = {"other": [other]}
    assert not stepper.step(lambda m, x: m(registry["other"][0](x)).mean(), torch.full((2, 4), NAN)).applied
    assert len(other.kept) == 1
