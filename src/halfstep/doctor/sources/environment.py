"""Environment variables that decide a precision; no other variable is read. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from halfstep.doctor.settings import FoundSetting, SettingSource, printable
from halfstep.doctor.sources.accelerate import WORDS, claim_of
from halfstep.doctor.sources.reading import lightning_claim, meaning
from halfstep.errors import unknown_name
from halfstep.precision.names import Claim

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
USE_CPU = "ACCELERATE_USE_CPU"
TORCH_TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
NVIDIA_TF32 = "NVIDIA_TF32_OVERRIDE"
LIGHTNING = "PL_TRAINER_PRECISION"
FABRIC = "LT_PRECISION"

ON = frozenset({"1", "true", "yes", "on", "y", "t"})


def from_environment(variables: Mapping[str, str]) -> SettingSource:
    """Read the variables of accelerate, torch, NVIDIA's libraries and XLA."""
    found = [read_variable(name, variables[name]) for name in VARIABLES if variables.get(name)]
    return SettingSource("environment", "the environment", found)


def read_variable(name: str, value: str) -> FoundSetting:
    """Return the setting of one of VARIABLES; raise `UnknownName` for a word that accelerate does not know."""
    return _READERS[name](name, value)


def _accelerate_variable(name: str, value: str) -> FoundSetting:
    if value.lower() not in WORDS:
        raise unknown_name(name, printable(value), WORDS)
    claim = claim_of(name, value, value.lower())
    return replace(_setting(name, value, f"accelerate: {meaning(claim)}", claim), tool="accelerate")


def _lightning_variable(name: str, value: str) -> FoundSetting:
    reading = lightning_claim(name, value)
    setting = _setting(name, value, reading.means).read_as(reading)
    return replace(setting, tool="lightning" if name == LIGHTNING else "fabric")


def _nvidia_tf32(name: str, value: str) -> FoundSetting:
    if value != "0":
        return _setting(name, value, "the libraries' own choice")
    claim = Claim(name, value, denies=frozenset({"tf32"}), otherwise="fp32")
    return _setting(name, value, "no tf32 in any NVIDIA library", claim)


def _torch_tf32(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "fp32 products run as tf32" if value == "1" else "no effect: only 1 switches")


def _use_cpu(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "accelerate runs on the CPU" if value.lower() in ON else "accelerate picks the device")


def _bf16_on_tpu(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "TPU only: fp32 numbers are stored as bf16" if value != "0" else "off")


_READERS: dict[str, Callable[[str, str], FoundSetting]] = {
    MIXED_PRECISION: _accelerate_variable,
    USE_CPU: _use_cpu,
    TORCH_TF32: _torch_tf32,
    NVIDIA_TF32: _nvidia_tf32,
    LIGHTNING: _lightning_variable,
    FABRIC: _lightning_variable,
    "XLA_USE_BF16": _bf16_on_tpu,
    "XLA_DOWNCAST_BF16": _bf16_on_tpu,
}


VARIABLES = tuple(_READERS)
"""The variables that are read."""


def _setting(name: str, value: str, means: str, claim: Claim | None = None) -> FoundSetting:
    return FoundSetting("environment", "the environment", name, value, means, claim=claim)
