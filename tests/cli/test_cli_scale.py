"""`halfstep estimate --world` as a person types it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.measure.case import build_case
from halfstep.measure.memory.devices import device_named
from halfstep.measure.scale.counting import count_rank_bytes
from halfstep.measure.scale.layout import RankLayout
from halfstep.measure.scale.page import LayoutCost
from halfstep.measure.scale.upkeep import compute_upkeep
from halfstep.measure.setting import StepSetting
from tests.support.cases import convolutions

CASE = "tests.support.cases:convolutions"


def halfstep(*words: object) -> Result:
    typed = ["estimate", CASE, *map(str, words)]
    return CliRunner(env={"COLUMNS": "80"}).invoke(build(), typed, catch_exceptions=False)


def report_of(*words: object) -> dict[str, Any]:
    done = halfstep(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_page_answers_first_and_fits_80_columns() -> None:
    done = halfstep("--world", 1024, "--nodes", 128, "--device", "h100-80gb")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ddp: a full copy needs")
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    words = " ".join(done.stdout.split())
    for said in (
        "hsdp 128×8",
        "agreement 1 128 B",
        "2,049 files, 2,051 fsyncs",
        "Llama 3 405B 49.5 h",
        "OPT-175B 8.1 h",
    ):
        assert said in words
    assert "NVIDIA H100 SXM datasheet" in words
    assert "none of it was measured on a cluster" in words


def test_the_report_has_every_number() -> None:
    report = report_of("--world", 16, "--nodes", 2, "--device", "h100-80gb", "--precision", "bf16")
    assert report["take"] == "ddp"
    assert [row["name"] for row in report["layouts"]] == ["ddp", "hsdp 2×8", "fsdp"]
    assert report["samples"] == 16 * 4
    for row in report["layouts"]:
        assert sum(row["memory"].values()) == row["peak"]
        assert sum(one["inside"] for one in row["collectives"]) == pytest.approx(row["bytes_inside"], abs=5)
        assert row["seconds"]["exposed"] <= row["seconds"]["communication"]
    fsdp = report["layouts"][-1]
    assert {one["collective"] for one in fsdp["collectives"]} == {"all-gather", "reduce-scatter", "agreement"}


def test_the_least_sharding_that_fits_is_taken_and_says_why() -> None:
    from halfstep.measure.scale import report as module

    def costing(shard_size: int, peak: int, fits: bool) -> LayoutCost:
        counts = count_rank_bytes(lambda: build_case(*convolutions()), StepSetting(), RankLayout(64, 8, shard_size))
        return LayoutCost(counts, {"weights": peak}, fits, [], 0, 0, None, compute_upkeep(counts, 0))

    rows = [costing(1, 3 << 40, False), costing(8, 1 << 30, True)]
    target = device_named("h100-80gb")
    said = module.explain_layout_choice(rows, rows[1], target, "auto", StepSetting())
    assert said == (
        "hsdp 8×8: ddp would take 3.00 TiB; sharded over 8 ranks inside a node it is 1.00 GiB of the 74.95 GiB "
        "available to a rank"
    )
    plain, reduced = StepSetting(batch=8), StepSetting(batch=1, recompute=True)
    more, least = (
        module.explain_layout_choice(rows[:1], None, target, "auto", setting) for setting in (plain, reduced)
    )
    assert more.startswith("none fits: ddp needs the least")
    assert more.endswith("; recompute activations or take a smaller batch or shard over more ranks")
    assert least.endswith("available to a rank; shard over more ranks")


def test_a_device_without_known_links_has_bytes_and_no_seconds() -> None:
    report = report_of("--world", 8, "--device", "24GB", "--sharding", "fsdp")
    assert report["links"] is None
    assert report["layouts"][0]["seconds"] is None
    assert report["layouts"][0]["bytes_inside"] > 0


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--world", 10, "--nodes", 4), "10 ranks on 4 nodes"),
        (("--world", 64, "--shard-size", 7), "--shard-size 7"),
        (("--nodes", 4), "with --world"),
        (("--world", 8, "--survive", "fp16"), "--survive with --world"),
        (("--world", 8, "--precision", "bf16,fp32"), "one --precision"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(words: tuple[object, ...], said: str) -> None:
    done = halfstep(*words)
    assert done.exit_code not in (0, 1)
    assert said in " ".join(done.output.split())
    assert "do: " in done.output
