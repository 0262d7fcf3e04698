"""What a checkpoint consists of: every part of a run between two steps, and which process writes which tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from faults.wrong_pairs import Kind, Net, loop_of
from halfstep import distributed
from halfstep.errors import BadData, StateMismatch
from halfstep.precision.environment import collect_environment
from halfstep.train.environment import list_environment_changes
from halfstep.train.process_group import preserve_rng
from halfstep.train.state import COMPONENTS, OWN, State
from tests.support.digest import digest_of


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with preserve_rng():
        yield


def parts_of(state: State) -> tuple[Any, dict[str, Tensor]]:
    snapshot = state.snapshot(1, {})
    return snapshot.plain, dict(snapshot.tensors)


def state(folder: Path, **more: Any) -> State:
    return State.of(loop_of(Kind(**more), folder).live)


def test_there_are_twelve_components_and_they_come_back_whole(tmp_path: Path) -> None:
    own = state(tmp_path)
    assert len(COMPONENTS) == 12
    plain, tensors = parts_of(own)
    assert tuple(plain) == COMPONENTS
    assert digest_of(vars(State.from_parts(plain, tensors, "here"))) == digest_of(vars(own))


@pytest.mark.wording
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    plain, tensors = parts_of(state(tmp_path))
    del plain[name]
    with pytest.raises(StateMismatch, match=f"step 7 lacks {name}\n"):
        State.from_parts(plain, tensors, "step 7")


@pytest.mark.wording
@pytest.mark.parametrize("plain", [None, [], {}, "state", 3])
def test_what_is_no_state_is_refused(plain: Any) -> None:
    with pytest.raises(StateMismatch, match="lacks weights"):
        State.from_parts(plain, {}, "here")


@pytest.mark.wording
def test_a_component_too_many_and_a_tensor_too_few_are_refused(tmp_path: Path) -> None:
    plain, tensors = parts_of(state(tmp_path))
    with pytest.raises(StateMismatch, match="has mood"):
        State.from_parts({**plain, "mood": 1}, tensors, "here")
    tensors.pop("weights/parameters/first.weight")
    with pytest.raises(BadData, match=r"here, weights .*first\.weight"):
        State.from_parts(plain, tensors, "here")


def test_a_process_that_is_not_the_first_writes_its_own_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = state(tmp_path, net=_normalised, settings={"train.ema": 0.9})
    everything = own.snapshot(1, {})
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    less = own.snapshot(1, {})
    assert less.plain == everything.plain
    assert set(less.tensors) == {name for name in everything.tensors if name.startswith(OWN)}
    kinds = {name.rpartition("/")[0].partition("/")[0] for name in less.tensors}
    assert kinds == {"weights", "ema", "rng", "counts"}
    assert "weights/buffers/between.running_mean" in less.tensors
    assert "ema/buffers/between.running_mean" in less.tensors
    assert not any("parameters" in name or "averages" in name for name in less.tensors)


def test_what_a_model_keeps_for_itself_is_each_process_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = state(tmp_path, net=_Hidden)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert "weights/extra_state/between._extra_state" in own.snapshot(1, {}).tensors


def _normalised() -> nn.Module:
    net = Net()
    net.between = nn.BatchNorm1d(16)
    return net


class _Hidden(Net):
    """Has a buffer that it does not save by itself, and states of its own: one plain, one a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.between, self.calls = _Extra(), 5

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class _Extra(nn.Identity):
    mean = torch.zeros(1)

    def get_extra_state(self) -> Tensor:
        return self.mean

    def set_extra_state(self, state: Tensor) -> None:
        self.mean = state


def test_what_a_model_hides_is_kept_too(tmp_path: Path) -> None:
    weights = state(tmp_path, net=_Hidden).weights
    assert set(weights["buffers"]) == {"scale", "passing"}
    assert weights["non_persistent_buffers"] == ["passing"]
    assert weights["extra_state"] == {"_extra_state": {"calls": 5}, "between._extra_state": torch.zeros(1)}


def test_only_weights_and_averages_must_be_finite(tmp_path: Path) -> None:
    snapshot = state(tmp_path, settings={"train.ema": 0.9}).snapshot(1, {})
    kinds = {name.rsplit("/", 1)[0] for name in snapshot.finite}
    assert kinds == {"weights/parameters", "ema/averages"}
    assert {name.rsplit("/", 1)[0] for name in snapshot.not_nan} == {"weights/buffers", "ema/buffers"}


def test_an_optimizers_numbers_have_names(tmp_path: Path) -> None:
    optimizer = state(tmp_path, settings={"model.freeze": ["left"]}).optimizers["loss"]
    assert optimizer["kind"] == "AdamW"
    assert optimizer["param_names"] == [
        ["first.weight", "last.weight", "right.weight"],
        ["first.bias", "last.bias", "right.bias"],
    ]


def test_the_environment_is_told_fact_by_fact() -> None:
    here = collect_environment(torch.device("cpu"))
    assert list_environment_changes(here, here) == []
    assert list_environment_changes({**here, "halfstep": "0"}, here) == []
    assert list_environment_changes({**here, "threads": 99}, here) == [f"threads was 99, and is {here['threads']}"]
    other = {**here, "flags": {**here["flags"], "deterministic": "maybe"}}
    assert list_environment_changes(other, here) == [
        f"flags.deterministic was maybe, and is {here['flags']['deterministic']}"
    ]
    assert list_environment_changes({}, here) == [
        f"{key} was None, and is {value}" for key, value in _flat(here) if value
    ]


def _flat(facts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        elif key != "halfstep":
            yield key, value
