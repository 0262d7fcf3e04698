"""Read and set the state of every random generator: Python's, NumPy's, torch's, and the device's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import StateMismatch, same_keys
from halfstep.step.step_inputs import generator_states, set_generator_states


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    # NumPy takes seeds of 32 bits only.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_generators(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators as plain data and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    # Hundreds of numbers each: as tensors they add almost nothing to a save.
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": generator_states(device),
    }


def check_generators(state: Any, device: torch.device) -> None:
    """Raise StateMismatch where `set_generators` could not load `state`."""
    own = read_generators(device)
    same_keys("random numbers", own, state)
    for name, generator in own.items():
        if _form(generator) != _form(state[name]):
            raise StateMismatch(
                f"random numbers of {name} were saved in another form: {_form(state[name])}",
                allowed=f"{_form(generator)}, as on this device",
                do="run it on the kind of device, and with the versions, that it was begun with",
            )


def set_generators(state: Any, device: torch.device) -> None:
    """Set all generators to a state that `check_generators` accepted."""
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_generator_states(state["torch"], device)


def _form(generator: Any) -> list[Any]:
    """Return the kind of a generator and its number of words, regardless of its position."""
    if not isinstance(generator, (list, tuple)):
        return [type(generator).__name__]
    return [len(generator), *(list(p.shape) if isinstance(p, Tensor) else p for p in generator if _is_kind(p))]


def _is_kind(part: Any) -> bool:
    return isinstance(part, (Tensor, str))
