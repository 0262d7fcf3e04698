"""Make the picture of a report that README shows.

    python -m tests.report.picture

The run is a real one: a module overflows in fp16 in its first step, the guard finds it and keeps it in fp32.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from halfstep.cli.main import build
from tests.support import troubled
from tests.support.chromium import Chromium

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "report.png"
WIDTH, HEIGHT = 1280, 1455


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # As somebody's own file, in the folder from which it is trained.
        shutil.copy(troubled.__file__, "overflowing.py")
        sys.path.insert(0, folder)
        own = import_module("overflowing")
        own.fit(
            Path("runs"),
            own.InOneModule,
            run__dir="runs/overflow",
            guard__mode="repair",
            train__steps=120,
            run__log_every=10,
        )
        build()(["report", "runs/overflow", "--output", "report.html"], standalone_mode=False)
        browser = Chromium()
        try:
            with browser.open(Path("report.html"), width=WIDTH) as page:
                PICTURE.parent.mkdir(exist_ok=True)
                page.screenshot(PICTURE, HEIGHT)
        finally:
            browser.close()
        os.chdir(PICTURE.parent)
    print(f"wrote {PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
