"""Devices as data: what people type for them, how much of them a step may take, what they can do."""

from __future__ import annotations

import json
import os
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from halfstep import host_memory
from halfstep.errors import UnknownName, WrongUse
from halfstep.measure.memory.devices import GIB, device_named, list_device_ids
from halfstep.measure.memory.estimate import estimate
from halfstep.measure.memory.report import choose_target_precision
from halfstep.measure.plan.race import find_free_memory
from halfstep.train.machine import detect_machine

ROWS = json.loads(resources.files("halfstep.measure.memory").joinpath("devices.json").read_text())["devices"]


def test_there_are_many_and_each_is_found_by_its_short_and_its_long_name() -> None:
    assert len(list_device_ids()) == len(set(list_device_ids())) == len(ROWS) >= 25
    for row in ROWS:
        for text in (row["id"], row["id"].upper(), row["name"]):
            assert device_named(text).id == row["id"], text
        assert device_named(row["id"]).memory == row.get("driver_mib", row["gib"] * 1024) << 20
        assert row.get("capability") or row.get("arch") or row.get("isa") or row["kind"] == "mps"
        assert "https://" in row["source"], row["id"]
        assert "driver_mib" not in row or (0.6 * row["gib"] * 1024 < row["driver_mib"] <= row["gib"] * 1024)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        (" RTX 4090 24GB ", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 PCIe", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_spelling_is_tolerant(typed: str, meant: str) -> None:
    assert device_named(typed).id == meant


@pytest.mark.wording
def test_a_name_of_two_sizes_lists_both() -> None:
    with pytest.raises(UnknownName) as told:
        device_named("NVIDIA A100")
    assert told.value.allowed == "a100-40gb, a100-80gb"
    assert "--device a100-80gb" in told.value.do


@pytest.mark.wording
@pytest.mark.parametrize(("typed", "near"), [("rtx409", "rtx4090"), ("a100-80g", "a100-80gb"), ("l40", "l40s")])
def test_an_unknown_name_offers_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{near}'"):
        device_named(typed)


@pytest.mark.wording
@pytest.mark.parametrize("typed", ["a1000", "rtx 5000 ada", "a4000", "h1000-80gb"])
def test_another_card_is_not_offered_for_it(typed: str) -> None:
    with pytest.raises(UnknownName) as told:
        device_named(typed)
    assert "did you mean" not in told.value.do
    assert "--device 24GB" in told.value.do


@pytest.mark.wording
@pytest.mark.parametrize("typed", ["cpu:7", "cpu:x", "cpu:", "xpu:3", "cuda:99"])
def test_a_device_that_this_machine_has_not_is_told_with_one_to_type(typed: str) -> None:
    with pytest.raises(UnknownName, match=f"this machine has no {typed}") as told:
        device_named(typed)
    assert "--device a100-80gb" in told.value.do
    assert device_named("cpu:0").device.kind == "cpu"


@pytest.mark.parametrize("typed", ["", "   ", "zzz", "-4GB", "4XB", "GB", "nan GB", "a100-60gb"])
def test_nonsense_is_refused(typed: str) -> None:
    with pytest.raises(UnknownName):
        device_named(typed)


@pytest.mark.parametrize(
    ("typed", "gib"),
    [("4GB", 4), ("24 GiB", 24), ("4g", 4), ("4096MB", 4), ("4000MB", 4000 / 1024), ("1.5gb", 1.5), ("99999GB", 99999)],
)
def test_a_size_is_a_device_of_which_nothing_else_is_known(typed: str, gib: float) -> None:
    target = device_named(typed)
    assert target.memory == int(gib * GIB)
    assert target.rules == "cuda"
    assert "nothing is known" in target.ability("bf16").reason


@pytest.mark.wording
def test_what_a_process_takes_and_a_margin_are_left_alone() -> None:
    target = device_named("4GB")
    assert target.usable == int((4 * GIB - target.reserved) * 0.95)
    assert 0 < target.reserved < GIB
    with pytest.raises(WrongUse, match=r"0\.5GB"):
        device_named("0.5GB")


def test_this_machine_is_known_by_its_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(host_memory, "CGROUP", Path("nowhere"))
    assert device_named("cpu").memory == host_memory.read_total_memory() == pytest.approx(pages, rel=0.01)
    assert device_named("cpu").rules == "cpu"
    monkeypatch.setitem(sys.modules, "psutil", None)  # not installed
    assert host_memory.read_total_memory() == pages


def test_sizing_plan_and_estimate_know_the_limit_of_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "job" / "step"
    own.mkdir(parents=True)
    for folder, limit in ((own, "max"), (own.parent, str(GIB))):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(GIB // 2))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 4}\n")
    (tmp_path / "own").write_text("0::/job/step\n")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUP", tmp_path / "own")
    assert device_named("cpu").memory == detect_machine("cpu").memory == GIB
    assert find_free_memory(torch.device("cpu")) == GIB - GIB // 4


@pytest.mark.parametrize(("name", "gib"), [("t4", 14.6), ("a10", 22.0), ("l4", 22.0), ("l40s", 44.4)])
def test_what_torch_sees_of_a_card_with_error_correction_is_not_promised(name: str, gib: float) -> None:
    assert device_named(name).usable < gib * GIB


@pytest.mark.parametrize(("name", "width"), [("t4", 31_400), ("a10", 38_690), ("l40s", 54_650)])
def test_a_step_between_the_memory_of_the_data_sheet_and_that_of_torch_does_not_fit(name: str, width: int) -> None:
    with torch.device("meta"):
        model, batch = torch.nn.Linear(width, width, bias=False), torch.empty(8, width)
    found = estimate(
        model, lambda model, batch: model(batch).float().square().mean(), batch, precision="fp32", device=name
    )
    device = device_named(name)
    row = next(row for row in ROWS if row["id"] == name)
    assert device.usable < found.peak < row["gib"] * GIB


def test_a_t4_only_emulates_bf16_and_is_given_fp16() -> None:
    t4 = device_named("t4")
    assert not t4.ability("bf16").native
    assert "emulated" in t4.ability("bf16").reason
    assert choose_target_precision(t4) == "fp16"


@pytest.mark.parametrize(
    ("name", "choice"),
    [("a100-80gb", "bf16"), ("v100-16gb", "fp16"), ("p100", "fp16"), ("gtx1080ti", "fp32"), ("mi300x", "bf16"),
     ("4GB", "bf16")],
)  # fmt: skip
def test_what_auto_would_take(name: str, choice: str) -> None:
    assert choose_target_precision(device_named(name)) == choice
