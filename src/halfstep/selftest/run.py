"""Run the parts in a process of their own, one after another, and collect one report."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import CandidateFailed, CandidateProcess, CandidateTooSlow
from halfstep.selftest.names import FAILED, FORM, SKIPPED, PartRow

PATIENCE = 1200.0
"""Seconds after which a part hangs: many times what any takes, also on a machine that is busy."""
OnPart = Callable[[str, int, int], None]
"""A callback that is given the part that begins, its number and how many there are."""


def selftest(names: Sequence[str], *, device: str | None = None, on_part: OnPart = lambda *_: None) -> dict[str, Any]:
    """Run parts by name on a device, the best one present if it is None; return the report as plain data.

    Ctrl-C ends it with the parts so far, and `interrupted` is set. Raises WrongUse for a device that is not here.
    """
    began = time.perf_counter()
    report: dict[str, Any] = {"form": FORM, "parts": [], "interrupted": False}
    with _create_temporary_folder() as folder, _PartRunner(folder, device) as parts:
        try:
            on_part("", 0, len(names))
            report |= parts.about()
            for number, name in enumerate(names, 1):
                on_part(name, number, len(names))
                report["parts"].append(parts.row(name))
        except KeyboardInterrupt:
            report["interrupted"] = True
            report["parts"] += [
                _build_part_row(name, SKIPPED, 0.0, figure="interrupted") for name in names[len(report["parts"]) :]
            ]
    report["passed"] = not report["interrupted"] and all(row["result"] != FAILED for row in report["parts"])
    return report | {"seconds": round(time.perf_counter() - began, 1)}


class _PartRunner:
    """The process of the parts, started anew for the next part where one has ended it."""

    def __init__(self, folder: Path | None, device: str | None) -> None:
        self._folder, self._device = folder, device
        self._stack = ExitStack()
        self._process: _PartProcess | None = None

    def about(self) -> dict[str, Any]:
        """Start the process, and return what it says about the device."""
        process = self._stack.enter_context(_PartProcess(self._folder, self._device))
        found: dict[str, Any] = process._ask(process._begin, PATIENCE)
        self._process = process
        return found

    def row(self, name: str) -> PartRow:
        """Run a part and return its row."""
        began = time.perf_counter()
        try:
            if self._process is None:
                self.about()
            assert self._process is not None
            return self._process.part(name)
        except (CandidateFailed, CandidateTooSlow) as error:
            self.close()
            from halfstep.selftest.facts import anonymize_text

            seconds = round(time.perf_counter() - began, 1)
            return _build_part_row(
                name, FAILED, seconds, error=anonymize_text(f"the process of this part died: {error}")
            )

    def close(self) -> None:
        """End the process and everything that it started."""
        self._process = None
        self._stack.close()

    def __enter__(self) -> _PartRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _PartProcess(CandidateProcess):
    """The other end of `halfstep.selftest.worker`."""

    module = f"{__package__}.worker"

    def __init__(self, folder: Path | None, device: str | None) -> None:
        super().__init__(Subject(""), StepSetting(), device)
        self._begin = {"folder": str(folder) if folder else None, "device": device}

    def __enter__(self) -> _PartProcess:
        return self

    def part(self, name: str) -> PartRow:
        """Run a part and return its row."""
        row: PartRow = self._ask({"do": name}, PATIENCE)
        return row


def _build_part_row(name: str, result: str, seconds: float, *, figure: str = "", error: str | None = None) -> PartRow:
    return {"part": name, "result": result, "figure": figure, "figures": {}, "error": error, "seconds": seconds}


@contextmanager
def _create_temporary_folder() -> Iterator[Path | None]:
    """Yield a folder for what the parts write, and remove it; None if no temporary folder can be written."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="halfstep-selftest-"))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # once more, where Ctrl-C came in the middle of it
