"""Devices as data, present or not: their memory, the part of it that a step can use, and their formats."""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar, TypedDict

import torch

from halfstep.errors import UnknownName, WrongUse
from halfstep.host_memory import read_total_memory
from halfstep.json_data import JsonResult
from halfstep.precision.hardware import (
    Device,
    FormatSupport,
    Kind,
    describe_device,
    find_format_support,
    list_device_types,
)
from halfstep.precision.names import AUTO
from halfstep.precision.select import choose_precision

GIB = 1 << 30
HERE = "here"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|mib|mb|m)", re.IGNORECASE)
_KINDS_OF_TORCH = ("cpu", "cuda", "hip", "rocm", "mps", "xpu")
_VENDORS = re.compile(r"nvidia|geforce|amd|instinct|tesla|quadro|radeon|intel|apple")
# Form factors and memory types, which torch and vendors append to names.
_LONG_NAME_ENDS = ("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e")


@dataclass(frozen=True)
class Target(JsonResult):
    """A device for which memory is estimated."""

    json_keys: ClassVar[tuple[str, ...]] = (
        "id",
        "device.name",
        "device.kind",
        "memory",
        "reserved",
        "margin",
        "usable",
    )
    id: str
    """The name to type."""
    device: Device
    memory: int
    """Total memory in bytes, as the driver reports it; as the vendor states it where that is not known."""
    reserved: int
    """Bytes assumed to be used by the process itself: the driver's context and its libraries."""
    margin: float
    """Share of the rest that is left free, because an allocator cannot fill every gap."""

    @property
    def usable(self) -> int:
        """Return the bytes that the tensors of a step may use."""
        return max(0, int((self.memory - self.reserved) * (1 - self.margin)))

    @property
    def rules(self) -> str:
        """Return the device type whose autocast rules apply.

        AMD's GPUs are `cuda` in torch, and a GPU of unknown make is treated as such.
        """
        # ROCm builds of torch use the name "cuda" for AMD's GPUs.
        return "cuda" if self.device.kind in ("cuda", "rocm", "other") else self.device.kind

    def ability(self, format_name: str) -> FormatSupport:
        """Return whether the device computes in the format natively, and the reason."""
        return find_format_support(self.device, format_name)


def device_named(text: str) -> Target:
    """Return the device for a short name, a vendor's name, a size such as 24GB, `cpu` or `here`.

    Raises `UnknownName` for an unknown, absent or ambiguous device, and `WrongUse` for a size that is too small.
    """
    size = _SIZE.fullmatch(text.strip())
    if size:
        return _build_target_of_size(float(size[1]), size[2].lower())
    word = text.strip().lower()
    kind, _, number = word.partition(":")
    # Before the list of cards: a name of torch means this machine.
    if kind in (HERE, *list_device_types(), *_KINDS_OF_TORCH):
        _refuse_absent_device(text, kind, number)
        place = None if word == HERE else word
        device = describe_device(place)
        return _build_target(place or HERE, device, _read_device_memory(device))
    matches = _match_name(_normalize_name(text))
    # A name such as "a100" may stand for several sizes of memory: it is never guessed.
    if len(matches) == 1:
        return _build_known_target(matches[0])
    if matches:
        raise UnknownName(
            f"device {text!r} comes in {len(matches)} sizes",
            allowed=", ".join(matches),
            do=f"name one: --device {matches[-1]}",
        )
    raise _unknown_device_error(text)


def _refuse_absent_device(text: str, kind: str, number: str) -> None:
    """Raise `UnknownName` for a device of torch that this machine does not have."""
    there = (
        0
        if kind not in (HERE, *list_device_types())
        else 1
        if kind in (HERE, "cpu")
        else torch.accelerator.device_count()
    )
    if there and (":" not in text or (number.isascii() and number.isdigit() and int(number) < there)):
        return
    raise UnknownName(
        f"this machine has no {text.strip()}",
        allowed=f"{', '.join(list_device_types())}, {HERE}, or a device that is not here",
        do="name one: --device a100-80gb, or its memory: --device 24GB",
    )


def list_device_ids() -> list[str]:
    """Return the short names of all devices in devices.json."""
    return list(_read_devices_by_id())


class _DeviceRow(TypedDict, total=False):
    id: str
    name: str
    kind: Kind
    gib: float
    driver_mib: int
    capability: tuple[int, int]
    arch: str
    isa: list[str]


class _DeviceTable(TypedDict):
    """The content of devices.json."""

    margin: float
    reserved_gib: dict[str, float]
    devices: list[_DeviceRow]


@functools.cache
def _read_device_table() -> _DeviceTable:
    read: _DeviceTable = json.loads(resources.files(__package__).joinpath("devices.json").read_text(encoding="utf-8"))
    return read


@functools.cache
def _read_devices_by_id() -> dict[str, _DeviceRow]:
    return {row["id"]: row for row in _read_device_table()["devices"]}


def _build_known_target(name: str) -> Target:
    row = _read_devices_by_id()[name]
    return _build_target(
        name,
        Device(
            kind=row["kind"],
            name=row["name"],
            # JSON has no tuples, and capabilities are compared with some.
            capability=(row["capability"][0], row["capability"][1]) if "capability" in row else None,
            arch=row.get("arch", ""),
            isa=frozenset(row.get("isa", ())),
        ),
        row["driver_mib"] << 20 if "driver_mib" in row else int(row["gib"] * GIB),
    )


def _build_target(name: str, device: Device, memory: int) -> Target:
    reserved = _read_device_table()["reserved_gib"]
    return Target(
        name, device, memory, int(reserved.get(device.kind, reserved["other"]) * GIB), _read_device_table()["margin"]
    )


def _build_target_of_size(amount: float, unit: str) -> Target:
    """Return a device of this size. GB is read as GiB, because GPU vendors write GB for nearly that."""
    memory = int(amount * (GIB if unit.startswith("g") else GIB >> 10))
    name = f"{amount:g}{'GB' if unit.startswith('g') else 'MB'}"
    target = _build_target(name, Device(kind="other", name=f"a GPU with {name}"), memory)
    if not target.usable:
        raise WrongUse(
            f"a device with {name}",
            allowed=f"more than the {target.reserved / GIB:g} GiB that a process is assumed to take for itself",
            do="--device 4GB, or the name of a device",
        )
    return target


def _read_device_memory(device: Device) -> int:
    kind = torch.device(device.place).type
    if kind in ("cuda", "xpu"):
        return int(getattr(torch, kind).get_device_properties(torch.device(device.place)).total_memory)
    if kind == "mps":
        # Memory is shared with the CPU there; Metal recommends a limit for the GPU.
        return int(torch.mps.recommended_max_memory())
    return read_total_memory()


def _normalize_name(text: str) -> str:
    """Return a name normalized for comparison: no vendor, no connector, no spaces."""
    words = [word for word in re.split(r"[\s_-]+", text.strip().lower()) if word not in _LONG_NAME_ENDS]
    return _VENDORS.sub("", "".join(words))


def _match_name(plain: str) -> list[str]:
    """Return the device with this name, also with its memory appended; else those that differ only in memory."""
    for name, row in _read_devices_by_id().items():
        if plain in (_normalize_name(name), _normalize_name(row["name"]), f"{_normalize_name(name)}{row['gib']}gb"):
            return [name]
    return [name for name in _read_devices_by_id() if plain and _normalize_name(re.sub(r"-\d+gb$", "", name)) == plain]


def _unknown_device_error(text: str) -> UnknownName:
    plain = {_normalize_name(name): name for name in _read_devices_by_id()}
    near = [plain[found] for found in difflib.get_close_matches(_normalize_name(text), plain, n=1, cutoff=0.6)]
    # Another number is another card: a suggestion is made only if the typed number is a prefix of its number.
    meant = bool(near) and _extract_card_number(near[0]).startswith(_extract_card_number(text))
    size = "give its memory instead: --device 24GB"
    return UnknownName(
        f"device {text!r} is not known",
        allowed=f"{', '.join(_read_devices_by_id())}, a size such as 24GB, {', '.join(list_device_types())}, {HERE}",
        do=f"did you mean {near[0]!r}?" if meant else f"{size} ({near[0]} is another card)" if near else size,
    )


def _extract_card_number(name: str) -> str:
    """Return the digits of a card's name, without those of its memory."""
    return re.sub(r"\D", "", re.sub(r"[\s_-]\d+\s*gb?$", "", name.strip().lower()))


_UNKNOWN_NARROW = "bf16"
"""What stands in for `auto` on a device given as a size, whose formats are unknown."""


def choose_target_precision(target: Target, asked: str = AUTO) -> str:
    """Return the precision that `auto` or `amp` would choose on the device."""
    if target.device.kind == "other":
        return _UNKNOWN_NARROW
    return choose_precision(asked, device=target.device, fallback=True).precision.name
