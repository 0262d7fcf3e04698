"""The page of one run: the verdict, skips with their reasons, incidents, and what was not recorded."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.draw.svg import MARKS
from halfstep.errors import BadData, Diverged
from halfstep.report.html import MOST_BYTES, render_html_report
from halfstep.report.outlook import HIGH, LOW, build_run_outlook
from halfstep.report.run_facts import collect_incidents, read_run_facts
from tests.report.looked_at import Page
from tests.report.written import end, epoch, speed, start, step, whole, write_run
from tests.support.troubled import InOneModule, fit


def looked_at(folder: Path) -> Page:
    return Page(render_html_report([read_run_facts(folder)]))


def test_the_verdict_is_one_sentence_with_the_figures(tmp_path: Path) -> None:
    run = read_run_facts(write_run(tmp_path / "run", whole()))
    assert run.verdict == (
        "Finished: best IoU 0.7500 (epoch 4) after 50 s, in bf16 (100 % of the FLOPs), no step skipped."
    )
    page = looked_at(tmp_path / "run")
    assert run.verdict in page.text
    for words in ("Requested bf16", "Observed bf16: 100.0%", "120 samples/s", "Waiting for data 25 %", "a" * 40):
        assert words in page.text, words


def test_the_best_of_a_run_that_failed_later_is_that_of_its_epochs(tmp_path: Path) -> None:
    events = [*whole()[:-1], {"event": "end", "reason": "error", "error": "no space left", "remedies": []}]
    run = read_run_facts(write_run(tmp_path / "run", events, state="ended", reason="no space left", code=74))
    assert run.best == (0.75, 4.0)
    assert "best IoU 0.7500 (epoch 4)" in run.verdict


@pytest.mark.parametrize(
    ("devices", "said"), [(1, "Ranks 1 Folder"), (2, "Ranks 2, each with this command"), ("x", "Ranks not recorded")]
)
def test_the_ranks_that_ran_the_command_are_told(tmp_path: Path, devices: object, said: str) -> None:
    batch = {"per_device": 4, "devices": devices, "microbatches": 1, "total": 8}
    page = looked_at(write_run(tmp_path / "run", [start(batch=batch), *whole()[1:]]))
    assert said in page.text
    assert "Batch 8 samples a step" in page.text


def test_one_evaluation_is_no_way_from_a_first_to_a_last(tmp_path: Path) -> None:
    one = [event for event in whole() if event["event"] != "epoch" or event["epoch"] == 1]
    assert "after one evaluation" in looked_at(write_run(tmp_path / "one", one)).text
    all_four = looked_at(write_run(tmp_path / "four", whole())).text
    assert "after one evaluation" not in all_four
    assert "after the first epoch to" in all_four


def test_skips_are_marked_with_their_reasons(tmp_path: Path) -> None:
    steps = [step(n) for n in range(1, 30)]
    steps[4] = step(5, reason="gradient_overflow", loss="NaN", grad_norm="Infinity")
    steps[20] = step(21, reason="guard:spike")
    events = [start(), *steps, end(skipped={"gradient_overflow": 1, "guard:spike": 1})]
    page = looked_at(write_run(tmp_path / "run", events))
    assert "step 5 skipped: gradient overflow" in page.titles
    assert "step 21 skipped: guard:spike" in page.titles
    assert "2 of 29 steps skipped (1 × gradient overflow, 1 × guard:spike)" in page.text


def test_a_thousand_skips_are_as_many_marks_as_can_be_told_apart(tmp_path: Path) -> None:
    events = [start(), *(step(n, reason="loss_not_finite", loss="NaN") for n in range(1, 1001))]
    page = looked_at(write_run(tmp_path / "run", events, state="ended", reason="it failed", code=70))
    marks = [title for title in page.titles if "loss not finite" in title]
    charts = 1  # the gradient norm; no loss is finite, so that there is no chart of it
    assert MARKS <= len(marks) <= charts * (MARKS + 1)
    assert sum(int(found[1]) for mark in marks if (found := re.search(r"(\d+) × loss", mark))) > 900
    assert "No step has a finite value of: loss." in page.text
    assert page.text.count("1,000 of 1,000 steps skipped") == 1


def test_what_was_not_recorded_is_said_and_nothing_is_drawn_for_it(tmp_path: Path) -> None:
    page = looked_at(
        write_run(tmp_path / "run", [start(git=None), step(1), step(2)], state="ended", reason="killed", code=70)
    )
    for words in ("No prediction was recorded", "was not recorded", "Not measured: a run measures every", "No samples"):
        assert words in page.text, words
    assert "--examine" in page.text
    drawn = [one for one in page.all("svg") if one.get("role") == "img"]
    assert all(
        "Loss" in one["aria-label"] or "rate" in one["aria-label"] or "norm" in one["aria-label"] for one in drawn
    )


def test_a_run_that_ended_before_its_first_step(tmp_path: Path) -> None:
    run = read_run_facts(write_run(tmp_path / "run", [start()], state="ended", reason="no space left", code=74))
    assert run.verdict.startswith("Ended before its first step: no space left")
    assert "No step was taken" in looked_at(tmp_path / "run").text


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    events = [start(), step(1), step(2)]
    running = {"state": "running", "host": socket.gethostname(), "phase": "computing"}
    alive = read_run_facts(write_run(tmp_path / "alive", events, pid=os.getpid(), **running))
    gone = read_run_facts(write_run(tmp_path / "gone", events, pid=2**22 + 1, **running))
    assert (alive.state.word, alive.is_over) == ("running", False)
    assert alive.verdict.startswith("Running, at step 2 of 40")
    assert (gone.state.word, gone.is_over) == ("killed", True)
    assert 'http-equiv="refresh"' in render_html_report([alive], refresh=60)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("written", "words"),
    [
        (None, "has a recipe and no journal.jsonl: it ran out of luck"),
        ("", "can be read as the start of a run"),
        ("what is this?\n\x00\n", "can be read as the start of a run"),
        ('{"event":"step","attempt":1}\n', "can be read as the start of a run"),
    ],
)
def test_a_run_without_a_readable_journal_is_refused(tmp_path: Path, written: str | None, words: str) -> None:
    folder = write_run(tmp_path / "run", [], state="ended", reason="it ran out of luck")
    (folder / "journal.jsonl").unlink()
    if written is not None:
        (folder / "journal.jsonl").write_text(written)
    with pytest.raises(BadData, match=re.escape(words)) as raised:
        read_run_facts(folder)
    assert raised.value.allowed
    assert raised.value.do


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    lines = (folder / "journal.jsonl").read_text().splitlines()
    lines[5] = lines[5][:20]
    (folder / "journal.jsonl").write_text("\n".join(lines) + '\n{"event":"st')
    assert (read_run_facts(folder).recorded.attempts, read_run_facts(folder).recorded.damaged) == (39, 1)


def wrong_events() -> list[dict[str, Any]]:
    """A run in which each field of each event is once of another type."""
    guard = {"event": "guard", "kind": "verdict", "text": "t", "facts": {"attempt": 1, "culprit": {}, "remedies": []}}
    found = []
    for n, event in enumerate([start(), step(1), speed(), epoch(1, 0.5), guard, end()]):
        for key in event.keys() - {"event", "format"}:
            for wrong in (None, "x", ["x"], {"x": "y"}, -1, 1e308, True)[n % 2 :: 2]:
                found.append({**event, key: wrong})
    return found


def test_fields_of_any_type_make_a_page(tmp_path: Path) -> None:
    wrong = wrong_events()
    for at in range(0, len(wrong), 25):
        events = [start(), step(1), *wrong[at : at + 25], step(2)]
        Page(render_html_report([read_run_facts(write_run(tmp_path / str(at), events))]))


# -- incidents --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two real runs with a module that overflows in fp16: one is repaired, one is only watched."""
    found = {mode: tmp_path_factory.mktemp(mode) for mode in ("repair", "watch")}
    fit(found["repair"], InOneModule, guard__mode="repair")
    with pytest.raises(Diverged):
        fit(found["watch"], InOneModule, guard__mode="watch")
    return {mode: folder / "run" for mode, folder in found.items()}


def test_an_incident_has_its_culprit_what_was_tried_and_what_was_done(troubled: dict[str, Path]) -> None:
    (found,) = collect_incidents(read_run_facts(troubled["repair"]))
    assert (found.attempt, found.cause) == (1, "precision")
    assert dict(found.culprit)["Module"] == "2.up"
    assert ("island 2", "finite with it") in found.remedies
    assert "repaired: 2 computes in fp32" in found.done[0]
    assert found.replay == f"halfstep replay {troubled['repair']} --attempt 1"
    assert read_run_facts(troubled["repair"]).verdict.startswith("Finished: ")


def test_a_run_that_was_given_up_says_why_and_what_to_do(troubled: dict[str, Path], tmp_path: Path) -> None:
    run = read_run_facts(troubled["watch"])
    assert run.verdict.startswith("Gave up at step 5 of 36, in ")
    assert "5 of 5 steps skipped (5 × loss not finite): precision: 2.up (aten._to_copy" in run.verdict
    assert collect_incidents(run)[-1].do.startswith("halfstep.fit")
    assert "to do: halfstep.fit" in run.as_dict()["incidents"][-1]["done"][-1]
    assert [one.ended_run for one in collect_incidents(run)][-1:] == [True]
    assert Page(render_html_report([run])).text.count("Why it ended") == 1
    events = [json.loads(line) for line in (troubled["watch"] / "journal.jsonl").read_text().splitlines()]
    events[-1]["cause"] = "data"
    other = read_run_facts(write_run(tmp_path / "other", events))
    assert not any(one.ended_run for one in collect_incidents(other)), "an end for another cause is said on its own"


def test_samples_that_could_not_be_used_are_an_incident(tmp_path: Path) -> None:
    lost = [
        {"event": "bad_sample", "rank": 0, "name": f"{n}.png", "reason": "truncated", "index": n, "replacement": n - 1}
        for n in range(30)
    ]
    run = read_run_facts(write_run(tmp_path / "run", [*whole()[:-1], *lost, whole()[-1]]))
    (found,) = collect_incidents(run)
    assert (found.cause, found.sentence) == ("bad samples", "30 samples could not be used")
    assert (found.evidence[0], found.evidence[-1], len(found.evidence)) == ("0.png: truncated", "and 10 more", 21)
    assert len(found.done) == 2, "one was left out of an evaluation"
    page = looked_at(tmp_path / "run")
    assert page.text.index("30 samples could not be used") < page.text.index("Curves")
    assert run.as_dict()["incidents"][0]["cause"] == "bad samples"


def test_a_sample_that_fails_in_every_epoch_is_listed_once(tmp_path: Path) -> None:
    lost = [
        {
            "event": "bad_sample",
            "rank": 0,
            "name": f"{n % 3}.png",
            "reason": "truncated",
            "index": n % 3,
            "replacement": 9,
        }
        for n in range(7)
    ]
    (found,) = collect_incidents(read_run_facts(write_run(tmp_path / "run", [*whole()[:-1], *lost, whole()[-1]])))
    assert found.sentence == "3 samples could not be used, 7 times in all"
    assert sorted(found.evidence) == [
        "0.png: truncated (3 times)",
        "1.png: truncated (2 times)",
        "2.png: truncated (2 times)",
    ]


def test_each_class_has_its_curve(tmp_path: Path) -> None:
    events = [
        {**one, "val": {**one["val"], "iou_cat": 0.5, "iou_dog": 0.25}} if one["event"] == "epoch" else one
        for one in whole()
    ]
    labels = [one.get("aria-label") for one in looked_at(write_run(tmp_path / "run", events)).all("svg")]
    assert "Validation IoU by class: dog, cat" in labels


# -- what the precision means -----------------------------------------------------------------------------------------


def examined(folder: Path, **parts: Any) -> Path:
    """Put findings about the model beside a run, as `--examine` does."""
    from halfstep.report.examined import FORMAT, _hash_recipe

    (folder / "examined.json").write_text(json.dumps({"format": FORMAT, "recipe": _hash_recipe(folder), **parts}))
    return folder


def column(precision: str, activations: int) -> dict[str, Any]:
    parts = {"weights": 2**20, "activations": activations}
    return {
        "setting": {"precision": precision},
        "samples": 4,
        "peak": sum(parts.values()),
        "at_peak": parts,
        "whole": parts,
    }


def largest(precision: str, batch: int) -> dict[str, Any]:
    return {"precision": precision, "batch": batch, "recompute": False}


def test_speed_memory_benefits_risks_and_expectations_come_from_data(tmp_path: Path) -> None:
    events = whole()
    events[12] = speed(meters={"headroom_bits": 0.5, "headroom_module": "down.1", "gradient_zero_share": 0.6})
    folder = write_run(tmp_path / "run", events)
    device = {
        "columns": [column("fp32", 3 * 2**20), column("bf16", 2**20)],
        "largest": [largest("fp32", 10), largest("bf16", 25)],
    }
    survival = [{"format": "fp16", "survives": False, "verdict": "fp16: overflows in up.1"}]
    found = build_run_outlook(read_run_facts(examined(folder, estimate={"devices": [device]}, survival=survival)))
    assert dict(found.impact)["Memory"] == "bf16 50 % less: 2.00 MiB at the peak of an update, fp32 4.00 MiB, predicted"
    assert "120 samples/s in bf16" in dict(found.impact)["Speed"]
    assert "Larger batches: up to 25 samples fit here, 2.5 times as many as in fp32." in found.benefits
    assert "Activations saved for backward: 1.00 MiB instead of 3.00 MiB." in found.benefits
    risks = {risk.what: risk for risk in found.risks}
    assert risks["Overflow"].level == HIGH
    assert "0.5 bits were left in down.1" in risks["Overflow"].evidence
    assert risks["Gradients that vanish"].level == HIGH
    assert risks["Skipped steps"].level == LOW
    assert risks["One step in fp16, emulated (not this run's precision)"] == (
        "One step in fp16, emulated (not this run's precision)", HIGH, "overflows in up.1",
    )  # fmt: skip
    assert dict(found.expect)["Validation loss"] == "from 1.2000 after the first epoch to 0.3000"
    page = looked_at(folder)
    assert {"fp32, predicted", "bf16, predicted"} <= set(page.texts)
    assert "activations: 3.00 MiB" in page.titles
    # Bars on one axis: the prediction of bf16 is half as long.
    widths = [float(one["width"].rstrip("%")) for one in page.all("rect") if "piece" in one.get("class", "")]
    assert sum(widths[:2]) == pytest.approx(100.0)
    assert sum(widths[2:4]) == pytest.approx(50.0)


def test_findings_about_another_recipe_are_not_shown(tmp_path: Path) -> None:
    folder = examined(write_run(tmp_path / "run", whole()), estimate={"devices": []})
    assert "estimate" in read_run_facts(folder).examined
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text().replace("0.01", "0.02"))
    assert read_run_facts(folder).examined == {}


def module(path: str, format: str, flops: int, bits: float) -> dict[str, Any]:
    work = {"flops": {format: flops}, "computed": {format: 1.0}, "forward": {"headroom_bits": bits}}
    return {"module": path, "kind": "Linear", "island": path if format == "fp32" else None, **work}


def test_the_model_is_as_wide_as_its_work_and_colored_by_format(tmp_path: Path) -> None:
    modules = [module("up.0", "bf16", 75, 20.0), module("down", "fp32", 25, 3.5)]
    audit = {"verdict": "75 % in bf16", "device": "here", "modules": modules, "findings": []}
    page = looked_at(examined(write_run(tmp_path / "run", whole()), audit=audit))
    assert any(title.startswith("up.0: bf16 100 %, 75 % of the FLOPs") for title in page.titles)
    assert any(title.startswith("down: fp32 100 %, 25 % of the FLOPs, an island") for title in page.titles)
    blocks = {one["width"] for one in page.all("svg") if one.get("x")}
    assert blocks == {"100.0%", "75.0%", "25.0%"}
    assert page.text.index("down 3.5 fp32") < page.text.index("up.0 20.0 bf16")


# -- pictures ---------------------------------------------------------------------------------------------------------


def noise(path: Path, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, compress_level=1)


def test_pictures_are_embedded_in_less_than_a_megabyte(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    for number in (1, 2, 4):
        noise(folder / "pictures" / f"epoch-{number:04d}.png", 700)
    page = render_html_report([read_run_facts(folder)])
    assert 300_000 < len(page.encode()) < MOST_BYTES
    images = Page(page).all("img")
    assert [image["alt"] for image in images] == [
        "samples of the run, last, epoch 4",
        "samples of the run, first, epoch 1",
    ]
    assert all(image["src"].startswith(("data:image/png;base64,", "data:image/jpeg;base64,")) for image in images)


def test_pictures_from_elsewhere_and_those_that_are_none_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    noise(tmp_path / "elsewhere" / "secret.png", 8)
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "epoch-0001.png").symlink_to(tmp_path / "elsewhere" / "secret.png")
    (pictures / "epoch-0002.png").write_bytes(b"GIF89a, and not a PNG")
    noise(pictures / "other.png", 8)
    page = looked_at(folder)
    assert page.all("img") == []
    assert "Left out: epoch-0002.png" in page.text
    for link in (pictures / "epoch-0001.png", pictures / "epoch-0002.png", pictures / "other.png"):
        link.unlink()
    pictures.rmdir()
    pictures.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "secret.png").rename(tmp_path / "elsewhere" / "epoch-0003.png")
    assert looked_at(folder).all("img") == []
