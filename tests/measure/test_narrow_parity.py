"""The benchmark of fp8's accuracy, on one seed and few updates: fp8 is near bf16, and mxfp8 without biases is not."""

from __future__ import annotations

import pytest

from benchmarks.narrow_parity import trained

pytest.importorskip("torchao")


def test_fp8_is_near_bf16_and_a_sabotaged_conversion_is_not() -> None:
    arms = ("bf16", "fp8", "mxfp8 without biases")
    base, narrow, sabotaged = (trained("vit", arm, seed=0, updates=6) for arm in arms)
    assert base[1] == 0.0
    assert min(narrow[1], sabotaged[1]) > 0.9
    assert narrow[0] == pytest.approx(base[0], rel=0.01)
    assert sabotaged[0] > 1.05 * base[0]
