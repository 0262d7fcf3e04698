"""The states of random number generators: saved, seeded and restored, on the host, on accelerators and in objects."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.random_state import (
    build_seeded_states,
    collect_random_states,
    is_generator,
    preserve_host_random_state,
    preserve_random_state,
    restore_random_states,
    use_seeded_generators,
)
from tests.support.random_streams import OwnStreams, read_streams, seed_streams, small_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def streams() -> None:
    seed_streams(3)
    random.gauss(0, 1)  # a spare number, which is part of the state
    np.random.randn()


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]


# -- the mechanism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preserve", [preserve_random_state, preserve_host_random_state, lambda: use_seeded_generators(5)]
)
def test_the_streams_continue_after_the_block(preserve: Callable[[], Any]) -> None:
    states = collect_random_states()
    expected = _draw()
    restore_random_states(states)
    with preserve():
        seed_streams(9)
        _draw()
    assert _draw() == expected


def test_the_streams_continue_after_an_error() -> None:
    before = read_streams()

    def fail() -> None:
        with preserve_random_state():
            _draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert read_streams() == before


def test_objects_are_restored_and_one_without_a_state_is_left_alone() -> None:
    own = OwnStreams()
    before = own.read()
    with preserve_random_state(objects=[*own.generators, random.SystemRandom()]):
        own(small_model(), torch.zeros(4, 8))
        assert own.read() != before
    assert own.read() == before


def test_a_shared_generator_among_the_objects_is_seeded_with_the_others() -> None:
    held = [torch.default_generator, np.random.mtrand._rand, random._inst]  # type: ignore[attr-defined]
    with use_seeded_generators(5):
        expected = _draw()
    with use_seeded_generators(5, objects=held):
        assert _draw() == expected
    restore_random_states(build_seeded_states(5, objects=held))
    assert _draw() == expected


def test_seeded_generators_are_those_of_the_seed() -> None:
    with use_seeded_generators(5):
        one = _draw()
    with use_seeded_generators(5):
        again = _draw()
    with use_seeded_generators(6):
        other = _draw()
    torch.manual_seed(5)
    assert one == again
    assert one[-1] == float(torch.rand(()))
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_replaced_generator_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with preserve_random_state():
            expected = np.random.rand()
        with use_seeded_generators(5):
            assert np.random.rand() != expected
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(before)


def test_without_numpy_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    with use_seeded_generators(5), preserve_random_state():
        assert "numpy" not in sys.modules
    assert not is_generator(object())


class _Accelerator:
    """torch's module of an accelerator with two devices."""

    def __init__(self, *, used: bool) -> None:
        self.used, self.states = used, [10, 20]

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        self.used = True
        return torch.tensor(self.states[device.index])

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = int(state)

    def manual_seed_all(self, seed: int) -> None:
        self.states = [seed, seed]


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Accelerator:
    found = _Accelerator(used=request.param)
    modules = {"xpu": found, "cpu": torch.cpu}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[torch.device(device).type])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(
        torch, "manual_seed", lambda seed: [torch.default_generator.manual_seed(seed), found.manual_seed_all(seed)]
    )
    return found


@pytest.mark.parametrize(
    ("accelerator", "device"), [(True, None), (True, "xpu:1"), (False, "xpu")], indirect=["accelerator"]
)
def test_all_devices_in_use_are_restored(accelerator: _Accelerator, device: str | None) -> None:
    with preserve_random_state(None if device is None else torch.device(device)):
        torch.manual_seed(0)
    assert accelerator.states == [10, 20]


@pytest.mark.parametrize("accelerator", [False], indirect=True)
def test_an_accelerator_that_nothing_has_used_is_not_started(accelerator: _Accelerator) -> None:
    torch.manual_seed(42)
    with preserve_random_state():
        torch.manual_seed(0)  # in advance, for its first use
    assert not accelerator.used
    assert accelerator.states == [42, 42]
    accelerator.states = [1, 2]  # the caller has seeded it separately
    with preserve_random_state(torch.device("cpu")):
        torch.rand(3)
    with use_seeded_generators(0, torch.device("cpu")):
        torch.rand(3)
    assert not accelerator.used
    assert accelerator.states == [1, 2]
