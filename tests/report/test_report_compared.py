"""Several runs side by side, benches and plans: the same verdicts as `halfstep bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import BadData, WrongUse
from halfstep.measure.bench.comparison import BenchMetric
from halfstep.measure.bench.report import format_parity_difference
from halfstep.measure.parity import ParityTest, compare_paired_metrics, compute_margin, compute_smallest_margin
from halfstep.measure.setting import StepSetting
from halfstep.report.compare import compare_runs
from halfstep.report.html import render_html_report
from halfstep.report.plan_facts import PlanFacts
from halfstep.report.run_facts import RunFacts, read_run_facts
from halfstep.report.sources import read_source, read_sources
from tests.report.looked_at import Page
from tests.report.written import start, step, whole, write_run

ROOT = Path(__file__).parents[2]
FP32, BF16 = (0.80, 0.81, 0.79), (0.802, 0.811, 0.789)


def three_seeds(folder: Path, precision: str, finals: tuple[float, ...], rate: float = 100.0) -> list[RunFacts]:
    found = []
    for seed, final in enumerate(finals, start=1):
        events = whole(final, seed, precision, rate * (1 + seed / 100))
        found.append(read_run_facts(write_run(folder / f"{precision}-{seed}", events)))
    return found


@pytest.mark.parametrize(("finals", "word"), [(BF16, "same"), ((0.70, 0.71, 0.69), "worse")])
def test_runs_are_judged_by_the_test_of_bench(tmp_path: Path, finals: tuple[float, ...], word: str) -> None:
    # bf16 first: strict fp32 is the baseline wherever it stands.
    found = compare_runs([*three_seeds(tmp_path, "bf16", finals, 200.0), *three_seeds(tmp_path, "fp32", FP32)])
    margin = compute_margin(FP32, points=compute_smallest_margin(FP32, higher_is_better=True))
    expected = compare_paired_metrics(FP32, finals, margin, higher_is_better=True)
    assert expected.verdict == word
    assert found.judgment.verdicts[0].startswith("against fp32, bf16: 2.00x as fast")
    assert f"{word} accuracy (difference {100 * (expected.difference or 0):+.2f}" in found.verdict
    drawing = found.judgment.drawing
    assert drawing is not None
    assert drawing.rows[0].verdict == word


def test_a_difference_that_is_only_rounding_is_said_to_be_none() -> None:
    test = ParityTest("same", 0.005, -3.7e-17, -0.002, 0.002, 3)
    assert format_parity_difference(test, BenchMetric("iou", True)) == "+0.00 ± 0.20 points"


def test_only_the_settings_that_differ_are_listed(tmp_path: Path) -> None:
    runs = [*three_seeds(tmp_path, "fp32", FP32[:2]), *three_seeds(tmp_path, "bf16", BF16[:1])]
    heads, rows = compare_runs(runs).differences
    assert heads == ["Setting", "fp32-1", "fp32-2", "bf16-1"]
    assert rows == [["precision", "fp32", "fp32", "bf16"], ["train.seed", "1", "2", "1"]]


def test_one_seed_tells_nothing_and_says_so(tmp_path: Path) -> None:
    runs = [*three_seeds(tmp_path, "fp32", FP32[:1]), *three_seeds(tmp_path, "bf16", BF16[:1])]
    assert "can't tell about its accuracy" in compare_runs(runs).verdict
    assert "fewer than 3 seeds" in compare_runs(runs).verdict


def test_runs_that_have_not_ended_are_left_out_and_named(tmp_path: Path) -> None:
    unfinished = read_run_facts(write_run(tmp_path / "begun", [start(), step(1)], state="ended"))
    found = compare_runs([*three_seeds(tmp_path, "fp32", FP32[:1]), unfinished])
    assert any(note.startswith("begun is left out of the test") for note in found.judgment.notes)
    assert "one recipe" in found.verdict


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run_facts(write_run(tmp_path / parent / "run", whole())) for parent in ("a", "b")]
    assert [name for name, _ in compare_runs(runs).runs] == ["a/run", "b/run"]
    assert [name for name, _ in compare_runs([runs[0], runs[0]]).runs] != ["run", "run"]


def test_the_page_of_several_runs_has_their_curves_over_one_another(tmp_path: Path) -> None:
    runs = [*three_seeds(tmp_path, "fp32", FP32), *three_seeds(tmp_path, "bf16", BF16)]
    text = render_html_report(runs)
    page = Page(text)
    assert page.titles[0] == "6 runs of one"
    labels = [one["aria-label"] for one in page.all("svg") if one.get("class") == "chart"]
    assert "Training loss: fp32-1, fp32-2, fp32-3, bf16-1, bf16-2, bf16-3" in labels
    assert "Validation IoU: fp32-1, fp32-2, fp32-3, bf16-1, bf16-2, bf16-3" in labels
    assert len(text.encode()) < 1_000_000


# -- bench and plan ---------------------------------------------------------------------------------------------------


def test_a_bench_read_again_has_the_verdicts_that_it_was_written_with() -> None:
    file = ROOT / "benchmarks" / "parity_cifar.json"
    found: Any = read_source(file)
    written = json.loads(file.read_text())
    assert list(found.bench.verdicts) == written["verdicts"]
    page = Page(render_html_report([found]))
    for verdict in written["verdicts"]:
        # The name is a bold element of its own.
        assert verdict.partition(": ")[2] in page.text
    labels = [one.get("aria-label", "") for one in page.all("svg")]
    assert "bf16: +0.02 ± 0.06 points, same" in labels
    assert "fp16_unscaled: -16.92 ± 1.69 points, worse" in labels
    assert "within the margin, ± 2.27" in page.texts


@pytest.mark.wording
@pytest.mark.parametrize("wrong", [{"rows": [{}]}, {"rows": 3}, {"metric": None}, {"seeds": ["x"]}])
def test_a_bench_that_bench_did_not_write_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    written = json.loads((ROOT / "benchmarks" / "parity_cifar.json").read_text())
    (tmp_path / "bench.json").write_text(json.dumps({**written, **wrong}))
    with pytest.raises(BadData, match="is not the result of a bench"):
        read_source(tmp_path)


def cell(name: str, times: float | None, peak: int, **more: Any) -> dict[str, Any]:
    speed = (
        None
        if times is None
        else {"speedup": times, "low": times - 0.1, "high": times + 0.1, "pairs": 40, "seconds": 0.05}
    )
    setting = asdict(StepSetting(name.split(",")[0], channels_last="channels last" in name))
    return {"name": name, "setting": setting, "speed": speed, "cut": "", "first_step": 0.4, "peak": peak, **more}


def plan() -> dict[str, Any]:
    ladder = [
        cell("fp32", 1.0, 2**22),
        cell("bf16, channels last", 1.8, 2**21),
        cell("fp16", None, 2**21, cut="overflows"),
    ]
    return {
        "name": "unet", "device": {"name": "a card", "place": "cuda"}, "now": ladder[0]["setting"],
        "baseline": ladder[0]["setting"], "choice": ladder[1], "ladder": ladder, "stay": False,
        "reasons": {"precision": "bf16 is faster"}, "runner_up": None,
        "parity": {"verdict": "holds", "why": "0.1 % from fp32 after 32 updates"}, "formats": {},
        "changes": {"precision": "bf16", "train.channels_last": True},
        "conditions": {
            "device": "a card", "place": "cuda", "driver": "", "halfstep": "0", "torch": "2.13.0", "python": "3",
            "threads": 1, "cores": 2, "load": None, "flags": {"a": "b"}, "arms": "in turns",
        },
        "why_not": "", "growth": None, "growth_ended": "", "seconds": 60.0, "interrupted": False,
    }  # fmt: skip


def test_a_plan_has_its_candidates_and_what_the_choice_means(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan()))
    found = read_source(tmp_path / "plan.json")
    assert isinstance(found, PlanFacts)
    assert found.verdict == "Take bf16, channels last on a card: 1.80x strict fp32 (1.70 to 1.90, 40 pairs)."
    outlook = found.outlook
    assert dict(outlook.impact)["Memory"].startswith("bf16, channels last 50 % less")
    assert "Faster: 1.80x strict fp32 (1.70 to 1.90, 40 pairs)." in outlook.benefits
    assert "Less memory: 2.00 MiB of 4.00 MiB are free for a larger batch." in outlook.benefits
    assert ("A result that differs from fp32's", "low", "holds: 0.1 % from fp32 after 32 updates") in outlook.risks
    assert ("fp16, rejected", "low", "overflows") in outlook.risks
    assert dict(outlook.expect)["An update"] == "about 50 ms"
    page = Page(render_html_report([found]))
    assert "train.channels_last true" in page.text
    assert "bf16, channels last: 1.80x" in " ".join(one.get("aria-label", "") for one in page.all("svg"))


def test_a_plan_with_fields_of_other_types_makes_a_page_or_is_refused(tmp_path: Path) -> None:
    file, refused = tmp_path / "plan.json", 0
    cases = [{**plan(), key: wrong} for key in plan() for wrong in (None, "x", 3, [1], {"a": {"b": 1}})]
    cases += [{other: value for other, value in plan().items() if other != key} for key in plan()]
    for case in cases:
        file.write_text(json.dumps(case))
        try:
            Page(render_html_report([read_source(file)]))
        except BadData:
            refused += 1
    assert len(cases) / 2 < refused < len(cases)


# -- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_what_is_none_of_them_is_refused_with_what_is_there(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", whole())
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    for path, words in {
        tmp_path / "runs": "is a folder of runs (one), and not one of them",
        tmp_path / "other.json": "has the fields a",
        tmp_path / "empty": "is empty",
        tmp_path / "nothing": "does not exist",
    }.items():
        with pytest.raises(BadData) as raised:
            read_source(path)
        assert words in raised.value.given
        assert "recipe.yaml" in raised.value.allowed
        run = tmp_path / "runs" / "one" if path.name == "runs" else "runs/segmentation_tiny"
        assert raised.value.do == f"halfstep report {run}"
    with pytest.raises(WrongUse, match="13 runs on one page"):
        read_sources([tmp_path] * 13)
