"""Charts as SVG: where curves, ticks and bars are, and what a file holds."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from halfstep.draw.axis import format_tick
from halfstep.draw.svg import (
    BOTTOM,
    HEIGHT,
    HOVERS,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    check_svg_path,
    lay_out_chart,
    render_svg_document,
)
from halfstep.errors import WrongUse
from halfstep.measure.audit.model_tree import ModuleFlops, draw_model_tree
from halfstep.measure.memory_bars import MemoryUse, draw_memory_bars
from halfstep.page import Chart, Curve, Curves, Interval, Intervals, Tree, TreeNode, build_charts

SVG = "{http://www.w3.org/2000/svg}"


def chart(*values: float, **look: object) -> Curves:
    return Curves("a", (Curve("c", list(range(len(values))), values),), **look)  # type: ignore[arg-type]


def drawn(found: Curves) -> list[tuple[float, float]]:
    """The places of the first curve."""
    points = re.search(r'points="([^"]*)"', lay_out_chart(found).rows[0].inside)
    assert points is not None
    return [tuple(map(float, place.split(","))) for place in points[1].split()]  # type: ignore[misc]


def labels(found: Curves) -> list[str]:
    return re.findall(r'text-anchor="end">([^<]*)<', lay_out_chart(found).rows[0].inside)


def titles(found: Chart) -> list[str]:
    return re.findall(r"<title>([^<]*)</title>", "".join(row.inside for row in lay_out_chart(found).rows))


def test_a_curve_fills_its_chart_and_axes_have_titles() -> None:
    found = chart(0.0, 10.0, 5.0, x_title="seconds", y_title="loss")
    assert drawn(found) == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, TOP),
        (WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) / 2),
    ]
    assert ">seconds</text>" in lay_out_chart(found).rows[0].inside
    assert ">loss</text>" in lay_out_chart(found).rows[0].inside


def test_a_spike_gets_a_logarithmic_axis_and_is_kept_among_a_million_points() -> None:
    values = [1.0] * 1_000_000
    values[777_777] = 1000.0
    found = chart(*values)
    places = drawn(found)
    assert len(places) <= 302
    assert min(y for _, y in places) == TOP
    assert labels(found)[:4] == ["1", "10", "100", "1k"]
    assert len(titles(found)) <= HOVERS


def test_a_loss_scale_is_labelled_by_its_powers_of_two() -> None:
    assert labels(chart(1024.0, 65536.0, scale="log2"))[:4] == ["2¹⁰", "2¹²", "2¹⁴", "2¹⁶"]


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert len(drawn(chart(1.0, math.nan, 2.0, math.inf))) == 2
    assert build_charts(chart(math.nan, math.inf), Curves("a", ()), None) == ()


@pytest.mark.parametrize(
    "values", [(3.0,), (0.0, 0.0), (-1e-9, 1e-9), (1e299, -1e299), (5e-324, 1.0), (2.0, 2.0000001)]
)
@pytest.mark.parametrize("scale", ["auto", "linear", "zero", "log2"])
def test_every_range_has_ticks_inside_of_the_chart(values: tuple[float, ...], scale: str) -> None:
    inside = lay_out_chart(chart(*values, scale=scale)).rows[0].inside
    ticks = [float(at) for at in re.findall(r'class="gridline"[^>]*y1="([^"]*)"', inside)]
    assert 1 <= len(ticks) <= 8
    assert all(TOP - 0.2 <= at <= HEIGHT - BOTTOM + 0.2 for at in ticks)
    assert all(math.isfinite(one) for place in drawn(chart(*values, scale=scale)) for one in place)


def test_hover_columns_touch_one_another_and_name_all_curves() -> None:
    curves = (Curve("train", [1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]), Curve("val", [2, 4], [3.5, 1.5]))
    found = Curves("Loss", curves)
    columns = re.findall(r'<rect x="([^"]*)" y="[^"]*" width="([^"]*)"', lay_out_chart(found).rows[0].inside)
    ends = [(float(left), round(float(left) + float(width), 1)) for left, width in columns]
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]
    assert titles(found) == [
        "step 1: train 4",
        "step 2: train 3; val 3.5",
        "step 3: train 2; val 3.5",
        "step 4: train 1; val 1.5",
    ]


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0"), (0.25, "0.25"), (1500.0, "1.5k"), (2e6, "2M"), (3e-5, "3e-5"), (-0.5, "-0.5")]
)
def test_labels_are_short(value: float, words: str) -> None:
    assert format_tick(value) == words


def test_memory_is_stacked_on_one_axis_with_the_measured_next_to_it() -> None:
    bars = draw_memory_bars(
        [
            MemoryUse("fp32", {"weights": 100, "activations": 300, "unknown": 5, "batch": math.nan}, None),
            MemoryUse("bf16", {"weights": 100, "activations": 100}, 200.0),
        ],
        "memory",
    )
    figure = lay_out_chart(bars)
    assert [row.name for row in figure.rows] == ["fp32, predicted", "bf16, predicted", "bf16, measured"]
    places = [re.findall(r'x="([^"]*)%" width="([^"]*)%"', row.inside) for row in figure.rows]
    assert places == [[("0.0", "25.0"), ("25.0", "75.0")], [("0.0", "25.0"), ("25.0", "25.0")], [("0.0", "50.0")]]
    assert draw_memory_bars([], "memory").is_empty


def test_intervals_share_an_axis_with_the_margin_in_view() -> None:
    rows = (
        Interval("a", "", "same", "good", -0.1, 0.0, 0.1),
        Interval("b", "", "worse", "bad", -2.0, -1.5, -1.0),
        Interval("c", "", "?", "warn", math.nan, 0.3, math.nan),
    )
    figure = lay_out_chart(Intervals("d", rows, "points", 0.0, 0.5))
    (a, b, c), band = (
        [tuple(map(float, re.findall(r'class="reach[^>]*x1="([^"]*)%" x2="([^"]*)%"', row.inside)[0]))
         for row in figure.rows[:3]],
        [float(at) for at in re.findall(r'class="band" x="([^"]*)%" width="([^"]*)%"', figure.rows[0].inside)[0]],
    )  # fmt: skip
    assert band[0] < a[0] < a[1] < band[0] + band[1]
    assert b[1] < band[0]
    assert c[0] == c[1]
    assert all(0 <= at <= 100 for ends in (a, b, c) for at in ends)
    assert figure.legend[0][1] == "within the margin, ± 0.5"
    assert Intervals("d", (Interval("a", "", "", "", math.nan, math.nan, math.nan),), "", 0.0).is_empty


# -- trees and files --------------------------------------------------------------------------------------------------


def test_a_model_is_as_wide_as_its_work_and_islands_are_outlined() -> None:
    modules = [ModuleFlops("a.b", {"bf16": 75}, None), ModuleFlops("a.c", {"fp32": 25}, "a.c")]
    found = draw_model_tree([*modules, ModuleFlops("(the model itself)", {}, None)])
    a = found.root.children[0]
    assert (found.root.total, a.total, [child.outlined for child in a.children]) == (100, 100, [False, True])
    assert list(found.root.stripes()) == [("bf16", 75), ("fp32", 25)]
    assert (found.legend, found.outline) == ((("bf16", "75 %"), ("fp32", "25 %")), "island")
    inside = lay_out_chart(found).rows[0].inside
    assert re.findall(r'<svg x="([^"]*)%" y="(\d+)" width="([^"]*)%"', inside)[2:] == [
        ("0.0", "52", "75.0"),
        ("75.0", "52", "25.0"),
    ]
    assert "a.c: fp32 100 %, 25 % of the FLOPs, an island" in titles(found)


@pytest.mark.parametrize(
    "modules",
    [
        [ModuleFlops("an odd one", {"int4": 5}, None)],
        [ModuleFlops(".".join("abcdefghijklmnopqrst"), {"fp16": 2**60}, None)],
        [ModuleFlops(f"layers.{n}", {"bf16": 1}, None) for n in range(2000)],
    ],
)
def test_any_model_is_drawn_in_bounded_space(modules: list[ModuleFlops]) -> None:
    found = render_svg_document([draw_model_tree(modules)])
    assert len(found) < 400_000
    assert float(ElementTree.fromstring(found).get("height", "0")) < 700


def test_a_file_is_one_valid_document_whatever_names_hold() -> None:
    hostile = '</svg><script>alert(1)</script>&"\x1b[2J'
    charts: list[Chart] = [
        Curves(hostile, (Curve(hostile, [1, 2], [1.0, 2.0]), Curve("b", [1], [1.0])), hostile, hostile,
               skips=[(1.0, hostile)]),
        Intervals(hostile, (Interval(hostile, hostile, hostile, "good", 0.0, 1.0, 2.0),), hostile, 1.0),
        draw_memory_bars([MemoryUse(hostile, {"weights": 1.0}, 2.0)], hostile),
        Tree(hostile, TreeNode(hostile, hostile, {hostile: 1.0}), hostile, ((hostile, hostile),)),
    ]  # fmt: skip
    found = ElementTree.fromstring(render_svg_document(charts, hostile))
    assert not list(found.iter(f"{SVG}script"))
    assert "var(" not in "".join(found.itertext()), "viewers other than browsers know no variables"
    assert "no finite numbers" in render_svg_document([])


@pytest.mark.wording
def test_a_chart_takes_svg_and_names_it_for_png(tmp_path: Path) -> None:
    check_svg_path(tmp_path / "a.svg", "--picture")
    with pytest.raises(WrongUse) as raised:
        check_svg_path(tmp_path / "a.png", "--picture")
    assert raised.value.do == f"--picture {tmp_path / 'a.svg'}"
    with pytest.raises(WrongUse):
        check_svg_path(tmp_path / "missing" / "a.svg", "--picture")
