"""JPEG files of few bytes and many scans: each scan costs a pass over all pixels."""

from __future__ import annotations

import io
import time

from PIL import Image

from faults.outcome import Outcome
from halfstep.data.dataset import BadSample
from halfstep.data.image_files import MOST_SCANS
from halfstep.data.image_io import read_image

ID = "F52"
WHAT = "a JPEG with more scans than encoders write is a bad sample before it is decoded; any other is read"
SLOWEST = 1.0
"""Seconds of the processor for a rejected file; 2,000 scans of 16 megapixels take 44 s to decode."""
SCANS = (101, 110, 200)
FULL = (101, 102, 110, 150, 200, 300, 500, 700, 1000, 1500, 2000, 5000, 10_000)
GOOD = (6, 50, 100)


def scanned(scans: int, side: int = 400) -> bytes:
    """Return a progressive JPEG of so many scans, at least six: the last one is repeated."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True, quality=50)
    content = file.getvalue()
    last = content.rfind(b"\xff\xda")
    return content[:-2] + content[last:-2] * (scans - content.count(b"\xff\xda")) + b"\xff\xd9"


def run(full: bool) -> Outcome:
    counts, side = (FULL, 4000) if full else (SCANS, 400)
    passed, slowest = 0, 0.0
    for count in counts:
        content, began = scanned(count, side), time.process_time()
        try:
            read_image(content, 1)
        except BadSample as bad:
            passed += f"more than {MOST_SCANS} scans" in bad.reason
        slowest = max(slowest, time.process_time() - began)
    for count in GOOD:
        passed += read_image(scanned(count), 1).shape == (1, 400, 400)
    n = len(counts) + len(GOOD) + 1
    return Outcome(passed + (slowest <= SLOWEST), n, f"{slowest * 1e3:.0f}ms")
