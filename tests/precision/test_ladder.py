import logging
from pathlib import Path

import pytest

from halfstep.errors import PrecisionRefused, UnknownName
from halfstep.precision import select
from halfstep.precision.hardware import Device
from halfstep.precision.precision import precision_named
from halfstep.precision.probe import Measurements
from halfstep.precision.select import choose_precision
from tests.support.devices import ASKED, ROWS, TPU, Row, named


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(**combined: float) -> Measurements:
    return Measurements({name: {"GEMM": ratio, "conv2d": ratio} for name, ratio in combined.items()}, {}, 0.0)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.device.name)
def test_what_each_device_answers(row: Row, asked: str, strict: bool) -> None:
    expected = row.answer(asked)
    if strict and asked not in ("auto", expected):
        with pytest.raises(PrecisionRefused) as refused:
            choose_precision(asked, device=row.device, strict=True)
        assert row.device.name in refused.value.given
        assert "fp32" in refused.value.allowed
        return
    choice = choose_precision(asked, device=row.device, strict=strict)
    assert choice.precision is precision_named(expected)
    assert (choice.asked, choice.device) == (asked, row.device)
    assert [rung.name for rung in choice.rungs if rung.accepted] == [expected]
    assert len(choice.reasons) == len(choice.rungs)
    assert [finding.id for finding in choice.findings] == expected_findings(row.device, asked, expected)


def expected_findings(device: Device, asked: str, expected: str) -> list[str]:
    if asked not in ("auto", expected):
        return ["precision.substituted"]
    return ["precision.slow"] if (device.kind, asked) == ("cpu", "fp16") else []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("asked", [*ASKED, precision_named("bf16")])
def test_a_tpu_is_always_refused(asked: object, strict: bool) -> None:
    with pytest.raises(PrecisionRefused, match="torch_xla"):
        choose_precision(asked, device=TPU, strict=strict)


def test_a_fall_is_loud_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        choice = choose_precision("bf16-mixed", device=named("Tesla T4"))
    (finding,) = choice.findings
    assert finding.severity == "warning"
    assert "bf16 was asked for and fp16 runs" in finding.evidence
    assert "7.5 < 8.0" in finding.evidence
    assert finding.evidence in caplog.text
    assert choice.took == "'bf16-mixed' is Lightning's word for bf16"
    assert [rung.name for rung in choice.rungs] == ["bf16", "fp16"]
    assert choice.reasons[0] == "bf16 passed over: compute capability 7.5 < 8.0: bf16 is emulated"


def test_what_is_native_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose_precision("bf16", device=named("A100"))
    assert choice.findings == ()
    assert caplog.text == ""


def test_the_whole_ladder_is_told() -> None:
    choice = choose_precision("fp8", device=named("Core i7"))
    assert [(rung.name, rung.accepted) for rung in choice.rungs] == [
        ("fp8", False),
        ("bf16", False),
        ("fp16", False),
        ("tf32", False),
        ("fp32", True),
    ]


@pytest.mark.parametrize(
    ("speeds", "winner"),
    [
        ({"bf16": 2.0, "fp16": 2.0, "tf32": 1.5}, "bf16"),
        ({"bf16": 1.81, "fp16": 2.0, "tf32": 1.5}, "bf16"),
        ({"bf16": 1.79, "fp16": 2.0, "tf32": 1.5}, "fp16"),
        ({"bf16": 0.7, "fp16": 1.09, "tf32": 1.5}, "tf32"),
        ({"bf16": 0.7, "fp16": 1.09, "tf32": 1.05}, "fp32"),
        ({"bf16": 1.1, "fp16": 1.0, "tf32": 1.0}, "bf16"),
        ({"fp16": 1.3}, "fp16"),
        ({}, "fp32"),
    ],
)
def test_auto_takes_the_fastest_that_is_worth_it(speeds: dict[str, float], winner: str) -> None:
    choice = choose_precision(device=named("A100"), measured=measured(**speeds))
    assert choice.precision.name == winner
    assert choice.findings == ()
    assert [rung.name for rung in choice.rungs if rung.accepted] == [winner]


def test_auto_never_takes_fp16_on_a_cpu_however_fast() -> None:
    choice = choose_precision(device=named("Xeon with AMX"), measured=measured(bf16=1.2, fp16=9.0))
    assert choice.precision.name == "bf16"
    choice = choose_precision(device=named("Core i7"), measured=measured(fp16=9.0))
    assert choice.precision.name == "fp32"


def test_auto_does_not_trust_a_fast_emulation() -> None:
    choice = choose_precision(device=named("Tesla T4"), measured=measured(bf16=9.0, fp16=2.0))
    assert choice.precision.name == "fp16"


def test_a_format_that_failed_in_one_operation_is_not_taken() -> None:
    some = Measurements({"bf16": {"GEMM": 3.0}, "fp16": {"GEMM": 2.0}}, {"bf16": "conv3d failed: no engine"}, 0.0)
    choice = choose_precision(device=named("A100"), measured=some)
    assert choice.precision.name == "fp16"
    assert "no engine" in choice.reasons[0]


def test_auto_measures_a_device_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "describe", lambda _device: named("Xeon with AMX"))
    seen = []

    def fake(device: Device, *, fresh: bool) -> Measurements:
        seen.append((device.name, fresh))
        return measured(bf16=0.9)

    monkeypatch.setattr(select, "measure", fake)
    assert choose_precision("auto", device="cpu", fresh=True).precision.name == "fp32"
    assert choose_precision("bf16", device="cpu").precision.name == "bf16"
    assert seen == [("Xeon with AMX", True)]


def test_a_precision_object_is_taken_as_it_is() -> None:
    bf16 = precision_named("bf16")
    choice = choose_precision(bf16, device=named("Tesla T4"), strict=True)
    assert choice.precision is bf16
    assert choice.findings == ()


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UnknownName):
        choose_precision("bf61", device=named("A100"))
