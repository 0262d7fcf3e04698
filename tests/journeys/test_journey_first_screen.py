"""The first screen: help that is short and quick, and mistakes that are told before anything large is loaded."""

from __future__ import annotations

import re

import pytest

from tests.journeys.desk import Desk
from tests.journeys.terminal import LINES, TELL_IMPORTS, imported
from tests.journeys.trained import Trained

LARGE = {"torch", "torchvision", "torchmetrics", "timm", "segmentation_models_pytorch", "matplotlib"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--help",), 0, "data"),
        (("data", "--help"), 0, "check"),
        (("recipes",), 0, "segment"),
        (("export", "--help"), 0, "onnx"),
        (("train", "segmet"), 78, "segment"),
        (("train", "segment", "--data_dir", "nowhere"), 65, "nowhere"),
        (("train", "segment", "--batch_sise", "4"), 78, "batch_size"),
        (("train", "segment", "--batch_size", "four"), 78, "four"),
        (("train", "segment", "--epochs", "3", "--steps", "4"), 78, "steps"),
        (("evaluate", "runs/nothing"), None, "nothing"),
        (("data", "check", "nowhere"), None, "nowhere"),
    ],
)
@pytest.mark.wording
def test_help_and_mistakes_load_nothing_large(desk: Desk, words: tuple[str, ...], code: int | None, said: str) -> None:
    with desk.type(*words, environment=TELL_IMPORTS) as terminal:
        ended = terminal.finish(60)
    told = "\n".join(line for line in terminal.text.splitlines() if "import time:" not in line)
    assert ended == code if code is not None else ended not in {0, 1, 70}, f"exit code {ended}\n{told}"
    assert said in " ".join(told.split())
    assert not imported(terminal) & LARGE


def test_the_help_of_a_recipe_is_of_its_task(desk: Desk) -> None:
    terminal = desk.run("train", "unet", "--help")
    assert "--crop" in terminal.words
    for other in ("--slots", "--min_snr", "--small_stem"):
        assert other not in terminal.words


@pytest.mark.full
def test_what_stands_before_the_first_epoch_fits_on_the_screen(segmented: Trained) -> None:
    lines = segmented.screen.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(r"epoch 1\b", line, re.IGNORECASE))
    assert first <= LINES, "\n".join(lines[:first])
