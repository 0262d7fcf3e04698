"""The way of one command through the source, up to its first optimizer step: files, functions, calls between files.

    python benchmarks/walk.py [--top 15] [RECIPE] [SETTINGS ...]

`halfstep train RECIPE --bf16` runs in this process under `sys.setprofile`, in a temporary folder, traced until an
optimizer of torch takes its first step. Functions of halfstep on the main thread count, without those that run during
an import. A call is between files if its direct caller is in another file of halfstep; a generator counts once, not
for each item. `--top` lists the functions that are called most, and the pairs of files.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch  # before the trace: the first import of torch is not part of the walk

import halfstep

PACKAGE = str(Path(halfstep.__file__).parent)
OPTIMIZERS = Path(torch.optim.__file__).parent


class Walk:
    """The calls of a traced command."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.between_files: Counter[str] = Counter()
        """Direct calls by the file of the caller and of the function."""
        self.deepest = 0
        self.arrived = False
        self._importing = 0
        self._own: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or a return; the signature is that of `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or self.arrived:
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif self._importing == 0 and code.co_filename.startswith(PACKAGE):
            if event == "return":
                if self._own and self._own[-1] is frame:
                    self._own.pop()
                return
            self._enter(frame, code)
        elif event == "call" and self._own and code.co_name == "step" and Path(code.co_filename).parent == OPTIMIZERS:
            if not isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):  # a schedule
                return
            self.arrived = True
            sys.setprofile(None)

    def _enter(self, frame: FrameType, code: CodeType) -> None:
        resumed = code.co_flags & inspect.CO_GENERATOR and frame.f_lasti > _FIRST_INSTRUCTIONS
        if not resumed and not code.co_name.startswith("<"):
            self.calls[code] += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            if caller.startswith(PACKAGE) and caller != code.co_filename:
                self.between_files[f"{_short(caller)} -> {_short(code.co_filename)}"] += 1
        self._own.append(frame)
        self.deepest = max(self.deepest, len(self._own))

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.calls}


def _short(file: str) -> str:
    return str(Path(file).relative_to(PACKAGE))


_FIRST_INSTRUCTIONS = 4
"""A generator's frame is further than this once it has been entered; its creation and first item are one call."""


def walk(recipe: str, settings: list[str]) -> Walk:
    """Trace a command to its first optimizer step; the run ends after it."""
    from halfstep.cli.main import main

    found = Walk()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--bf16", "train.steps=1", f"run.dir={folder}/run", *settings]
        sys.argv = ["halfstep", "train", recipe, *words]
        sys.setprofile(found)
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.setprofile(None)
    return found


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("recipe", nargs="?", default="segmentation_tiny")
    asked.add_argument("settings", nargs="*")
    asked.add_argument("--top", type=int, default=0)
    given = asked.parse_args()
    found = walk(given.recipe, given.settings)
    if not found.arrived:
        raise SystemExit("no optimizer took a step")
    for code, count in found.calls.most_common(given.top):
        print(f"{count:7,}  {_short(code.co_filename)}:{code.co_firstlineno} {code.co_qualname}")
    for pair, count in found.between_files.most_common(given.top):
        print(f"{count:7,}  {pair}")
    print(
        f"files={len(found.files)} functions={len(found.calls)} calls={found.calls.total()} "
        f"cross_file_calls={found.between_files.total()} depth={found.deepest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
