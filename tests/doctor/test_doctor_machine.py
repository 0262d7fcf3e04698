"""Described machines: what is known to be bad there, and whether shared memory is enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.doctor.machine import (
    MachineFacts,
    check_machine,
    check_shared_memory,
    is_version_within,
    read_machine,
)
from halfstep.doctor.wheel import DriverGpu, TorchBuild
from halfstep.precision.known_bad import read_known_bad

A100 = DriverGpu("NVIDIA A100-SXM4-40GB", (8, 0))


def ids(machine: MachineFacts, build: TorchBuild | None = None) -> set[str]:
    return {finding.id for finding in check_machine(machine, build)}


@pytest.mark.parametrize(
    ("version", "ranges", "inside"),
    [
        ("2.13.0", ">=2.13,<2.14", True),
        ("2.13.0+cu130", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("2.9.1", ">=2.9,<2.10", True),
        ("2.10.0", ">=2.9,<2.10", False),
        ("2.10", ">=2.9,<2.10", False),
        ("1.15.0", "<=1.15.0", True),
        ("1.15", "<=1.15.0", True),
        ("1.15.1", "<=1.15.0", False),
        ("1.16.0.dev0", "<=1.15.0", False),
        ("2.13.0a0+git123", ">=2.13,<2.14", True),
        ("3.0", "<2.14", False),
    ],
)
def test_versions(version: str, ranges: str, inside: bool) -> None:
    assert is_version_within(version, ranges) is inside


def test_every_entry_is_whole_and_cites_a_source() -> None:
    entries = read_known_bad()
    assert len(entries) >= 15
    assert len({entry["id"] for entry in entries}) == len(entries)
    for entry in entries:
        assert entry["severity"] in ("note", "warning", "error")
        assert entry["what"]
        assert entry["fix"]
        assert entry["sources"]
        for own in (
            source.removeprefix("halfstep: ") for source in entry["sources"] if source.startswith("halfstep: ")
        ):
            assert (Path(__file__).parents[2] / own).exists(), own
        assert "gpu" in entry or "package" in entry
        if "package" in entry:
            assert re.fullmatch(r"(>=|<=|<)[\d.]+(,(<|<=)[\d.]+)?", entry["versions"])


_GPUS = {
    "machine.gtx_16xx_fp16": "NVIDIA GeForce GTX 1660 Ti",
    "machine.rdna4_expandable_segments": "AMD Radeon RX 9070 XT",
    "machine.strix_halo_attention": "AMD Radeon 8060S",
    "machine.mi300_attention_backward": "AMD Instinct MI300X",
}


@pytest.mark.parametrize("entry", read_known_bad(), ids=lambda entry: entry["id"])
def test_every_entry_is_found_where_it_applies_and_nowhere_else(entry: dict[str, str]) -> None:
    boards: tuple[DriverGpu, ...] = () if entry.get("only_cpu") else (A100,)
    packages: dict[str, str] = {}
    apple = bool(entry.get("only_apple"))
    good = [MachineFacts()]
    if "gpu" in entry:
        boards = (DriverGpu(_GPUS[entry["id"]], (7, 5)),)
    if "package" in entry:
        version = re.findall(r"[\d.]+", entry["versions"])[0]
        inside = version if "<=" in entry["versions"] or ">=" in entry["versions"] else "2.0"
        packages = {entry["package"]: inside}
        outside = "99.0" if "<" in entry["versions"] else "0.1"
        good += [MachineFacts({entry["package"]: outside}, boards, apple=apple), MachineFacts({}, boards, apple=apple)]
    if "gpu" in entry:
        good.append(MachineFacts(packages, (DriverGpu("NVIDIA GeForce RTX 2080", (7, 5)),)))
    elif entry.get("only_cpu") or entry.get("only_gpu"):
        good.append(MachineFacts(packages, () if boards else (A100,)))
    if apple:
        good.append(MachineFacts(packages, boards))
    bad = MachineFacts(packages, boards, apple=apple)
    assert entry["id"] in ids(bad)
    for machine in good:
        assert entry["id"] not in ids(machine)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("size", "workers", "batch", "small"),
    [
        (64 * 2**20, None, None, True),
        (2**33, None, None, False),
        (None, None, None, False),
        (2**30, 8, 2**26, False),
        (2**30 - 1, 8, 2**26, True),
        (64 * 2**20, 0, 2**30, False),
        (64 * 2**20, 2, 2**20, False),
    ],
)
def test_shared_memory(size: int | None, workers: int | None, batch: int | None, small: bool) -> None:
    found = check_shared_memory(size, workers, batch)
    assert [finding.id for finding in found] == ["machine.shared_memory"] * small
    assert all("--shm-size" in finding.fix for finding in found)


def test_a_machine_where_all_is_well() -> None:
    packages = {entry["package"]: "99.0" for entry in read_known_bad() if "package" in entry}
    assert check_machine(MachineFacts(packages, (A100,), 2**34)) == []


def test_the_build_is_checked_too() -> None:
    build = TorchBuild("2.13.0", cuda=(13, 0), architectures=("sm_90",), boards=(A100,), driver=(13, 0))
    assert "wheel.no_kernels" in ids(MachineFacts(), build)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.packages["torch"]
    assert machine.shared_memory is None or machine.shared_memory > 0
    assert all(finding.evidence.isprintable() for finding in check_machine(machine))
