"""Pretrained weights without a connection: quick, quiet, and a sentence that says what to place where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import constants

from halfstep.errors import BadData
from halfstep.tasks.shared import pretrained
from halfstep.train.weights import load_weights
from tests.tasks.made import made

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.wording
@pytest.mark.parametrize(
    ("task", "model", "file"),
    [
        ("classification", {"name": "resnet18"}, "timm/resnet18.a1_in1k/resolve/main/model.safetensors"),
        ("segmentation", {"name": "smp-unet"}, "smp-hub/resnet34.imagenet/resolve/main/model.safetensors"),
        ("segmentation", {"name": "fpn", "encoder": "tu-resnet18"}, "timm/resnet18.a1_in1k/resolve/main/model"),
    ],
)
def test_the_error_says_which_file_to_place_where(
    task: str, model: dict[str, str], file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(BadData) as caught:
        made(task, model={**model, "weights": "pretrained"}).model()
    assert time.monotonic() - began < 15
    assert f"place {NOWHERE}/{file}" in caught.value.do
    place = caught.value.do.rpartition("model.weights=")[2]
    assert Path(place).is_absolute()
    assert f" at {place} and" in caught.value.do
    assert "Retry" not in capfd.readouterr().err
    assert constants.HF_HUB_OFFLINE is False


def test_the_file_that_was_placed_is_taken(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=1000)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "resnet10t.safetensors")
    model = made("classification").model()
    report = load_weights(model, tmp_path / "resnet10t.safetensors", partial=True)
    assert torch.equal(model.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    assert report.missing == ()
    assert [text.partition(" ")[0] for text in report.shapes] == ["fc.weight", "fc.bias"]


def test_an_encoders_file_goes_into_the_encoder(tmp_path: Path) -> None:
    task = made("segmentation", model={"name": "smp-unet", "encoder": "resnet18"})
    theirs, model = task.model(), task.model()
    safetensors.torch.save_file(theirs.encoder.state_dict(), tmp_path / "resnet18.safetensors")
    load_weights(model, tmp_path / "resnet18.safetensors", partial=True)
    assert torch.equal(model.encoder.conv1.weight, theirs.encoder.conv1.weight)
    assert not torch.equal(model.segmentation_head[0].weight, theirs.segmentation_head[0].weight)


def test_pretrained_numbers_are_remembered_without_the_weights() -> None:
    name = "vit_tiny_patch16_224"
    task = made("classification", model={"name": name, "weights": "pretrained"})
    assert task.pixels.mean == (0.5, 0.5, 0.5)
    later = made("classification", model={"name": name})
    later.remember(task.facts())
    assert later.pixels == task.pixels


@pytest.mark.parametrize(("weights", "mean"), [("none", 0.485), ("pretrained", 0.5), ("/placed/vit.safetensors", 0.5)])
def test_weights_in_a_file_want_the_numbers_of_pretrained_ones(weights: str, mean: float) -> None:
    task = made("classification", model={"name": "vit_tiny_patch16_224", "weights": weights})
    assert task.pixels.mean[0] == mean


def test_a_hub_that_answers_no_is_reachable() -> None:
    import http.server
    import threading

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    try:
        assert pretrained._is_reachable(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.server_close()
    assert not pretrained._is_reachable(NOWHERE)
