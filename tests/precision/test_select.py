import logging
from pathlib import Path

import pytest

from halfstep.errors import PrecisionRefused, UnknownName
from halfstep.precision import probe, select
from halfstep.precision.hardware import Device
from halfstep.precision.names import list_precision_names
from halfstep.precision.precision import resolve_precision_name
from halfstep.precision.probe import Measurements
from halfstep.precision.select import choose_precision
from tests.support.devices import ASKED, ROWS, TPU, Row, named


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured(**combined: float) -> Measurements:
    return Measurements({name: {"GEMM": ratio, "conv2d": ratio} for name, ratio in combined.items()}, {}, 0.0)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.device.name)
def test_what_each_device_falls_back_to(row: Row, asked: str) -> None:
    expected = row.answer(asked)
    choice = choose_precision(asked, device=row.device, fallback=True)
    assert choice.precision is resolve_precision_name(expected)
    assert (choice.asked, choice.device) == (asked, row.device)
    assert [rung.name for rung in choice.rungs if rung.accepted] == [expected]
    assert len(choice.reasons) == len(choice.rungs)
    slow = ["precision.slow"] if (row.device.kind, asked) == ("cpu", "fp16") else []
    substituted = ["precision.substituted"] if asked not in ("auto", expected) else []
    assert [finding.id for finding in choice.findings] == [*substituted, *slow]


@pytest.mark.wording
@pytest.mark.parametrize("asked", ASKED[1:])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.device.name)
def test_a_precision_by_name_runs_or_is_refused(row: Row, asked: str) -> None:
    native, emulated = asked in ("fp32", *row.native.split()), asked in row.emulated.split()
    emulated |= (row.device.kind, asked) == ("cpu", "fp8")
    if not (native or emulated):
        with pytest.raises(PrecisionRefused) as refused:
            choose_precision(asked, device=row.device)
        assert row.device.name in refused.value.given
        assert refused.value.allowed.split(" on ")[0].split(", ") == [
            name for name in list_precision_names() if name in ("fp32", *row.native.split())
        ]
        assert "precision='auto'" in refused.value.do
        return
    choice = choose_precision(asked, device=row.device)
    assert choice.precision is resolve_precision_name(asked)
    assert [(rung.name, rung.accepted) for rung in choice.rungs] == [(asked, True)]
    assert [finding.id for finding in choice.findings] == ["precision.slow"] * emulated


SMALL_TURING = [
    "NVIDIA GeForce GTX 1650",
    "GeForce GTX 1660 Ti with Max-Q Design",
    "NVIDIA T400 4GB",
    "NVIDIA T550 Laptop GPU",
    "NVIDIA T600",
    "NVIDIA T1000 8GB",
    "Quadro T2000",
    "NVIDIA GeForce MX450",
]


@pytest.mark.wording
@pytest.mark.parametrize("name", SMALL_TURING)
def test_fp16_is_never_taken_where_it_is_known_to_be_wrong(name: str) -> None:
    device = Device(kind="cuda", name=name, capability=(7, 5))
    assert choose_precision("auto", device=device).precision.name == "fp32"
    assert choose_precision("auto", device=device, measured=measured(fp16=9.0)).precision.name == "fp32"
    for asked in ("bf16", "fp16", "fp8", "amp"):
        choice = choose_precision(asked, device=device, fallback=True)
        assert choice.precision.name == "fp32"
        assert [finding.id for finding in choice.findings] == ["precision.substituted"]
    with pytest.raises(PrecisionRefused, match=r"known to be wrong: .*NaN.*pytorch#58123") as refused:
        choose_precision("fp16", device=device)
    assert refused.value.allowed == "fp32 on this device"


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA T4G", "Quadro RTX 5000", "NVIDIA GeForce RTX 2060", "NVIDIA T40"])
def test_large_turing_chips_keep_fp16(name: str) -> None:
    device = Device(kind="cuda", name=name, capability=(7, 5))
    assert choose_precision("auto", device=device).precision.name == "fp16"
    assert choose_precision("fp16", device=device).findings == ()


@pytest.mark.parametrize(
    ("name", "expected"), [("A100", "bf16"), ("Tesla T4", "fp16"), ("Apple M1", "fp16"), ("Zen 4", "bf16")]
)
def test_amp_is_the_16_bit_format_of_the_device(name: str, expected: str) -> None:
    for fallback in (True, False):
        choice = choose_precision("amp", device=named(name), fallback=fallback)
        assert (choice.asked, choice.precision.name, choice.findings) == ("amp", expected, ())


@pytest.mark.wording
def test_amp_without_a_16_bit_format_is_fp32_or_refused() -> None:
    choice = choose_precision("amp", device=named("Core i7"), fallback=True)
    assert choice.precision.name == "fp32"
    (finding,) = choice.findings
    assert finding.id == "precision.substituted"
    assert "fp32 is used instead of amp" in finding.evidence
    assert "bf16 is emulated" in finding.evidence
    with pytest.raises(PrecisionRefused, match="amp on Core i7 is refused"):
        choose_precision("amp", device=named("Core i7"))


@pytest.mark.wording
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("asked", [*ASKED, "amp", resolve_precision_name("bf16")])
def test_a_tpu_is_always_refused(asked: object, fallback: bool) -> None:
    with pytest.raises(PrecisionRefused, match="torch_xla"):
        choose_precision(asked, device=TPU, fallback=fallback)


@pytest.mark.wording
def test_a_fall_is_loud_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        choice = choose_precision("bf16-mixed", device=named("Tesla T4"), fallback=True)
    (finding,) = choice.findings
    assert finding.severity == "warning"
    assert "fp16 is used instead of bf16" in finding.evidence
    assert "7.5 < 8.0" in finding.evidence
    assert finding.evidence in caplog.text
    assert choice.took == "'bf16-mixed' is Lightning's word for bf16"
    assert [rung.name for rung in choice.rungs] == ["bf16", "fp16"]
    assert choice.reasons[0] == "bf16 rejected: compute capability 7.5 < 8.0: bf16 is emulated"


@pytest.mark.wording
def test_emulation_is_loud_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        choice = choose_precision("bf16", device=named("Core i7"))
    (finding,) = choice.findings
    assert (finding.id, finding.severity) == ("precision.slow", "warning")
    assert "bf16 is slow on Core i7: bf16 is emulated; no amx_bf16" in finding.evidence
    assert "auto or fp32" in finding.fix
    assert finding.evidence in caplog.text


def test_what_is_native_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    choice = choose_precision("bf16", device=named("A100"))
    assert choice.findings == ()
    assert caplog.text == ""


def test_the_whole_ladder_is_told() -> None:
    choice = choose_precision("fp8", device=named("Core i7"), fallback=True)
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
    monkeypatch.setattr(select, "describe_device", lambda _device: named("Xeon with AMX"))
    seen = []

    def fake(device: Device, *, fresh: bool) -> Measurements:
        seen.append((device.name, fresh))
        return measured(bf16=0.9)

    monkeypatch.setattr(probe, "measure_speedups", fake)
    assert choose_precision("auto", device="cpu", fresh=True).precision.name == "fp32"
    assert choose_precision("bf16", device="cpu").precision.name == "bf16"
    assert seen == [("Xeon with AMX", True)]


def test_a_precision_object_is_taken_as_it_is() -> None:
    bf16 = resolve_precision_name("bf16")
    choice = choose_precision(bf16, device=named("Tesla T4"))
    assert choice.precision is bf16
    assert choice.findings == ()


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UnknownName):
        choose_precision("bf61", device=named("A100"))
