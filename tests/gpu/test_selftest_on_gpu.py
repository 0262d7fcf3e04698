"""The self-test on an accelerator: every part passes, or is skipped for a reason. Not run without one."""

from __future__ import annotations

import pytest
import torch

from halfstep.selftest.names import PARTS, PASSED, SKIPPED
from halfstep.selftest.run import selftest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]


def test_the_self_test_passes_here() -> None:
    report = selftest(PARTS)
    assert report["passed"], [row for row in report["parts"] if row["error"]]
    assert report["device"]["kind"] in ("cuda", "rocm")
    skipped = [row["part"] for row in report["parts"] if row["result"] == SKIPPED]
    assert skipped == ([] if torch.cuda.device_count() > 1 else ["ranks"])


def test_the_memory_is_that_of_the_device() -> None:
    (row,) = selftest(["memory"])["parts"]
    assert row["result"] == PASSED, row["error"]
    assert row["figures"]["fp32"]["counted"] > 2**20
