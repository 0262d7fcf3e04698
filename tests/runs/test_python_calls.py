"""Functions of Python that do what commands do: their results, their pages, and errors with advice for Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import halfstep
from halfstep.checkpoint.paths import list_generations
from halfstep.errors import BadData, FolderTaken, HalfstepError, UnknownName, WrongUse
from halfstep.metric_names import format_metric_name

SHORT: dict[str, object] = {
    "train.steps": 4,
    "train.batch_size": 4,
    "data.samples": 16,
    "checkpoint.every_steps": 2,
    "run.pictures": 0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unet"
    return halfstep.fit("segmentation_tiny", settings={**SHORT, "run.dir": str(folder)}, quiet=True).dir


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "unet"))


def test_verify_returns_what_is_wrong(copied: Path) -> None:
    report = halfstep.verify(str(copied), resume_steps=1)
    assert report.error is None
    assert report.proof is not None
    assert report.proof.equal
    assert [one.whole for one in report.checkpoints] == [True] * len(report.checkpoints)
    file = max(list_generations(copied / "checkpoints"), key=lambda one: one.attempt).path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    report = halfstep.verify(copied, resume_steps=1)
    assert report.error is not None
    assert report.error.id == "bad-data"
    assert report.proof is None
    assert [one.whole for one in report.checkpoints][:2] == [False, True]
    assert "bad-data" in report._repr_html_()


@pytest.mark.wording
def test_evaluate_returns_the_figures_of_the_command(run: Path, tmp_path: Path) -> None:
    table = tmp_path / "samples.csv"
    report = halfstep.evaluate(run, csv=table)
    assert report.metrics.keys() >= {"iou", "loss"}
    assert report.figures is not None
    assert len(table.read_text().splitlines()) == 1 + report.samples == 1 + len(report.figures.each)
    assert [file.name for file in report.written] == ["samples.csv", "samples_classes.csv", "samples_confusion.csv"]
    with pytest.raises(FolderTaken) as caught:
        halfstep.evaluate(run, csv=table)
    assert "overwrite=True" in caught.value.do
    last = halfstep.evaluate(run, weights="last", csv=table, overwrite=True)
    assert last.weights.name == "last.safetensors"
    assert "written" in last._repr_html_()


def test_export_returns_the_file_and_replaces_it_on_request(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "unet.safetensors"
    report = halfstep.export(run, file)
    assert (report.file, report.format) == (file, "safetensors")
    assert report.checked is not None
    assert len(load_file(file)) == report.tensors
    with pytest.raises(FolderTaken):
        halfstep.export(run, file)
    assert halfstep.export(run, file, overwrite=True).sha256 == report.sha256
    sharded = halfstep.export_sharded(run, tmp_path / "layout", max_shard_size="1MB")
    assert sorted(sharded.files) == sorted(path.name for path in sharded.folder.glob("*.safetensors"))


def test_a_run_without_failed_steps(run: Path) -> None:
    assert halfstep.failed_steps(run).failed_steps == ()
    with pytest.raises(BadData):
        halfstep.replay(run)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("call", "kind", "do"),
    [
        (lambda run: halfstep.export(run, "x.pt"), WrongUse, 'out="x.safetensors"'),
        (lambda run: halfstep.export(run, "x.onnx", format="safetensors"), WrongUse, 'format="onnx"'),
        (lambda run: halfstep.export(run, run / "best.safetensors"), FolderTaken, 'out="'),
        (lambda run: halfstep.export(run, format="safetensor"), UnknownName, "safetensors"),
        (lambda run: halfstep.export(run, "x.safetensors", weights="checkpint"), UnknownName, "checkpoint"),
        (lambda run: halfstep.export(run, "x.safetensors", ema=True), WrongUse, "leave ema=True out"),
        (lambda run: halfstep.export_sharded(run, "x", max_shard_size="5 apples"), WrongUse, 'max_shard_size="5GB"'),
        (lambda run: halfstep.verify(run, resume_steps=99), WrongUse, "resume_steps=2"),
        (lambda run: halfstep.replay(run), BadData, "halfstep.failed_steps("),
        (lambda run: halfstep.load(run, weights="absent.safetensors"), BadData, 'weights="PATH"'),
    ],
)
def test_errors_advise_python(
    call: Callable[[Path], object],
    kind: type[HalfstepError],
    do: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as raised:
        call(run)
    assert do in raised.value.do
    assert "--" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_run_is_shown_with_its_curves(run: Path) -> None:
    again = halfstep.fit("segmentation_tiny", settings={**SHORT, "run.dir": str(run)}, quiet=True)
    html = again._repr_html_()
    assert html.count("<figure") >= 2
    assert format_metric_name(again.best["metric"]) in str(again)


def test_a_skipped_step_is_shown_with_its_reason() -> None:
    model = torch.nn.Linear(3, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp32")
    report = stepper.step(lambda model, batch: model(batch).square().mean(), torch.full((2, 3), float("nan")))
    bundle = report._repr_mimebundle_()
    assert bundle["text/plain"] == str(report)
    assert "skipped: loss not finite" in bundle["text/html"]
    assert "nan" in bundle["text/html"]


def test_a_choice_and_a_loaded_model_are_shown_in_words(run: Path) -> None:
    for result in (halfstep.load(run), halfstep.choose_precision("fp32")):
        bundle = result._repr_mimebundle_()
        assert bundle["text/plain"] == str(result)
        assert "fp32" in bundle["text/html"]
