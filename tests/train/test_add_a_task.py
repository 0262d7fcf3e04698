"""The task of docs/add-a-task.md, taken from the page and run as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from halfstep.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "add-a-task.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(block("python"))
    Path("my_recipe.yaml").write_text(block("yaml"))


def train(*words: str) -> dict[str, object]:
    command = ["train", "my_recipe.yaml", "--task", "my_task.py", "--json", "train.seed=0", *words]
    done = CliRunner().invoke(main.build(), command, prog_name="halfstep")
    assert done.exit_code == 0, done.output
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_it_is_short() -> None:
    assert len(block("python").splitlines()) < 80


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns(precision: str) -> None:
    run = train("train.epochs=4", "run.dir=runs/quick", f"precision={precision}")
    # An image with noise of 0.2, left as it is, has -20 log10(0.2) = 14 dB.
    assert run["metrics"]["psnr"] > 15.0  # type: ignore[index]
    Path("images").mkdir()
    Image.new("RGB", (40, 24), (200, 30, 90)).save("images/red.png")
    done = CliRunner().invoke(main.build(), ["predict", "runs/quick", "images", "--task", "my_task.py"])
    assert done.exit_code == 0, done.output
    [drawn] = Path("runs/quick/predictions").rglob("*.png")
    with Image.open(drawn) as picture:
        assert picture.size == (40, 24)


@pytest.mark.wording
def test_its_settings_are_checked() -> None:
    words = ["train", "my_recipe.yaml", "--task", "my_task.py", "data.noise=-1", "run.dir=runs/wrong"]
    done = CliRunner().invoke(main.build(), words, prog_name="halfstep")
    assert done.exit_code == 78
    assert "data.noise" in done.output
