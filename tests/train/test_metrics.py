"""Our metrics beside torchmetrics', which is the reference; cut into batches, and saved with an epoch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.image import PeakSignalNoiseRatio as TheirRatio

from halfstep.checkpoint.packing import pack_state, unpack_state
from halfstep.errors import StateMismatch
from halfstep.tasks.shared.confusion import Overlap
from halfstep.train.epoch_metrics import EpochMetrics
from halfstep.train.evaluation import compute_metric_values
from halfstep.train.metrics import Metrics, PeakSignalNoiseRatio, TopK

CLASSES, IGNORED = 7, 255


def scored(seed: int, samples: int = 33) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, CLASSES, generator=generator), torch.randint(CLASSES, (samples,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_is_torchmetrics(k: int, dtype: torch.dtype) -> None:
    ours, theirs = TopK(k), MulticlassAccuracy(CLASSES, top_k=k, average="micro")
    for seed in range(4):
        scores, label = scored(seed, samples=5 + seed)
        # Numbers apart from one another: which of two equal ones is chosen is nobody's promise.
        scores = scores.argsort(1).argsort(1).to(dtype)
        ours.update(scores, label)
        theirs.update(scores, label)
    assert ours.compute().item() == pytest.approx(theirs.compute().item(), abs=1e-6)
    assert (ours.right.dtype, ours.samples.item()) == (torch.int64, 26)


def test_top_k_counts_exactly_where_fp32_would_round() -> None:
    metric = TopK(1)
    metric.right += 2**30 - 1
    metric.samples += 2**30
    assert metric.compute().item() == (2**30 - 1) / 2**30 < 1.0


def test_a_label_for_each_pixel_is_counted_too() -> None:
    metric = TopK(1)
    metric.update(torch.tensor([[[[2.0, 0.0]], [[1.0, 3.0]]]]), torch.tensor([[[0, 0]]]))
    assert metric.compute().item() == 0.5


def test_the_ratio_is_torchmetrics() -> None:
    ours, theirs = PeakSignalNoiseRatio((-1.0, 1.0)), TheirRatio(data_range=(-1.0, 1.0))
    for size in (3, 5):
        said, truth = 1.3 * torch.randn(2, 3, size, size), torch.rand(2, 3, size, size) * 2 - 1
        ours.update(said, truth)
        theirs.update(said, truth)
    assert ours.compute().item() == pytest.approx(theirs.compute().item(), rel=1e-6)


def test_the_ratio_adds_up_wider_than_what_it_is_given() -> None:
    metric = PeakSignalNoiseRatio((0.0, 1.0))
    said = torch.full((2**16,), 1 / 256, dtype=torch.bfloat16)
    for _ in range(3):
        metric.update(said, torch.zeros_like(said))
    assert metric.squares.dtype == torch.float64
    assert metric.squares.item() == 3.0
    assert metric.compute().item() == pytest.approx(20 * math.log10(256))


def together() -> Metrics:
    return Metrics({"top1": TopK(1), "top5": TopK(5), "overlap": Overlap(["a", "b", "c"], IGNORED)})


def heard(metrics: Metrics, seed: int) -> None:
    scores, label = scored(seed)
    for name in ("top1", "top5"):
        metrics[name].update(scores, label)
    metrics["overlap"].update(scores[:, :3].argmax(1), label % 3)


def test_metrics_hear_what_they_have_a_name_for() -> None:
    metrics = Metrics({"top1": TopK(1), "psnr": PeakSignalNoiseRatio((0.0, 1.0))})
    scores, label = scored(0)
    metrics.update(scores=scores, label=label, preds=torch.zeros(4), target=torch.ones(4))
    assert compute_metric_values(metrics)["psnr"] == 0.0
    assert compute_metric_values(metrics)["top1"] == (scores.argmax(1) == label).double().mean().item()
    assert compute_metric_values(Metrics()) == {}


def test_nothing_heard_is_no_number() -> None:
    found = compute_metric_values(together())
    assert set(found) == {"top1", "top5", "iou", "dice"}
    assert all(math.isnan(number) for number in found.values())


def test_a_reset_forgets_and_leaves_what_was_read_alone() -> None:
    metrics = together()
    heard(metrics, 0)
    before, kept = compute_metric_values(metrics), metrics["top1"].metric_state["samples"]
    metrics.reset()
    assert kept.item() == 33
    assert metrics["top1"].metric_state["samples"].item() == 0
    heard(metrics, 0)
    assert compute_metric_values(metrics) == before


@pytest.mark.parametrize("cut", range(4))
def test_an_epoch_that_is_cut_adds_up_to_the_bit(cut: int) -> None:
    whole, first, second = (EpochMetrics(together()) for _ in range(3))
    for tally, seeds in ((whole, range(3)), (first, range(cut))):
        for seed in seeds:
            heard(tally.metrics, seed)
    plain, tensors = pack_state(first.state_dict(), "epoch")
    state = unpack_state(plain, {name: tensor.clone() for name, tensor in tensors.items()}, "here")
    second.check_state(state)
    second.load_state_dict(state)
    for seed in range(cut, 3):
        heard(second.metrics, seed)
    assert compute_metric_values(second.metrics)["iou"] > 0
    assert compute_metric_values(second.metrics) == compute_metric_values(whole.metrics)


@pytest.mark.wording
def test_sums_of_another_shape_are_refused() -> None:
    one, other = (
        EpochMetrics(Metrics({"overlap": Overlap(names, IGNORED)})) for names in (["a", "b"], ["a", "b", "c"])
    )
    with pytest.raises(StateMismatch, match="confmat was"):
        other.check_state(one.state_dict())


def test_floating_sums_are_as_wide_as_the_device_allows() -> None:
    """Without a device of this kind at hand, one that holds no numbers shows the format."""
    metric = PeakSignalNoiseRatio((0.0, 1.0)).to(torch.device("meta"))
    assert isinstance(metric, PeakSignalNoiseRatio)
    assert (metric.squares.dtype, metric.pixels.dtype) == (torch.float64, torch.int64)
    assert metric.squares.device.type == "meta"
