"""Save, restore and seed random number generators: Python's, NumPy's and torch's own, and objects that a user made."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

GeneratorObject: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"
"""A generator that somebody made, with its own stream of random numbers."""


@dataclass(frozen=True)
class HostStates:
    """The states of the generators that every program shares: Python's, NumPy's and torch's for the CPU."""

    python: tuple[Any, ...]
    numpy: Any
    """None if NumPy is not imported."""
    torch: Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of all generators that a block may draw from."""

    host: HostStates
    devices: tuple[tuple[torch.device, Tensor], ...] = ()
    """Of torch's generators of accelerators."""
    objects: tuple[tuple[GeneratorObject, Any], ...] = ()


@contextmanager
def preserve_random_state(
    device: torch.device | None = None, objects: Iterable[GeneratorObject] = ()
) -> Iterator[None]:
    """Let the block draw from all generators, and restore their states after it, also after an error.

    All devices of an accelerator that is in use are included. Reading the state of one that nothing has used so far
    would start it: its generators are restored if the block runs on `device`, or seeds all generators. `objects` are
    generators that a user made.
    """
    states, seed = collect_random_states(device, objects), torch.initial_seed()
    unused = _find_unused_accelerator(device)
    try:
        yield
    finally:
        # torch.manual_seed seeds accelerators in advance, for their first use, with the seed of the CPU.
        if unused is not None and torch.initial_seed() != seed:
            unused.manual_seed_all(seed)
        restore_random_states(states)


@contextmanager
def use_seeded_generators(
    seed: int, device: torch.device | None = None, objects: Iterable[GeneratorObject] = ()
) -> Iterator[None]:
    """Run the block with freshly seeded generators, on the host and on `device`, and restore them after it.

    `objects` keep their states; what the block draws from them is restored, too.
    """
    states = collect_random_states(device, objects)
    try:
        restore_random_states(build_seeded_states(seed, device))
        yield
    finally:
        restore_random_states(states)


@contextmanager
def preserve_host_random_state() -> Iterator[None]:
    """Do the same for code that draws on the host only, as samples do: accelerators belong to the training.

    NumPy takes 0.1 ms for it: negligible once per batch, noticeable once per sample.
    """
    states = _collect_host_states()
    try:
        yield
    finally:
        _restore_host_states(states)


def collect_random_states(device: torch.device | None = None, objects: Iterable[GeneratorObject] = ()) -> RandomStates:
    """Return the states of all generators: see `preserve_random_state`."""
    devices = [each for kind in _list_accelerators_in_use(device) for each in _list_devices(kind)]
    return RandomStates(
        _collect_host_states(),
        tuple((each, _get_device_state(each)) for each in devices),
        _collect_object_states(objects),
    )


def restore_random_states(states: RandomStates) -> None:
    """Set all generators to the states that `collect_random_states` or `build_seeded_states` returned."""
    # Objects first: one of them may be a generator that all share.
    for generator, state in states.objects:
        _set_object_state(generator, state)
    for device, state in states.devices:
        _set_device_state(state, device)
    _restore_host_states(states.host)


def build_seeded_states(
    seed: int, device: torch.device | None = None, objects: Iterable[GeneratorObject] = ()
) -> RandomStates:
    """Return the states of freshly seeded generators, and the current ones of `objects`; no generator is changed."""
    # Not torch.manual_seed: it would also seed accelerators that the block does not run on.
    host = HostStates(
        random.Random(seed).getstate(), _build_numpy_state(seed), torch.Generator().manual_seed(seed).get_state()
    )
    seeded = device is not None and _has_random_state(device.type)
    own = ((device, torch.Generator(device).manual_seed(seed).get_state()),) if device is not None and seeded else ()
    return RandomStates(host, own, _collect_object_states(objects))


# -- the host ---------------------------------------------------------------------------------------------------------


def _find_numpy_random() -> Any:
    """Return `numpy.random`; None if nobody has imported NumPy, which nothing draws from then."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _build_numpy_state(seed: int) -> Any:
    numpy = _find_numpy_random()
    if numpy is None:
        return None
    now = numpy.get_state(legacy=False)
    # A program may have replaced NumPy's generator by one of another kind, which has another form of state.
    kind = getattr(numpy, now["bit_generator"], None)
    return now if kind is None else numpy.RandomState(kind(seed)).get_state(legacy=False)


def _collect_host_states() -> HostStates:
    numpy = _find_numpy_random()
    words = None if numpy is None else numpy.get_state(legacy=False)
    return HostStates(random.getstate(), words, torch.get_rng_state())


def _restore_host_states(states: HostStates) -> None:
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)
    torch.set_rng_state(states.torch)


# -- accelerators -----------------------------------------------------------------------------------------------------

_HOST = ("cpu", "meta")
_RECORDED = ("cuda", "xpu", "mps")


def collect_torch_rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators that a step records: the CPU's, then the device's."""
    if device.type in _RECORDED:
        return [torch.get_rng_state(), _get_device_state(device)]
    return [torch.get_rng_state()]


def set_torch_rng_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Restore the states that `collect_torch_rng_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        _set_device_state(states[1], device)


def _list_accelerators_in_use(device: torch.device | None) -> list[str]:
    """Return the kinds of accelerators with generators that may be drawn from."""
    kinds = [] if device is None or device.type in _HOST else [device.type]
    here = torch.accelerator.current_accelerator()
    if here is not None and here.type not in kinds and _is_initialized(here.type):
        kinds.append(here.type)
    return [kind for kind in kinds if _has_random_state(kind)]


def _has_random_state(kind: str) -> bool:
    return kind not in _HOST and hasattr(torch.get_device_module(kind), "get_rng_state")


def _find_unused_accelerator(device: torch.device | None) -> Any:
    """Return torch's module of the accelerator that nothing has used so far; None if there is none."""
    here = torch.accelerator.current_accelerator()
    found = here is not None and _has_random_state(here.type) and here.type not in _list_accelerators_in_use(device)
    return torch.get_device_module(here) if found else None


def _is_initialized(kind: str) -> bool:
    module = torch.get_device_module(kind)
    # MPS has a single device and is not initialized separately. `is_available` is not called for other accelerators:
    # it may load their driver.
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else bool(module.is_available())


def _list_devices(kind: str) -> list[torch.device]:
    # All of them: torch.manual_seed seeds all, and a model may be spread over several.
    return [torch.device(kind, number) for number in range(torch.get_device_module(kind).device_count())]


def _get_device_state(device: torch.device) -> Tensor:
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def _set_device_state(state: Tensor, device: torch.device) -> None:
    module = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


# -- objects ----------------------------------------------------------------------------------------------------------


def is_generator(thing: Any) -> TypeGuard[GeneratorObject]:
    """Return whether this is an object with its own stream of random numbers."""
    if isinstance(thing, (torch.Generator, random.Random)):
        return True
    numpy = _find_numpy_random()
    return numpy is not None and isinstance(thing, (numpy.Generator, numpy.RandomState))


def _collect_object_states(objects: Iterable[GeneratorObject]) -> tuple[tuple[GeneratorObject, Any], ...]:
    found = []
    for generator in objects:
        # random.SystemRandom has no state.
        with suppress(NotImplementedError):
            found.append((generator, _get_object_state(generator)))
    return tuple(found)


def _get_object_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)


def _set_object_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):  # numpy.random.Generator
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
