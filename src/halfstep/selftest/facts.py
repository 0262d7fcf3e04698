"""What a reader of a self-test must know about the device and its software. No name of a host or a user, no path."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from typing import Any

import torch
import torch.distributed as dist

from halfstep._version import find_package_version
from halfstep.measure.conditions import collect_conditions
from halfstep.precision.hardware import FORMAT_NAMES, Device, describe_device_facts, find_format_support

PACKAGES = ("numpy", "pydantic", "safetensors", "torchvision", "triton")
_PLAIN = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that change what is measured and that hold no path and no name."""
_NAMED = "HALFSTEP_"
"""Variables of which only the name is told: they may hold a path."""
_SHORTEST = 2
"""A name of one letter would be found in ordinary text."""


def collect_device_facts(device: Device) -> dict[str, Any]:
    """Return the device, the versions, the flags and the settings of this process as plain data."""
    now = collect_conditions(device.place)
    plain = {name: anonymize_text(os.environ[name]) for name in _PLAIN if name in os.environ}
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "device": {
            "kind": device.kind,
            "name": device.name,
            "count": 1 if device.kind == "cpu" else torch.accelerator.device_count(),
            "memory": int(torch.cuda.get_device_properties(device.place).total_memory)
            if device.kind in ("cuda", "rocm")
            else None,
            "native": [name for name in FORMAT_NAMES if find_format_support(device, name).native],
            **describe_device_facts(device),
        },
        "versions": {
            **{name: now[name] for name in ("halfstep", "torch", "python")},
            "system": f"{platform.system()} {platform.machine()}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
            **{name: find_package_version(name) for name in PACKAGES},
        },
        "flags": {**now["flags"], "mkldnn.available": str(torch.backends.mkldnn.is_available())},
        **{name: now[name] for name in ("threads", "cores", "load")},
        "settings": plain | {name: "set" for name in sorted(os.environ) if name.startswith(_NAMED)},
    }


_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/:'\"<>|,;()]+){2,}|~(?:[\\/][^\s'\",;()]+)+")


def anonymize_text(text: str) -> str:
    """Return the text with only the last part of each path, and without the names of this host and this user."""
    text = _PATH.sub(lambda found: re.split(r"[\\/]", found[0])[-1], text)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name, as in many containers
        user = ""
    for name, word in ((socket.gethostname(), "host"), (user, "user")):
        if len(name) >= _SHORTEST:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", f"({word})", text)
    return text
