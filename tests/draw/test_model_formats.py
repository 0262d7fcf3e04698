"""A model by format: colours are as wide as the work, parents lie over their children, islands are outlined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.draw.model_formats import COLOURS, draw_model_formats, tree

RED = (0xB2, 0x18, 0x2B)


def row(module: str, island: str | None = None, **flops: int) -> dict[str, Any]:
    return {"module": module, "flops": flops, "island": island}


def drawn(folder: Path, *rows: dict[str, Any]) -> np.ndarray[Any, Any]:
    report = {"subject": "a $model$\n", "verdict": "nothing found", "modules": list(rows)}
    draw_model_formats(report, folder / "formats.png")
    return np.asarray(Image.open(folder / "formats.png").convert("RGB"))


def pixels(picture: np.ndarray[Any, Any], colour: Any) -> np.ndarray[Any, Any]:
    if isinstance(colour, str):
        colour = tuple(int(COLOURS[colour][at : at + 2], 16) for at in (1, 3, 5))
    return (picture == colour).all(axis=2)


def levels(mask: np.ndarray[Any, Any]) -> int:
    """Rows of rectangles: stretches of lines in which the colour covers a good part of the width."""
    filled = mask.sum(axis=1) > 100
    return int((filled[1:] & ~filled[:-1]).sum())


def test_a_tree_adds_up_what_lies_below() -> None:
    root = tree(
        [row("a.b", bf16=3), row("a.c", "a.c", fp32=1), row("(the model itself)"), row("(outside the model)")], "m"
    )
    assert root.flops == {"bf16": 3, "fp32": 1}
    assert root.children["a"].total == 4
    assert root.children["a"].children["c"].island
    assert not root.children["a"].island
    assert list(root.children["a"].stripes()) == [("bf16", 3), ("fp32", 1)]


def test_colours_are_as_wide_as_the_work(tmp_path: Path) -> None:
    picture = drawn(tmp_path, row("first", bf16=300), row("second", fp32=100))
    blue, orange = (int(pixels(picture, name).sum()) for name in ("bf16", "fp32"))
    assert blue / orange == pytest.approx(3, rel=0.1)
    columns = pixels(picture, "fp32").any(axis=0).nonzero()[0]
    assert columns[columns > 700].min() > 0.7 * picture.shape[1], "over and under each other"
    assert levels(pixels(picture, "bf16")) == 2


def test_deeper_models_are_higher_and_islands_are_outlined(tmp_path: Path) -> None:
    flat = drawn(tmp_path, row("a", bf16=1))
    deep = drawn(tmp_path, row("a.b.c.d", "a.b", bf16=1))
    assert deep.shape[0] > flat.shape[0]
    assert not pixels(flat, RED).any()
    assert pixels(deep, RED).sum() > 1000


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("only.weights")],
        [row("(the model itself)", bf16=5)],
        [row("an odd one", int4=5)],
        [row(".".join("abcdefghijklmnopqrst"), fp16=2**60)],
        [row(f"layers.{n}", bf16=1) for n in range(2000)],
    ],
)
def test_whatever_a_model_is_there_is_a_picture(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    picture = drawn(tmp_path, *rows)
    assert picture.shape[1] == 1400
    assert picture.shape[0] <= 700
    assert (picture < 128).any()
    assert [file.name for file in tmp_path.iterdir()] == ["formats.png"]
