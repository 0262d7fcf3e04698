import pytest
import torch

from halfstep.formats import BF16, FORMATS, FP8_E4M3, FP16, FP32, TF32, find_format, is_narrow


@pytest.mark.parametrize(
    ("name", "largest", "exact"),
    [
        ("fp16", 65504.0, 2048),
        ("bf16", 3.3895313892515355e38, 256),
        ("fp32", 3.4028234663852886e38, 2**24),
        ("fp64", 1.7976931348623157e308, 2**53),
        ("fp8_e4m3", 448.0, 16),
        ("fp8_e5m2", 57344.0, 8),
        ("tf32", 3.4011621342146535e38, 2048),
    ],
)
def test_published_figures(name: str, largest: float, exact: int) -> None:
    assert FORMATS[name].name == name
    assert FORMATS[name].largest == pytest.approx(largest, rel=1e-12)
    assert FORMATS[name].largest_exact_integer == exact


@pytest.mark.parametrize("known", [f for f in FORMATS.values() if f.bytes > 1 and f.dtype], ids=lambda f: f.name)
def test_the_largest_exact_integer_is_the_last(known: object) -> None:
    dtype, last = known.dtype, known.largest_exact_integer  # type: ignore[attr-defined]
    assert torch.tensor(last, dtype=dtype).item() == last
    assert torch.tensor(last - 1, dtype=dtype).item() == last - 1
    assert int(torch.tensor(last + 1, dtype=torch.float64).to(dtype).item()) != last + 1


def test_tf32_has_the_range_of_fp32_and_the_steps_of_fp16() -> None:
    assert TF32.epsilon == FP16.epsilon
    assert TF32.smallest_normal == FP32.smallest_normal
    assert FP16.largest < BF16.largest < TF32.largest < FP32.largest
    assert (TF32.dtype, TF32.bytes) == (None, 4)


def test_formats_of_dtypes() -> None:
    assert find_format(torch.bfloat16) is BF16
    assert find_format(torch.float8_e4m3fn) is FP8_E4M3
    assert find_format(torch.int64) is None


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [
        (torch.float16, True),
        (torch.bfloat16, True),
        (torch.float8_e5m2, True),
        (torch.float32, False),
        (torch.float64, False),
        (torch.int8, False),
        (torch.complex32, False),
    ],
)
def test_narrow_is_floating_point_under_32_bits(dtype: torch.dtype, narrow: bool) -> None:
    assert is_narrow(dtype) is narrow
