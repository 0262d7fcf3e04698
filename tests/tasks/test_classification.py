"""Classification: folders and shards, mixed labels, accuracies by hand, models of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch import nn

from halfstep.errors import BadData, BadRecipe, UnknownName
from tests.tasks.made import batch_of, made

NAMES = ("bird", "cat", "dog")


def write_classes(root: Path, names: tuple[str, ...] = NAMES, count: int = 3) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        for n in range(count):
            shade = 60 * NAMES.index(name) if name in NAMES else 255
            Image.fromarray(np.full((40, 50, 3), shade, np.uint8)).save(root / name / f"{n}.png")


def folder(root: Path, **changes: Any) -> dict[str, Any]:
    return {"name": "folder", "path": str(root), "classes": None, "mixup": 0.0, **changes}


@pytest.mark.parametrize("val", ["val", 0.4])
def test_classes_are_found_in_the_folders(tmp_path: Path, val: str | float) -> None:
    write_classes(tmp_path / "train" if val == "val" else tmp_path)
    if val == "val":
        write_classes(tmp_path / "val", ("cat", "dog"), 1)  # a class may be missing, and must not shift the others
    task = made("classification", data=folder(tmp_path, val=val))
    assert task.facts()["classes"] == ["bird", "cat", "dog"]
    assert task.model().num_classes == 3
    source = task.source("val")
    for n in range(len(source)):
        assert source.read(n)["image"].float().mean() == 60 * source.read(n)["label"]


def test_a_share_of_the_folder_for_training_and_splits_are_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "train")
    write_classes(tmp_path / "val")
    task = made("classification", data=folder(tmp_path, val=0.4))
    assert task.classes == ["bird", "cat", "dog"]
    assert len(task.source("train")) + len(task.source("val")) == 9


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_classes(tmp_path, ("cat", "train"))
    assert made("classification", data=folder(tmp_path, val=0.4)).classes == ["cat", "train"]


@pytest.mark.wording
def test_a_wrong_number_of_classes_is_said(tmp_path: Path) -> None:
    write_classes(tmp_path)
    with pytest.raises(BadRecipe, match=r"data.classes=5, but .* has 3 classes"):
        made("classification", data=folder(tmp_path, val=0.4, classes=5)).model()


@pytest.mark.wording
def test_a_class_that_training_has_not(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", ("cat", "dog"))
    write_classes(tmp_path / "val", ("cat", "wolf"))
    with pytest.raises(BadData, match="wolf"):
        made("classification", data=folder(tmp_path)).source("val")


def write_shard(path: Path, part: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as tar:
        for n in range(4):
            image = np.full((32, 32, 3), 20 * n, np.uint8)
            tar.write({"__key__": f"{n:04d}", "png": image, **({part: n} if part == "cls" else {})})


def test_shards(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_shard(tmp_path / split / "0.tar", "cls")
    task = made("classification", data={**folder(tmp_path), "name": "shards"})
    assert task.facts()["classes"] == ["0", "1", "2", "3"]
    assert batch_of(task, "val")["label"].tolist() == [0, 1, 2, 3]


@pytest.mark.wording
def test_shards_without_labels_are_found_out_before_the_first_step(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", "none")
    with pytest.raises(BadData, match="has no label"):
        made("classification", data={**folder(tmp_path, val=0.5), "name": "shards"}).source("train")


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_mixed_labels_are_shares_of_a_whole(mixup: float, cutmix: float) -> None:
    task = made("classification", data={"mixup": mixup, "cutmix": cutmix})
    label = batch_of(task, "train", 8)["label"]
    assert label.shape == (8, 6)
    torch.testing.assert_close(label.sum(1), torch.ones(8))
    assert (label.max(1).values < 1).any()
    assert batch_of(task, "val")["label"].dtype is torch.int64


def test_without_mixing_labels_are_numbers() -> None:
    task = made("classification", data={"mixup": 0.0})
    assert batch_of(task, "train", 3)["label"].shape == (3,)


class Says(nn.Module):
    """Answers what it was told to, whatever it sees."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(x)]


def test_accuracies_and_loss_are_what_they_are_by_hand() -> None:
    task = made("classification", data={"classes": 8}, loss={"label_smoothing": 0.1})
    logits, label = torch.randn(200, 8), torch.randint(0, 8, (200,))
    metrics = task.metrics()
    loss = task.loss(Says(logits), {"image": torch.zeros(200, 3, 4, 4), "label": label}, metrics)
    ranks = (logits > logits.gather(1, label[:, None])).sum(1)
    values = metrics.compute()
    assert values["top1"].item() == pytest.approx((ranks < 1).double().mean().item())
    assert values["top5"].item() == pytest.approx((ranks < 5).double().mean().item())
    chances = logits.double().log_softmax(1)
    target = torch.full((200, 8), 0.1 / 8, dtype=torch.float64)
    target[range(200), label] += 0.9
    assert loss.item() == pytest.approx(-(target * chances).sum(1).mean().item(), rel=1e-6)


def test_the_first_five_of_five_say_nothing() -> None:
    assert set(made("classification", data={"classes": 5}).metrics()) == {"top1"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_logits_in_16_bits(dtype: torch.dtype) -> None:
    task = made("classification")
    model = Says((1e4 * torch.eye(6)).to(dtype))
    loss = task.loss(model, {"image": torch.zeros(6, 3, 4, 4), "label": torch.arange(6).roll(1)})
    assert loss.dtype is torch.float32
    assert torch.isfinite(loss)


@pytest.mark.parametrize("augment", ["none", "flip", "randaugment"])
@pytest.mark.parametrize("crop", ["resize", "shift"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_size_become_one_size(tmp_path: Path, augment: str, crop: str, channels: int) -> None:
    data = {"augment": augment, "crop": crop, "channels": channels}
    task = made("classification", data=data)
    for size in ((1, 1), (40, 90), (300, 20)):
        for split in ("train", "val"):
            image = torch.randint(0, 256, (channels, *size), dtype=torch.uint8)
            out = task.transform(split, {"image": image})["image"]
            assert out.shape == (channels, 32, 32)
            assert out.dtype is torch.float32
            assert torch.isfinite(out).all()


def test_16_bit_images_have_the_range_of_8_bit_ones() -> None:
    task = made("classification", data={"channels": 1})
    narrow = torch.randint(0, 256, (1, 32, 32), dtype=torch.uint8)
    wide = (narrow.int() * 257).to(torch.uint16)
    torch.testing.assert_close(
        task.transform("val", {"image": wide})["image"], task.transform("val", {"image": narrow})["image"]
    )


def test_a_small_image_is_seen_whole_where_training_only_shifts_it() -> None:
    task = made("classification")
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(task.transform("val", {"image": image})["image"], task.pixels.normalized(image))


def test_randaugment_leaves_floating_images_their_numbers() -> None:
    image = 40 * torch.randn(3, 32, 32)
    task, calm = (made("classification", data={"augment": kind}) for kind in ("randaugment", "flip"))
    for seed in range(8):
        torch.manual_seed(seed)
        seen = task.transform("train", {"image": image})["image"]
        torch.manual_seed(seed)
        assert torch.equal(seen, calm.transform("train", {"image": image})["image"])


def test_randaugment_changes_integers() -> None:
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    task, calm = (made("classification", data={"augment": kind}) for kind in ("randaugment", "flip"))
    changed = 0
    for seed in range(8):
        torch.manual_seed(seed)
        seen = task.transform("train", {"image": image})["image"]
        torch.manual_seed(seed)
        changed += not torch.equal(seen, calm.transform("train", {"image": image})["image"])
    assert changed


@pytest.mark.wording
def test_randaugment_of_many_channels_is_refused() -> None:
    with pytest.raises(BadRecipe, match=r"data\.channels=5"):
        made("classification", data={"augment": "randaugment", "channels": 5})


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_models_of_every_kind(name: str) -> None:
    task = made("classification", model={"name": name, "drop_rate": 0.1}, data={"channels": 2, "size": 64})
    assert task.model()(torch.randn(2, 2, 64, 64)).shape == (2, 6)


@pytest.mark.wording
def test_a_small_stem_keeps_the_size() -> None:
    model = made("classification", model={"name": "resnet18", "small_stem": True}).model()
    sizes: list[torch.Size] = []
    model.layer1.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape))
    model(torch.randn(2, 3, 32, 32))
    assert sizes == [(2, 64, 32, 32)]
    with pytest.raises(BadRecipe, match=r"model\.small_stem with model\.name=convnext_atto"):
        made("classification", model={"name": "convnext_atto", "small_stem": True}).model()


@pytest.mark.wording
@pytest.mark.parametrize("name", ["rsnet50", "hf-hub:someone/something", "local-dir:/tmp"])
def test_only_names_of_models_are_names(name: str) -> None:
    with pytest.raises(UnknownName, match="is not known"):
        made("classification", model={"name": name}).model()


@pytest.mark.wording
@pytest.mark.parametrize("weights", ["none", "pretrained"])
def test_weights_that_timm_has_not_for_a_model(weights: str) -> None:
    with pytest.raises(UnknownName, match=r"'resnet18\.a9_in1k' is not known") as caught:
        made("classification", model={"name": "resnet18.a9_in1k", "weights": weights}).model()
    assert "did you mean 'resnet18.a" in caught.value.do


def test_the_likeliest_class_comes_first() -> None:
    task = made("classification")
    found = task.predict(Says(torch.tensor([[0.0, 1.0, 5.0, 2.0, -1.0, 0.5]])), torch.zeros(3, 40, 40))
    assert found.values["class"] == task.classes[2]
    assert 0.9 < found.values["score"] < 1
    assert found.values["top5"].split()[0::2] == [task.classes[n] for n in (2, 3, 1, 5, 0)]


@pytest.mark.wording
def test_names_are_remembered_where_the_data_is_gone(tmp_path: Path) -> None:
    task = made("classification", data=folder(tmp_path / "gone"))
    task.remember({"classes": ["heron", "stork"]})
    assert task.model().num_classes == 2
    assert task.predict(Says(torch.tensor([[0.0, 1.0]])), torch.zeros(3, 40, 40)).values["class"] == "stork"
    with pytest.raises(BadData, match="gone"):
        task.source("val")


@torch.no_grad()
def test_frames_tell_right_from_wrong() -> None:
    task = made("classification")
    batch = batch_of(task, "val", 2)
    answers = torch.eye(6)[[int(batch["label"][0]), (int(batch["label"][1]) + 1) % 6]]
    right, wrong = task.shown(Says(answers).eval(), batch)
    assert (right.frame, wrong.frame) == ((0, 158, 115), (213, 94, 0))
    names = [task.classes[int(label)] for label in batch["label"]]
    assert right.caption.splitlines() == [f"truth: {names[0]}", f"answer: {names[0]} (0.35)"]  # e / (e + 5)
    assert wrong.caption.startswith(f"truth: {names[1]}\nanswer: ")
    assert names[1] not in wrong.caption.splitlines()[1]


def test_each_image_is_judged_by_the_chance_of_its_truth() -> None:
    task = made("classification")
    judged = task.judge(torch.tensor([[0.0, 0, 9, 0, 0, 0], [9.0, 0, 0, 0, 0, 0]]), torch.tensor([2, 2]))
    assert judged.quality[0] > 0.99 > 0.01 > judged.quality[1]
    assert judged.counts[2].tolist() == [1, 0, 1, 0, 0, 0]
    assert judged.counts.sum() == 2
    assert {name: numbers.tolist() for name, numbers in judged.classes.items()} == {"truth": [2, 2], "answer": [2, 0]}


@pytest.mark.parametrize("crop", ["resize", "shift"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32])
def test_its_preprocessing_is_what_validation_sees(crop: str, dtype: torch.dtype) -> None:
    task = made("classification", data={"crop": crop})
    image = torch.rand(3, 50, 71)
    image = image if dtype.is_floating_point else (image * 255).to(dtype)
    assert torch.equal(task.signature().preprocessing(image), task.transform("val", {"image": image})["image"][None])
