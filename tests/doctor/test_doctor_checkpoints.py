"""Checkpoints are looked at, never loaded: what torch, transformers and Lightning write, and what is hostile."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfstep.doctor.checkpoints import check_checkpoint, read_header
from halfstep.doctor.pickled import read_pickle_outline


class Canary:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.marker)!r}, 'w').close()",))


def trained(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model and an optimizer after a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 4, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def ids(path: Path) -> list[str]:
    return sorted(finding.id for finding in check_checkpoint(path, path.name))


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, []),
        ({"args": argparse.Namespace(fp16=False)}, []),
        ({"args": argparse.Namespace(fp16=True, lr=0.1)}, ["checkpoint.no_scaler"]),
        ({"config": {"train": {"mixed_precision": "fp16"}}}, ["checkpoint.no_scaler"]),
        ({"hyper_parameters": {"precision": "16-mixed"}}, ["checkpoint.no_scaler"]),
        ({"hyper_parameters": {"precision": "16-mixed"}, "MixedPrecision": {"scale": 1.0}}, []),
        ({"args": argparse.Namespace(fp16=True), "scaler": {"scale": 1024.0}}, []),
        ({"args": argparse.Namespace(fp16=True), "loss_scaler": {}}, []),
        ({"args": argparse.Namespace(mixed_precision="bf16", fp16=None)}, []),
    ],
)
def test_a_missing_scaler_where_the_run_is_known_to_be_in_fp16(
    tmp_path: Path, more: dict[str, Any], found: list[str]
) -> None:
    torch.save({**trained(), **more}, tmp_path / "last.pt")
    assert ids(tmp_path / "last.pt") == found


def test_the_same_in_the_folder_of_a_trainer(tmp_path: Path) -> None:
    """transformers keeps arguments, optimizer and scaler apart."""
    torch.save(trained()["optimizer"], tmp_path / "optimizer.pt")
    torch.save(argparse.Namespace(fp16=True), tmp_path / "training_args.bin")
    assert ids(tmp_path) == ["checkpoint.no_scaler"]
    torch.save({"scale": 1.0}, tmp_path / "scaler.pt")
    assert ids(tmp_path) == []


@pytest.mark.parametrize(("dtype", "severity"), [(torch.float16, "warning"), (torch.bfloat16, "warning")])
def test_weights_in_16_bits_beside_an_optimizer(tmp_path: Path, dtype: torch.dtype, severity: str) -> None:
    torch.save(trained(dtype), tmp_path / "a.pth")
    [finding] = check_checkpoint(tmp_path / "a.pth", "a.pth")
    assert (finding.id, finding.severity) == ("checkpoint.weights_in_16_bits", severity)


@pytest.mark.wording
def test_weights_in_16_bits_alone_are_a_note(tmp_path: Path) -> None:
    weights = nn.Linear(4, 4).half().state_dict()
    torch.save(weights, tmp_path / "a.pt")
    save_file(weights, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        [finding] = check_checkpoint(path, path.name)
        assert (finding.id, finding.severity) == ("checkpoint.weights_in_16_bits", "note")
        assert "2 of 2" in finding.evidence


@pytest.mark.wording
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_numbers_that_are_not_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    mask = torch.zeros(4, 4).fill_(-torch.inf).triu(1)
    save_file({**model.state_dict(), "attention_mask": mask}, tmp_path / "a.safetensors")
    assert "checkpoint.not_finite" not in ids(tmp_path / "a.safetensors")
    model[1].running_mean[2] = value
    save_file({**model.state_dict(), "attention_mask": mask}, tmp_path / "a.safetensors")
    found = [f for f in check_checkpoint(tmp_path / "a.safetensors", "a") if f.id == "checkpoint.not_finite"]
    assert "1.running_mean" in found[0].evidence


def test_a_checkpoint_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000120.0007"
    folder.mkdir()
    (folder / "MANIFEST.json").write_text("{}")
    for rank in range(2):
        numbers = torch.tensor([1.0, torch.nan if rank else 2.0])
        content = {"weights/buffers/norm.running_var": numbers, "weights/model/a": torch.ones(2).bfloat16()}
        save_file(content, folder / f"rank-{rank:05d}.safetensors")
    found = {finding.id: finding.file for finding in check_checkpoint(folder, folder.name)}
    assert found == {
        "checkpoint.not_finite": f"{folder.name}/rank-00001.safetensors",
        "checkpoint.weights_in_16_bits": f"{folder.name}/rank-00000.safetensors",
    }


def test_a_clean_one_of_every_kind(tmp_path: Path) -> None:
    torch.save(trained(), tmp_path / "a.pt")
    save_file(trained()["model"], tmp_path / "a.safetensors")
    (tmp_path / "notes.txt").write_text("nothing")
    assert ids(tmp_path) == []


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({**trained(), "extra": Canary(marker), "args": argparse.Namespace(fp16=True)}, tmp_path / "a.pt")
    (tmp_path / "b.bin").write_bytes(pickle.dumps(Canary(marker)))
    assert ids(tmp_path / "a.pt") == ["checkpoint.no_scaler"]
    assert ids(tmp_path / "b.bin") == []
    assert not marker.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert marker.exists(), "the canary can sing"


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_followed(tmp_path: Path, protocol: int) -> None:
    content = {"optimizer": {"lr": 0.1}, "args": argparse.Namespace(fp16=True), "list": [1, 2.5, None, True, ("a",)]}
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=protocol))
    root = read_pickle_outline(tmp_path / "a.pt")
    assert root is not None
    assert root["list"] == content["list"]
    if protocol >= 2:  # earlier ones build objects through copyreg
        assert root["args"].state == {"fp16": True}


def test_hostile_files_give_nothing(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(trained(), whole)
    content = whole.read_bytes()
    loop: list[Any] = []
    loop.append(loop)
    pickles = {"loop": pickle.dumps(loop), "empty": b"", "stop": b".", "pops": b"0" * 100 + b".", "get": b"h\x05."}
    pickles["deep"] = b"(" * 100_000 + b"l" * 100_000 + b"."
    for name, text in pickles.items():
        with zipfile.ZipFile(tmp_path / f"{name}.pt", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", text)
    for number in range(0, len(content), max(1, len(content) // 40)):
        (tmp_path / f"cut{number}.pt").write_bytes(content[:number])
        changed = bytearray(content)
        changed[number] ^= 0xFF
        (tmp_path / f"bit{number}.pt").write_bytes(changed)
    headers = [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-5, 1e9]}}']
    headers += [json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]}}).encode(), b"[" * 10**5]
    for number, header in enumerate(headers):
        (tmp_path / f"{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "length.safetensors").write_bytes(b"\xff" * 8)
    (tmp_path / "link.pt").symlink_to(tmp_path / "link.pt")
    found = {finding.id for finding in check_checkpoint(tmp_path, "folder")}
    assert found <= {"checkpoint.unread", "checkpoint.weights_in_16_bits"}
    assert read_header(tmp_path / "length.safetensors") is None


def test_a_project_is_told_about_the_checkpoints_in_it(tmp_path: Path) -> None:
    from halfstep.doctor.project_check import check_project

    (tmp_path / "weights").mkdir()
    save_file({"norm.running_var": torch.tensor([1.0, torch.nan])}, tmp_path / "weights" / "last.safetensors")
    pickled = tmp_path / "old.pt"
    marker = tmp_path / "executed"
    pickled.write_bytes(pickle.dumps(Canary(marker)))
    report = check_project(str(tmp_path), {})
    found = {(finding.id, finding.file) for finding in report.findings}
    assert ("checkpoint.not_finite", "weights/last.safetensors") in found
    assert not marker.exists()
