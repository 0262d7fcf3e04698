"""Arms as bars: what a picture holds, whatever is missing in its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.draw.bars import draw_bars

BLUE = (0x00, 0x72, 0xB2)


def row(name: str, times: float | None = 1.0, **changed: Any) -> dict[str, Any]:
    gain = None if times is None else {"times": times, "low": times * 0.9, "high": times * 1.1}
    return {
        "name": name,
        "failed": "",
        "gain": gain,
        "memory": {"measured": 30 * 2**20, "parts": {"weights": 10 * 2**20, "activations": 15 * 2**20, "batch": 0}},
        "parity": {"margin": 0.02, "verdict": "same"} if name != "fp32" else None,
        "runs": [{"metric": 0.9}, {"metric": 0.91}],
        **changed,
    }


def drawn(folder: Path, *rows: dict[str, Any], higher_is_better: bool = True) -> np.ndarray[Any, Any]:
    bench = {"name": "a bench", "metric": {"name": "top1", "higher_is_better": higher_is_better}, "rows": list(rows)}
    bench["margin"] = {"size": 0.02}
    draw_bars(bench, folder / "bars.png")
    return np.asarray(Image.open(folder / "bars.png").convert("RGB"))


def blue(picture: np.ndarray[Any, Any]) -> int:
    """Pixels of the speed of arms: the left third, in their colour."""
    left = picture[:, : picture.shape[1] // 3]
    return int((left == BLUE).all(axis=2).sum())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    return drawn(tmp_path_factory.mktemp("whole"), row("fp32"), row("bf16", 2.0))


def test_a_faster_arm_has_a_larger_bar(tmp_path: Path) -> None:
    slow, fast = (drawn(tmp_path, row("fp32"), row("bf16", times)) for times in (0.5, 1.0))
    assert slow.shape == fast.shape == (420, 1200, 3)
    assert 0 < blue(slow) < 0.7 * blue(fast)


def test_more_arms_have_more_room(tmp_path: Path) -> None:
    rows = [row("fp32"), *(row(f"arm {n}", 1.0 + n) for n in range(5))]
    assert drawn(tmp_path, *rows).shape[1] > 1200


@pytest.mark.parametrize(
    "missing",
    [
        {"gain": None},
        {"memory": None},
        {"memory": {"measured": None, "parts": {"weights": 5}}},
        {"memory": {"measured": 5 * 2**30, "parts": None}},
        {"runs": [], "parity": None, "failed": "it has no memory left"},
        {"runs": [{"metric": "NaN"}, {"metric": "Infinity"}], "parity": {"margin": 0.01, "verdict": "worse"}},
        {"runs": [{"metric": 1e30}]},
        {"gain": {"times": 2.0, "low": None, "high": None}},
        {"gain": {"times": 2.0, "low": 1e-300, "high": 1e300}},
        {"name": "$x_$ \x1b[31m" + "long" * 30},
    ],
)
def test_what_is_missing_or_wild_leaves_the_rest(
    missing: dict[str, Any], whole: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    found = drawn(tmp_path, row("fp32"), {**row("bf16", 2.0), **missing})
    assert found.shape == whole.shape
    assert (found != whole).any()


def test_a_baseline_without_anything_is_a_picture_that_says_so(tmp_path: Path) -> None:
    nothing = {"gain": None, "memory": None, "runs": [], "failed": "it has no memory left"}
    found = drawn(tmp_path, {**row("fp32"), **nothing}, higher_is_better=False)
    assert blue(found) == 0
    assert len(np.unique(found.reshape(-1, 3), axis=0)) > 2


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path) -> None:
    drawn(tmp_path, row("fp32"))
    before = (tmp_path / "bars.png").read_bytes()
    with pytest.raises(KeyError):
        drawn(tmp_path, {"name": "nothing else"})
    assert (tmp_path / "bars.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bars.png"]


def grey(picture: np.ndarray[Any, Any]) -> int:
    """Pixels of the margin around fp32: a quarter of its grey on white, in the right third."""
    right = picture[:, 2 * picture.shape[1] // 3 :].astype(int)
    return int((abs(right - 0xE5) <= 1).all(axis=2).sum())


def red(picture: np.ndarray[Any, Any]) -> int:
    return int((picture == (0xB2, 0x18, 0x2B)).all(axis=2).sum())


def test_an_arm_that_collapsed_leaves_the_margin_readable(whole: np.ndarray[Any, Any], tmp_path: Path) -> None:
    found = drawn(tmp_path, row("fp32"), row("bf16", 2.0, runs=[{"metric": 0.1}, {"metric": 0.11}]))
    assert grey(found) > grey(whole) / 6 > 0
    assert red(found) > 0 == red(whole)


def test_runs_without_a_finite_metric_are_marked(whole: np.ndarray[Any, Any], tmp_path: Path) -> None:
    found = drawn(tmp_path, row("fp32"), row("bf16", 2.0, runs=[{"metric": 0.9}, {"metric": "NaN"}]))
    assert red(found) > 0 == red(whole)
