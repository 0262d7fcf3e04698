from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halfstep.errors import UnknownName, WrongUse
from halfstep.precision import hardware
from halfstep.precision.hardware import (
    FORMAT_NAMES,
    Device,
    describe_device,
    describe_device_facts,
    find_format_support,
)
from tests.support.devices import ROWS, TPU, Row, named


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.device.name)
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_what_each_device_does_natively(row: Row, format_name: str) -> None:
    can = find_format_support(row.device, format_name)
    assert can.native == (format_name in {"fp32", *row.native.split()})
    assert len(can.reason) > 10
    assert "\n" not in can.reason


def test_the_reason_names_the_fact() -> None:
    assert find_format_support(named("Tesla T4"), "bf16").reason == "compute capability 7.5 < 8.0: bf16 is emulated"
    assert "1/64" in find_format_support(named("GTX 1080 Ti"), "fp16").reason
    assert "AMX" in find_format_support(named("Xeon with AMX"), "bf16").reason
    assert "AVX-512" in find_format_support(named("Zen 4"), "bf16").reason
    assert "older than the M3" in find_format_support(named("Apple M1"), "bf16").reason
    assert "macOS 13.6 < 14" in find_format_support(named("Apple M2"), "bf16").reason
    assert "gfx1030" in find_format_support(named("Radeon RX 6900 XT"), "bf16").reason


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_a_tpu_is_named_and_refused_everywhere(format_name: str) -> None:
    can = find_format_support(TPU, format_name)
    assert not can.native
    assert "torch_xla" in can.reason


def test_the_best_device_present_is_described() -> None:
    here = describe_device()
    assert here.place
    assert here.torch == torch.__version__
    assert describe_device("cpu").kind == "cpu"
    assert describe_device(torch.device("cpu")) == describe_device("cpu")


def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Device:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(hardware, "CPUINFO", path)
    monkeypatch.setattr("sys.platform", "linux")
    return describe_device("cpu")


def test_an_x86_cpu_is_read_from_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    here = cpuinfo(monkeypatch, tmp_path, text)
    assert here.name == "Some Xeon"
    assert here.isa == {"fpu", "avx2", "amx_bf16"}
    assert find_format_support(here, "bf16").native


def test_an_arm_cpu_is_read_from_its_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = cpuinfo(monkeypatch, tmp_path, "processor : 0\nFeatures : fp asimd svebf16 i8mm bf16\n")
    assert here.isa == {"fp", "asimd", "sve_bf16", "i8mm", "bf16"}
    assert here.name


def test_an_emulating_cpu_is_not_called_native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = cpuinfo(monkeypatch, tmp_path, "model name : Old\nflags : fpu avx2 avx512f\n")
    assert not find_format_support(here, "bf16").native


def test_torch_is_asked_where_the_system_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_torch_facts", lambda: {"amx_bf16": True, "avx2": False, "cpu_name": "OnProgress"})
    here = cpuinfo(monkeypatch, tmp_path, "")
    assert here.name == "OnProgress"
    assert here.isa == {"amx_bf16"}


def test_a_mac_is_asked_through_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"machdep.cpu.brand_string": "Apple M3", "hw.optional.arm.FEAT_BF16": "1"}
    monkeypatch.setattr(hardware, "_sysctl", lambda key: answers.get(key, ""))
    monkeypatch.setattr("sys.platform", "darwin")
    here = describe_device("cpu")
    assert (here.name, here.isa) == ("Apple M3", frozenset({"bf16"}))


def on_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None, **properties: object) -> Device:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    return describe_device()


@pytest.mark.wording
def test_an_nvidia_gpu_is_asked_for_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    here = on_gpu(monkeypatch, None, name="Tesla T4", major=7, minor=5, gcnArchName="")
    assert (here.kind, here.capability, here.place) == ("cuda", (7, 5), "cuda:0")
    assert not find_format_support(here, "bf16").native
    with pytest.raises(WrongUse, match="cuda:7"):
        describe_device("cuda:7")


def test_an_amd_gpu_is_asked_for_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    here = on_gpu(monkeypatch, "6.4", name="MI250X", major=9, minor=0, gcnArchName="gfx90a:sramecc+:xnack-")
    assert (here.kind, here.arch, here.capability) == ("rocm", "gfx90a", None)
    assert find_format_support(here, "bf16").native
    assert not find_format_support(here, "tf32").native


def test_bf16_is_never_asked_of_the_permissive_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: object, **_named: object) -> bool:
        raise AssertionError("is_bf16_supported is True on a T4")

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", forbidden)
    here = on_gpu(monkeypatch, None, name="Tesla T4", major=7, minor=5, gcnArchName="")
    assert [name for name in FORMAT_NAMES if find_format_support(here, name).native] == ["fp32", "fp16"]


@pytest.mark.parametrize("place", ["tpu", "tpu:0", "xla", "xla:1"])
def test_a_tpu_is_described_by_either_word(place: str) -> None:
    assert describe_device(place).kind == "tpu"


@pytest.mark.wording
def test_a_device_that_is_absent_or_unknown_is_an_error() -> None:
    absent = "mps" if hardware.list_device_types()[0] != "mps" else "xpu"
    with pytest.raises(WrongUse, match="not on this machine"):
        describe_device(absent)
    with pytest.raises(UnknownName, match="did you mean 'cuda'"):
        describe_device("cuda0x")
    assert describe_device("hpu").kind == "other"


def test_facts_are_words_and_skip_what_is_empty() -> None:
    assert describe_device_facts(named("Tesla T4")) == {"compute capability": "7.5"}
    assert describe_device_facts(named("Instinct MI250X")) == {"architecture": "gfx90a"}
    assert describe_device_facts(named("Xeon with AMX"))["instructions"] == "AMX-BF16, AVX512-BF16"
