"""Describe the machine that a run is sized for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from halfstep.host_memory import read_total_memory
from halfstep.launch_variables import count_cores_per_rank, read_launched_rank

GIGA = 2**30
CORE, ACCELERATOR = 30e9, 5e12
"""Floating-point operations per second in training: a laptop core and a small GPU reach them, and most exceed them."""
_NODES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd", "dri/renderD*", "accel*", "davinci*", "habana*")
"""The device files that drivers of accelerators create on Linux."""
_DEV = Path("/dev")


@dataclass(frozen=True)
class Machine:
    """The hardware that decides how large a run may be; it may describe another machine than this one."""

    cores: int
    memory: int
    """Bytes for training: the accelerator's own memory, or the host's."""
    has_accelerator: bool = False
    devices: int = 1
    """Ranks that train together, each on a device of this kind."""

    @property
    def speed(self) -> float:
        """A cautious estimate of the operations per second of all devices; it affects duration, not results."""
        return self.devices * (ACCELERATOR if self.has_accelerator else CORE * self.cores)

    def __str__(self) -> str:
        what = "accelerator" if self.has_accelerator else "core"
        number = self.devices if self.has_accelerator else self.cores
        return f"{number} {what}{'s' * (number != 1)}, {self.memory / GIGA:.0f} GB"


def detect_machine(device: str) -> Machine:
    """Return the machine that this rank runs on; `device` is the recipe's setting."""
    from halfstep.recipe.schema import AUTO

    launched = read_launched_rank()
    ranks, here = launched.world_size, launched.local_world_size or 1
    # Ranks on one host share its memory; an accelerator's memory is each rank's own.
    host = Machine(count_cores_per_rank(), read_total_memory() // here, devices=ranks)
    # Linux certainly has no accelerator without a device file; on other systems torch has to be asked.
    if device == AUTO and sys.platform == "linux" and not any(True for pattern in _NODES for _ in _DEV.glob(pattern)):
        return host
    # Imported only now: torch takes seconds to load, and a command that is refused afterwards does not need it.
    import torch

    from halfstep.train.process_group import resolve_device

    place = resolve_device(device)
    if torch.empty(0, device=place).is_cpu:
        return host
    return Machine(count_cores_per_rank(), _read_accelerator_memory(place), has_accelerator=True, devices=ranks)


def _read_accelerator_memory(place: object) -> int:
    """Return the memory of an accelerator; one without properties, such as Apple's, shares the host's memory."""
    import torch

    module = getattr(torch, torch.device(str(place)).type)
    tell = getattr(module, "get_device_properties", None)
    # Half of it: the host needs the other half.
    return int(tell(place).total_memory) if tell else read_total_memory() // 2
