"""A device type for tests: `twin:0` and `twin:1`, which torch takes for accelerators and the CPU computes for.

`load(folder)` compiles `twin_device.cpp` and registers it for the rest of the process: start one for it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")


def load(folder: Path) -> None:
    torch.utils.rename_privateuse1_backend("twin")
    module = ModuleType("torch.twin")
    answers = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 2}
    answers |= {"current_device": 0, "get_amp_supported_dtype": [torch.bfloat16, torch.float16]}
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module("twin", module)
    cpp_extension.load(
        "twin_device", [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O0"], is_python_module=False
    )
