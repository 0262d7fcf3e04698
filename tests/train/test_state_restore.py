"""A saved state put back: all bits of it, into every corner of a model, or nothing at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from faults.everything import Steady
from faults.refit import refit
from faults.wrong_pairs import Kind, Net, loop_of, saved_by
from halfstep.errors import BadData, StateMismatch
from halfstep.recipe.changes import DATA
from halfstep.train.loop import Loop
from halfstep.train.process_group import preserve_rng
from halfstep.train.resume import FoundCheckpoint, find_checkpoint, resume_from
from halfstep.train.state import FORM, State, restore_state
from tests.support.digest import digest_of


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with preserve_rng():
        yield


def losses(loop: Loop, count: int) -> list[float]:
    return [report.loss for report in islice(loop.attempts(), count)]


def saved(loop: Loop) -> None:
    loop.checkpoints.save()
    loop.checkpoints.finish()


def resumed(kind: Kind, folder: Path, accepted: tuple[str, ...] = ()) -> Loop:
    loop, found = loop_of(kind, folder), find_checkpoint(folder)
    assert found is not None
    resume_from(loop, found, folder, accepted)
    return loop


def digest(loop: Loop) -> str:
    state = State.of(loop.live)
    return digest_of({name: value for name, value in vars(state).items() if name != "position"}, vars(loop.progress))


def continues(kind: Kind, folder: Path) -> tuple[Loop, Loop]:
    """A run that goes on after a save, and one that was taken up from it: all losses and bits of both are the same."""
    loop = loop_of(kind, folder)
    losses(loop, 5)
    saved(loop)
    second = resumed(kind, folder)
    assert digest(second) == digest(loop)
    assert losses(second, 6) == losses(loop, 6)
    assert digest(second) == digest(loop)
    return loop, second


class Images(nn.Module):
    """Convolutions of several shapes, 1×1 among them, on what is made of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.single, self.last = nn.Conv2d(4, 4, 3, groups=4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :, None, None].expand(-1, -1, 5, 5).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.last(self.single(self.narrow(self.wide(image).tanh())).mean((2, 3)))
        return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_convolutions_go_on_bit_by_bit_whatever_their_layout(name: str, fused: bool, tmp_path: Path) -> None:
    loop, second = continues(
        Kind(Images, {"optimizer.name": name, "optimizer.fused": fused, "train.channels_last": True}), tmp_path
    )
    assert loop.parts.optimizer.param_groups[0].get("fused") == (fused or None)
    for one, other in zip(_states(loop), _states(second), strict=True):
        assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
    assert any(not state.is_contiguous() for state in _states(second)), "channels last was meant to be seen"


def _states(loop: Loop) -> list[Tensor]:
    states = loop.parts.optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


class Lazy(Net):
    """A buffer that is made with the first batch, one that cannot be written into, and one that is bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", None)
        self.register_buffer("same", torch.ones(1).expand(3))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.centre is None:
            self.centre = x.detach().mean(0)
        if self.training:
            self.seen = self.seen + 1
        return super().forward(x - self.centre) * self.same.mean() + self.seen * 1e-3


def test_buffers_of_every_kind_go_on(tmp_path: Path) -> None:
    _, second = continues(Kind(Lazy, {"train.ema": None}), tmp_path)
    assert second.model.seen == 11


class Late(Net):
    """A table that is made with the first batch, in a module of its own, and one that is longer after each batch."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.between.empty = None
        self.register_buffer("seen", torch.zeros(0), persistent=self.persistent)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", x.detach().mean(0), persistent=self.persistent)
        if self.between.empty is None:
            del self.between.empty
            self.between.register_buffer("empty", x.detach().std(0), persistent=self.persistent)
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean().view(1)])
        return super().forward(x - self.table) + self.seen.mean() * self.between.empty.mean()


class Kept(Late):
    persistent = True


@pytest.mark.parametrize("ema", [None, 0.9])
def test_buffers_that_come_late_and_grow_go_on(ema: float | None, tmp_path: Path) -> None:
    _, second = continues(Kind(Late, {"train.ema": ema}), tmp_path)
    assert len(second.model.seen) == 11
    assert not {"table", "seen", "between.empty"} & set(second.model.state_dict())
    assert second.stepper.ema is None or len(second.stepper.ema.state_dict()["buffers"]["seen"]) == 11


@pytest.mark.wording
@pytest.mark.parametrize(("one", "other"), [(Kept, Kept), (Late, Kept), (Kept, Late), (Late, Net)])
def test_late_buffers_that_a_model_saves_are_refused(one: Any, other: Any, tmp_path: Path) -> None:
    saved_by(Kind(one), tmp_path)
    loop = loop_of(Kind(other), tmp_path)
    before = digest(loop)
    if other is Net:  # which has a place for all of them
        restore_state(loop.live, _found(tmp_path).state)
        assert len(loop.model.seen) == 7
        return
    with pytest.raises(StateMismatch, match="seen was 7 in float32, and is 0 in float32"):
        restore_state(loop.live, _found(tmp_path).state)
    assert digest(loop) == before


@pytest.mark.wording
@pytest.mark.parametrize("name", ["first.weight", "left", "forward", "nowhere.table", "first.", ""])
def test_a_buffer_takes_no_others_place(name: str, tmp_path: Path) -> None:
    saved_by(Kind(Late), tmp_path)
    found = _found(tmp_path)
    found.state.weights["buffers"][name] = torch.ones(3)
    found.state.weights["non_persistent_buffers"].append(name)
    loop = loop_of(Kind(Late), tmp_path)
    before = digest(loop)
    with pytest.raises(StateMismatch, match=f"not in the model: {name}"):
        restore_state(loop.live, found.state)
    assert digest(loop) == before


def test_an_average_is_worn_by_buffers_that_grew_since(tmp_path: Path) -> None:
    loop = loop_of(Kind(Late, {"train.ema": 0.9}), tmp_path)
    losses(loop, 3)
    ema, model = loop.stepper.ema, loop.model
    assert ema is not None
    model.seen = torch.arange(5.0)
    with ema.in_place():
        assert len(model.seen) == 3
        model.seen = torch.zeros(9)
    assert torch.equal(model.seen, torch.arange(5.0))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_a_model_keeps_besides_tensors_goes_on(tmp_path: Path) -> None:
    loop, second = continues(Kind(Counting), tmp_path)
    assert loop.model.calls == second.model.calls > 11


AVERAGED = Kind(settings={"train.ema": 0.9})


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with an average of its weights."""
    folder = tmp_path_factory.mktemp("averaged")
    with preserve_rng():
        saved_by(AVERAGED, folder)
    return folder


@pytest.mark.parametrize("name", [name for name, levels in FORM.items() if levels])
def test_a_component_of_another_form_is_refused_and_nothing_is_changed(
    name: str, averaged: Path, tmp_path: Path
) -> None:
    loop = loop_of(AVERAGED, tmp_path)
    before = digest(loop)

    def spoil(state: dict[str, Any], change: str) -> None:
        inner = state[name]
        if change == "a key less" and inner:
            inner.pop(next(iter(inner)))
        elif change == "a key more":
            inner["mood"] = {}
        else:
            state[name] = None if change == "nothing" else [1]

    for change in ("a key less", "a key more", "nothing", "a list"):
        folder = Path(shutil.copytree(averaged, tmp_path / change))
        refit(folder, lambda state, change=change: spoil(state, change))
        with pytest.raises((StateMismatch, BadData)):
            restore_state(loop.live, _found(folder).state)
        assert digest(loop) == before, change


def _found(folder: Path) -> FoundCheckpoint:
    found = find_checkpoint(folder)
    assert found is not None
    return found


class Strict(Steady):
    """Refuses what it is given after it has taken a part of it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before.clear()
        raise StateMismatch("a window of another length")


@pytest.mark.wording
def test_a_guard_that_refuses_does_so_before_anything_is_changed(tmp_path: Path) -> None:
    loop = loop_of(Kind(), tmp_path)
    loop.stepper.guards.append(Steady())
    losses(loop, 5)
    saved(loop)
    second, found = loop_of(Kind(), tmp_path), find_checkpoint(tmp_path)
    assert found is not None
    second.stepper.guards.append(Strict())
    second.stepper.guards[-1].before.append(0.5)
    before = digest(second)
    with pytest.raises(StateMismatch, match="another length"):
        restore_state(second.live, found.state)
    assert digest(second) == before
    second.stepper.guards[:] = []
    with pytest.raises(StateMismatch, match="steady"):
        restore_state(second.live, found.state)


@pytest.mark.wording
def test_samples_that_were_set_aside_are_others_in_other_data(tmp_path: Path) -> None:
    kind = Kind(settings={"data.nan": [3]})
    loop = loop_of(kind, tmp_path)
    losses(loop, 12)
    assert loop.progress.quarantined == [3]
    saved(loop)
    assert resumed(kind, tmp_path).live.samples.quarantined == {3}
    other, found = loop_of(kind, tmp_path), find_checkpoint(tmp_path)
    assert found is not None
    other.live.data_fingerprint = loop_of(Kind(settings={"data.samples": 40}), tmp_path).live.data_fingerprint
    with pytest.raises(StateMismatch, match="40 samples removed"):
        restore_state(other.live, found.state)
    assert restore_state(other.live, found.state, (DATA,)).data
    assert other.live.samples.quarantined == set()
    assert other.progress.attempts == 12
