"""What trackers were sent, read back from where they keep it."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.journeys.desk import Desk
from tests.journeys.mlflow_server import Recorder
from tests.journeys.trained import Trained

pytestmark = pytest.mark.full

SHORT = ("train", "segmentation_tiny", "--fp32", "--epochs", "2", "--samples", "24", "--tracker")


def test_tensorboard_has_curves_pictures_and_the_recipe(segmented: Trained) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    kept = accumulator.EventAccumulator(str(segmented.folder / "tensorboard"), {"tensors": 0, "images": 0})
    kept.Reload()
    tags = kept.Tags()
    assert any(re.search("loss", tag, re.IGNORECASE) for tag in tags["scalars"]), tags
    validation = [tag for tag in tags["scalars"] if re.search("iou", tag, re.IGNORECASE) and "val" in tag.lower()]
    evaluated = [event for event in segmented.desk.events(segmented.run, "epoch") if event["val"]]
    assert len(kept.Scalars(validation[0])) == len(evaluated) >= 2
    assert tags["images"], tags
    assert kept.Images(tags["images"][0])[0].encoded_image_string.startswith(b"\x89PNG")
    texts = [kept.Tensors(tag)[0].tensor_proto.string_val[0] for tag in tags["tensors"]]
    assert any(b"segmentation" in text for text in texts), tags


def test_the_line_that_opens_tensorboard_is_printed(segmented: Trained) -> None:
    assert re.search(r"tensorboard --logdir \S*runs", " ".join(segmented.screen.split())), segmented.screen


def test_mlflow_has_metrics_settings_and_pictures(desk: Desk) -> None:
    with Recorder() as server:
        terminal = desk.run(*SHORT, "mlflow", environment={"MLFLOW_TRACKING_URI": server.address})
    assert "Traceback" not in terminal.text
    metrics, parameters = server.metrics(), server.parameters()
    assert any("loss" in name.lower() for name in metrics), metrics
    assert any("iou" in name.lower() and len(values) == 2 for name, values in metrics.items()), metrics
    assert any("batch_size" in name and value == "4" for name, value in parameters.items()), parameters
    assert server.statuses()[-1] == "FINISHED"
    assert any(name.endswith(".png") for name in server.files), sorted(server.files)


def test_a_tracker_that_does_not_answer_ends_no_training(desk: Desk) -> None:
    """Nothing listens on the port: the run says so once, and goes on."""
    terminal = desk.run(*SHORT, "mlflow", environment={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"})
    assert terminal.shows(r"mlflow"), terminal.text
    assert "Traceback" not in terminal.text
    assert (desk.folder / "runs" / "segmentation_tiny" / "result.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_a_run_offline(desk: Desk) -> None:
    terminal = desk.run(*SHORT, "wandb", environment={"WANDB_MODE": "offline"})
    assert list((desk.folder / "runs").rglob("*.wandb")), terminal.text
    assert terminal.shows(r"wandb sync")


def test_a_tracker_that_is_not_installed_says_what_to_install(desk: Desk) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    with desk.type(*SHORT, "wandb") as terminal:
        code = terminal.finish(60)
    assert code not in {0, 1}
    assert terminal.shows(r"pip install"), terminal.text
