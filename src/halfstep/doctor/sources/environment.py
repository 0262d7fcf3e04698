"""Environment variables that decide a precision; no other variable is read. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from halfstep.doctor.settings import FoundSetting, SettingSource, format_safe_text
from halfstep.doctor.sources.accelerate import WORDS, build_accelerate_claim
from halfstep.doctor.sources.reading import describe_claim, read_lightning_word
from halfstep.errors import build_unknown_name_error
from halfstep.precision.names import PrecisionClaim

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
USE_CPU = "ACCELERATE_USE_CPU"
TORCH_TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
NVIDIA_TF32 = "NVIDIA_TF32_OVERRIDE"
LIGHTNING = "PL_TRAINER_PRECISION"
FABRIC = "LT_PRECISION"

TOOLS = {MIXED_PRECISION: "accelerate", LIGHTNING: "lightning", FABRIC: "fabric"}
"""The program that reads a variable, of the variables that belong to one program."""

ON = frozenset({"1", "true", "yes", "on", "y", "t"})


def from_environment(variables: Mapping[str, str]) -> SettingSource:
    """Read the variables of accelerate, torch, NVIDIA's libraries and XLA."""
    found = [read_variable(name, variables[name]) for name in VARIABLES if variables.get(name)]
    return SettingSource("environment", "the environment", found)


def read_variable(name: str, value: str) -> FoundSetting:
    """Return the setting of one of VARIABLES; raise `UnknownName` for a word that accelerate does not know."""
    return _READERS[name](name, value)


def _read_accelerate_variable(name: str, value: str) -> FoundSetting:
    if value.lower() not in WORDS:
        raise build_unknown_name_error(name, format_safe_text(value), WORDS)
    claim = build_accelerate_claim(name, value, value.lower())
    return replace(
        _build_variable_setting(name, value, f"accelerate: {describe_claim(claim)}", claim), tool=TOOLS[name]
    )


def _read_lightning_variable(name: str, value: str) -> FoundSetting:
    reading = read_lightning_word(name, value)
    setting = _build_variable_setting(name, value, reading.means).read_as(reading)
    return replace(setting, tool=TOOLS[name])


def _read_nvidia_tf32(name: str, value: str) -> FoundSetting:
    if value != "0":
        return _build_variable_setting(name, value, "the libraries' own choice")
    claim = PrecisionClaim(name, value, denies=frozenset({"tf32"}), otherwise="fp32")
    return _build_variable_setting(name, value, "no tf32 in any NVIDIA library", claim)


def _read_torch_tf32(name: str, value: str) -> FoundSetting:
    return _build_variable_setting(
        name, value, "fp32 products run as tf32" if value == "1" else "no effect: only 1 switches"
    )


def _read_use_cpu(name: str, value: str) -> FoundSetting:
    return _build_variable_setting(
        name, value, "accelerate runs on the CPU" if value.lower() in ON else "accelerate picks the device"
    )


def _read_tpu_bf16(name: str, value: str) -> FoundSetting:
    return _build_variable_setting(name, value, "TPU only: fp32 numbers are stored as bf16" if value != "0" else "off")


_READERS: dict[str, Callable[[str, str], FoundSetting]] = {
    MIXED_PRECISION: _read_accelerate_variable,
    USE_CPU: _read_use_cpu,
    TORCH_TF32: _read_torch_tf32,
    NVIDIA_TF32: _read_nvidia_tf32,
    LIGHTNING: _read_lightning_variable,
    FABRIC: _read_lightning_variable,
    "XLA_USE_BF16": _read_tpu_bf16,
    "XLA_DOWNCAST_BF16": _read_tpu_bf16,
}


VARIABLES = tuple(_READERS)
"""The variables that are read."""


def _build_variable_setting(name: str, value: str, means: str, claim: PrecisionClaim | None = None) -> FoundSetting:
    return FoundSetting("environment", "the environment", name, value, means, claim=claim)
