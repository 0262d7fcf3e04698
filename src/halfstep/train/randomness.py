"""The state of every generator that a process draws from: Python's, NumPy's, torch's, and the device's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import StateMismatch, same_keys
from halfstep.step.attempt import generator_states, set_generator_states


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_generators(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    # Hundreds of numbers each: as tensors they cost a save next to nothing.
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (name, torch.tensor(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": generator_states(device),
    }


def check_generators(state: Any, device: torch.device) -> None:
    """Refuse what `set_generators` could not take."""
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
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_generator_states(state["torch"], device)


def _form(generator: Any) -> list[Any]:
    """The kind of a generator, and how many words it has; what it was at does not matter."""
    if not isinstance(generator, (list, tuple)):
        return [type(generator).__name__]
    return [len(generator), *(list(p.shape) if isinstance(p, Tensor) else p for p in generator if _is_kind(p))]


def _is_kind(part: Any) -> bool:
    return isinstance(part, (Tensor, str))
