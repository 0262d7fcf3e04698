"""Bytes a parameter with weights in bf16 and moments in 8 bits: predicted, promised and those of a real step."""

from __future__ import annotations

import pytest

from benchmarks.weight_formats import BYTES, HAS_TORCHAO, bytes_of_a_step


@pytest.mark.parametrize("name", BYTES)
def test_bytes_a_parameter_are_predicted(name: str) -> None:
    if BYTES[name].state != "fp32" and not HAS_TORCHAO:
        pytest.skip("needs torchao")
    (row,) = bytes_of_a_step(256, [name])
    assert row["within"], row
