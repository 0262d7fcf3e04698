"""The guides' benchmark tables, from the command line: Config, Batch, Precision, time, memory and the final metric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.bench.bench import bench, run_bench_arms
from halfstep.measure.bench.comparison import BenchMetric, CandidateConfig, RunResult, parse_arms
from halfstep.measure.bench.page import Bench, suggest_bench_command
from halfstep.measure.subject import Subject
from halfstep.runs.bench_recipe import list_usual_arms

SMALL = ["data.samples=24", "data.size=16", "train.batch_size=4", "model.width=4", "model.depth=2", "run.pictures=0"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any], Path]:
    """Baseline, AMP and AMP with twice the batch, one seed of two epochs."""
    folder = tmp_path_factory.mktemp("table")
    arms = ["--arm", "AMP: precision=bf16", "--arm", "AMP+Large: precision=bf16 train.batch_size=8"]
    words = ["bench", "segmentation_tiny", *SMALL, "train.epochs=2", *arms, "--seeds", 1, "--out", folder]
    done = halfstep(*words, "--price-per-hour", 3.6)
    assert done.exit_code == 0, done.output
    return done, json.loads((folder / "bench.json").read_text()), folder


@pytest.mark.full
def test_the_table_has_the_guides_columns(benched: tuple[Result, dict[str, Any], Path]) -> None:
    done, _, folder = benched
    title, _, *rows = [line for line in (folder / "bench.md").read_text().splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in title.strip("|").split("|")]
    assert names[:4] == ["Hardware", "Config", "Batch", "Precision"]
    assert {"Speed", "Time per epoch", "Memory usage", "Final iou", "Accuracy", "Cost of training"} <= set(names)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[1:4] for row in cells] == [["Baseline", "4", "fp32"], ["AMP", "4", "bf16"], ["AMP+Large", "8", "bf16"]]
    assert "AMP+Large" in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 100  # the last one is to be copied


@pytest.mark.full
def test_an_arm_is_what_its_row_says(benched: tuple[Result, dict[str, Any], Path]) -> None:
    _, report, _ = benched
    for row in report["rows"]:
        (run,) = row["runs"]
        assert run["conditions"]["precision"]["chosen"] == row["precision"]
        assert run["conditions"]["batch"]["total"] == row["batch"]
        assert row["memory"]["measured"] > 0
        assert run["seconds_per_epoch"] > 0
    small, large = report["rows"][1]["memory"]["measured"], report["rows"][2]["memory"]["measured"]
    assert large > small
    assert report["rows"][2]["settings"] == ["precision=bf16", "train.batch_size=8"]


@pytest.mark.full
def test_what_to_type_next_repeats_the_arms(benched: tuple[Result, dict[str, Any], Path]) -> None:
    last = benched[0].stdout.splitlines()[-1]
    assert "--arm 'AMP+Large: precision=bf16 train.batch_size=8'" in last.replace("\n", " ")
    assert "--seeds 5" in last


@pytest.mark.parametrize("typed", [[], ["--batch_size", "16"], ["train.batch_size=16"]])
def test_the_usual_configurations_are_the_guides(typed: list[str]) -> None:
    batch = 16 if typed else 8
    assert list_usual_arms(Subject("unet", tuple(typed)), "bfloat16") == {
        "AMP": ("precision=bf16",),
        "AMP+Large": ("precision=bf16", f"train.batch_size={2 * batch}"),
        "AMP+Compiled": ("precision=bf16", "train.compile=true"),
    }


@pytest.mark.wording
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["AMP"], "a name, a colon"),
        ([": precision=bf16"], "a name, a colon"),
        (["AMP:"], "a name, a colon"),
        (["AMP: 'precision=bf16"], "a name, a colon"),
        (["AMP: precision=bf16", "AMP: precision=fp16"], "two arms named 'AMP'"),
    ],
)
def test_an_arm_that_cannot_be_read_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(WrongUse) as told:
        parse_arms(given)
    assert said in str(told.value)
    assert parse_arms(["a b: train.batch_size=2 'data.path=x y'"]) == {"a b": ("train.batch_size=2", "data.path=x y")}


@pytest.mark.wording
@pytest.mark.parametrize("name", ["fp32", "AMP-Large"])
def test_names_that_would_share_a_file_are_refused(name: str, tmp_path: Path) -> None:
    arms = {"AMP+Large": ["precision=bf16"], name: ["precision=fp16", "train.batch_size=8"]}
    with pytest.raises(HalfstepError, match="named"):
        bench("segmentation_tiny", arms=arms, folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.wording
def test_a_case_has_no_configurations() -> None:
    done = halfstep("bench", "tests.support.cases:linear", "--configs")
    assert done.exit_code == 78
    assert "settings change a RECIPE" in done.stderr


def made(**speeds: float) -> Bench:
    def arm(speed: float) -> Any:
        wobbly = {seed: 1 + seed / 1000 * speed / 100 for seed in (1, 2, 3)}
        return lambda seed: RunResult(seed, 0.9 + seed / 1e4, 3.0, 1.0, speed * wobbly[seed], 2, ((1.0, 2.0),), 2**30)

    names = {"fp32": 100.0, **speeds}
    configs = {name: CandidateConfig("bf16" if name != "fp32" else name, 8, (f"name={name}",)) for name in names}
    return run_bench_arms(
        {name: arm(speed) for name, speed in names.items()},
        name="unet",
        seeds=[1, 2, 3],
        metric=BenchMetric("iou", higher_is_better=True),
        conditions={"device": "A card"},
        configs=configs,
    )


def test_the_best_is_named_as_the_guide_names_it() -> None:
    found = made(AMP=150.0, Compiled=203.0, Slow=90.0)
    assert found.verdicts[-1] == "Best: Compiled = 2.03x as fast, same accuracy"
    assert suggest_bench_command(found) == "halfstep train unet name=Compiled"
    assert made(Slow=90.0).best is None
