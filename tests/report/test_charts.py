"""Where charts put curves, ticks and texts."""

from __future__ import annotations

import math

import pytest

from halfstep.report.bars import MemoryUse, intervals, memory_bars
from halfstep.report.charts import BOTTOM, HEIGHT, HOVERS, LEFT, RIGHT, TOP, WIDTH, Curve, line_chart, tick_text


def drawn(*values: float, **options: object) -> list[tuple[float, float]]:
    chart = line_chart("a", [Curve("c", list(range(len(values))), values)], **options)  # type: ignore[arg-type]
    assert chart is not None
    return [tuple(map(float, place.split(","))) for place in chart.lines[0].points.split()]  # type: ignore[misc]


def test_a_curve_fills_its_chart() -> None:
    places = drawn(0.0, 10.0, 5.0)
    assert places == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, TOP),
        (WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) / 2),
    ]


def test_a_spike_gets_a_logarithmic_axis_and_is_kept_among_a_million_points() -> None:
    values = [1.0] * 1_000_000
    values[777_777] = 1000.0
    chart = line_chart("a", [Curve("c", range(1_000_000), values)])
    assert chart is not None
    places = [tuple(map(float, place.split(","))) for place in chart.lines[0].points.split()]
    assert len(places) <= 300
    assert min(y for _, y in places) == TOP
    assert [tick.label for tick in chart.y_ticks] == ["1", "10", "100", "1k"]
    assert len(chart.hovers) <= HOVERS


def test_a_loss_scale_is_labelled_by_its_powers_of_two() -> None:
    chart = line_chart("a", [Curve("c", [0, 1], [1024.0, 65536.0])], scale="log2")
    assert chart is not None
    assert [tick.label for tick in chart.y_ticks] == ["2¹⁰", "2¹²", "2¹⁴", "2¹⁶"]


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert len(drawn(1.0, math.nan, 2.0, math.inf)) == 2
    assert line_chart("a", [Curve("c", [1, 2], [math.nan, math.inf])]) is None
    assert line_chart("a", []) is None


@pytest.mark.parametrize(
    "values", [(3.0,), (0.0, 0.0), (-1e-9, 1e-9), (1e299, -1e299), (5e-324, 1.0), (2.0, 2.0000001)]
)
@pytest.mark.parametrize("scale", ["auto", "linear", "zero", "log2"])
def test_every_range_has_ticks_inside_of_the_chart(values: tuple[float, ...], scale: str) -> None:
    chart = line_chart("a", [Curve("c", list(range(len(values))), values)], scale=scale)  # type: ignore[arg-type]
    assert chart is not None
    assert 1 <= len(chart.y_ticks) <= 8
    assert all(TOP - 0.2 <= tick.at <= HEIGHT - BOTTOM + 0.2 for tick in chart.y_ticks)
    assert all(math.isfinite(float(one)) for place in chart.lines[0].points.split() for one in place.split(","))


def test_hover_columns_touch_one_another_and_name_all_curves() -> None:
    curves = [Curve("train", [1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]), Curve("val", [2, 4], [3.5, 1.5])]
    chart = line_chart("Loss", curves)
    assert chart is not None
    ends = [(hover.left, round(hover.left + hover.width, 1)) for hover in chart.hovers]
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
    assert [hover.title for hover in chart.hovers] == [
        "step 1: train 4.0000",
        "step 2: train 3.0000; val 3.5000",
        "step 3: train 2.0000; val 3.5000",
        "step 4: train 1.0000; val 1.5000",
    ]


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0"), (0.25, "0.25"), (1500.0, "1.5k"), (2e6, "2M"), (3e-5, "3e-5"), (-0.5, "-0.5")]
)
def test_labels_are_short(value: float, words: str) -> None:
    assert tick_text(value) == words


def test_memory_is_stacked_on_one_axis_with_the_measured_beside_it() -> None:
    bars = memory_bars([
        MemoryUse("fp32", {"weights": 100, "activations": 300, "unknown": 5}, math.nan),
        MemoryUse("bf16", {"weights": 100, "activations": 100}, 200.0),
    ])  # fmt: skip
    assert [bar.name for bar in bars] == ["fp32, predicted", "bf16, predicted", "bf16, measured"]
    assert [[(piece.left, piece.width) for piece in bar.pieces] for bar in bars] == [
        [(0.0, 25.0), (25.0, 75.0)],
        [(0.0, 25.0), (25.0, 25.0)],
        [(0.0, 50.0)],
    ]
    assert memory_bars([]) == []


def test_intervals_share_an_axis_with_the_margin_in_view() -> None:
    rows = [
        ("a", "", "same", -0.1, 0.0, 0.1),
        ("b", "", "worse", -2.0, -1.5, -1.0),
        ("c", "", "?", math.nan, 0.3, math.nan),
    ]
    found = intervals(rows, around=0.0, unit="points", margin=0.5)
    assert found is not None
    a, b, c = found.rows
    assert found.band_left < a.low < found.zero < a.low + a.width < found.band_left + found.band_width
    assert b.low + b.width < found.band_left
    assert (c.width, c.low) == (0.0, c.at)
    assert all(0 <= place <= 100 for row in found.rows for place in (row.low, row.low + row.width))
    assert found.margin == "0.5"
    assert intervals([("a", "", "", math.nan, math.nan, math.nan)], around=0.0, unit="") is None
