"""The CPU of this machine, described as one that computes in bf16."""

from __future__ import annotations

from pathlib import Path

BF16 = "amx_bf16 avx512_bf16"


def described_with_bf16(cpuinfo: Path) -> str | None:
    """What `/proc/cpuinfo` would say with bf16 instructions; None where it says so, or says nothing of an x86 CPU."""
    if not cpuinfo.exists():
        return None
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = [line for line in lines if line.startswith("flags")]
    if not flags or "bf16" in flags[0]:
        return None
    return "\n".join(f"{line} {BF16}" if line.startswith("flags") else line for line in lines) + "\n"


def emulates_bf16() -> bool:
    """Whether this CPU computes bf16 by other instructions: numbers are the same, times and workspaces are not."""
    return described_with_bf16(Path("/proc/cpuinfo")) is not None
