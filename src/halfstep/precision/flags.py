"""torch's process-wide switches that change what "fp32" means: read, reported, and only set inside a scope."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Fp32Mode = Literal["ieee", "tf32"]

_SWITCHES: dict[str, tuple[Any, ...]] = {
    "cuda": (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,  # type: ignore[attr-defined]
    ),
    # conv and rnn of oneDNN follow matmul's switch only when set themselves; all three are kept together.
    "cpu": (
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
        torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
    ),
}
_STRICT = ("ieee", "none")


def read_flags() -> dict[str, str]:
    """The switches as they stand now, for a report beside any figure that calls itself fp32."""
    return {
        "cuda.matmul": torch.backends.cuda.matmul.fp32_precision,
        "cudnn.conv": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "mkldnn.matmul": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "mkldnn.enabled": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def computes_tf32(device: torch.device) -> bool:
    """Whether fp32 numbers on this device are multiplied as tf32 just now."""
    return any(switch.fp32_precision == "tf32" for switch in _SWITCHES.get(device.type, ()))


def fp32_scope(mode: Fp32Mode, device: torch.device) -> AbstractContextManager[None]:
    """Multiplications of fp32 numbers run in `mode` inside this scope, and as before after it."""
    switches = _SWITCHES.get(device.type, ())
    if not switches:
        return nullcontext()
    return _Fp32Scope(mode, switches)


class _Fp32Scope:
    """Reusable, and free of work where the switches already say what is wanted."""

    def __init__(self, mode: Fp32Mode, switches: tuple[Any, ...]) -> None:
        self._mode, self._switches = mode, switches
        self._good = _STRICT if mode == "ieee" else (mode,)
        self._before: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        for switch in self._switches:
            now = switch.fp32_precision
            if now not in self._good:
                self._before.append((switch, now))
                switch.fp32_precision = self._mode

    def __exit__(self, *_: object) -> None:
        while self._before:
            switch, value = self._before.pop()
            switch.fp32_precision = value


class MkldnnKept:
    """Another scope, inside which oneDNN's switch may be turned; it stands as before afterwards, errors included."""

    def __init__(self, inner: AbstractContextManager[None]) -> None:
        self._inner = inner
        self._before: Any = True

    def __enter__(self) -> None:
        self._before = torch.backends.mkldnn.enabled
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.backends.mkldnn.enabled = self._before
        self._inner.__exit__(*error)
