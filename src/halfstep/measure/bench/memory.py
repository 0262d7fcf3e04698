"""What one update of an arm takes: counted by the allocator, and predicted part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.files import read_json, write_json
from halfstep.measure.bench.results import Memory
from halfstep.measure.case import Subject
from halfstep.measure.process import ArmProcess
from halfstep.measure.setting import Setting


@dataclass(frozen=True)
class MemoryOf:
    """Asked once for each arm, before its runs: an arm that the device refuses is then not trained at all."""

    subject: Subject
    setting: Setting | None = None
    """None is as the case itself says."""
    kept: Path | None = None
    identity: Mapping[str, Any] | None = None

    def __call__(self) -> Memory:
        found = read_json(self.kept) if self.kept else None
        if isinstance(found, dict) and found.get("identity") == self.identity:
            return Memory.from_dict(found["memory"])
        setting = self.setting or self.subject.open().setting
        with ArmProcess(self.subject, setting) as arm:
            place = arm.open()["conditions"]["place"]
            measured = arm.memory()
        memory = _with_parts(measured, self.subject, setting, place)
        if self.kept:
            write_json(self.kept, {"identity": self.identity, "memory": memory.as_dict()})
        return memory


def _with_parts(measured: int, subject: Subject, setting: Setting, place: str) -> Memory:
    from halfstep.measure.memory.estimate import ledger_of

    try:
        return Memory(measured, dict(ledger_of(subject.open, setting, place).at_peak))
    except (HalfstepError, RuntimeError, NotImplementedError, TypeError) as error:
        # A model that fake tensors cannot run is measured all the same.
        return Memory(measured, None, f"not predicted: {str(error).splitlines()[0] if str(error) else error!r}")
