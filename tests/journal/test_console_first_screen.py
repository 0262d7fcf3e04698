"""The first screen of a run: at 80 columns it is whole on 24 rows, and nothing that asks for an eye is left out."""

from __future__ import annotations

import pytest

from halfstep.journal.guide import BELOW, build_first_screen
from tests.journal.told import start

REASONS = [f"reason {number}, which is a sentence as long as those that measurements give" for number in range(30)]
FINDINGS = [{"severity": "warning", "id": "precision.slow", "evidence": "slower", "fix": "use fp32"}]


def rows(width: int, height: int, **changes: object) -> list[str]:
    """As a terminal breaks them."""
    lines = build_first_screen(start(**changes), width, height)  # type: ignore[arg-type]
    return [
        line.text[at : at + width - line.indent]
        for line in lines
        for at in range(0, max(len(line.text), 1), width - line.indent)
    ]


def test_a_usual_run_is_shown_whole_and_without_its_recipe() -> None:
    shown = rows(80, 24)
    assert len(shown) + BELOW <= 24
    text = "\n".join(shown)
    assert shown[:2] == [
        "halfstep train segmentation_tiny",
        "Mixed precision training: bf16 (bfloat16), chosen by auto",
    ]
    for words in ("the fastest", "measured", "batch", "num_workers: auto took 2", "recipe.yaml"):
        assert words in text
    assert "epochs 4" not in text
    assert "more in" not in text


@pytest.mark.parametrize("width", [60, 80, 132])
def test_much_to_say_is_cut_to_a_screen_and_the_rest_is_in_the_log(width: int) -> None:
    precision = {"asked": "auto", "took": "", "chosen": "bf16", "summary": "the fastest", "reasons": REASONS}
    shown = rows(width, 24, precision=precision, findings=FINDINGS, notes=["a note"] * 20)
    assert len(shown) + BELOW <= 24
    text = "\n".join(shown)
    assert "warning precision.slow: slower (use fp32)" in text.replace("\n", "") or width < 80
    assert "more in runs/segmentation_tiny/train.log" in text
    assert REASONS[0] in text.replace("\n", "")
    assert "run folder" in text


def test_a_large_terminal_shows_all() -> None:
    precision = {"asked": "auto", "took": "", "chosen": "bf16", "summary": "the fastest", "reasons": REASONS}
    assert sum(reason in "\n".join(rows(132, 80, precision=precision)) for reason in REASONS) == len(REASONS)


def test_warnings_are_never_left_out() -> None:
    shown = rows(80, 24, findings=[{**FINDINGS[0], "id": f"precision.{n}"} for n in range(30)])
    assert sum("warning precision." in line for line in shown) == 30
