"""Segmentation: images and masks stay together, whole images are judged alone, and any data of pairs works."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import BadData, BadRecipe, UnknownName
from halfstep.precision.precision import resolve_precision_name
from tests.tasks.made import batch_of, made


def write_pairs(root: Path, count: int, size: tuple[int, int] = (40, 50), depth: type = np.uint8) -> None:
    draw = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for n in range(count):
        mask = draw.integers(0, 2, size).astype(np.uint8)
        image = mask.astype(depth) * np.iinfo(depth).max
        Image.fromarray(image).save(root / "images" / f"{n}.png")
        Image.fromarray(mask * 255).save(root / "masks" / f"{n}.png")


def pairs(root: Path, **changes: object) -> dict[str, object]:
    return {"name": "pairs", "path": str(root), "classes": 2, "channels": 1, **changes}


@pytest.mark.parametrize("depth", [np.uint8, np.uint16])
def test_image_and_mask_stay_together(tmp_path: Path, depth: type) -> None:
    """The image is its mask, so after any crop and flip it must still be."""
    write_pairs(tmp_path, 4, depth=depth)
    task = made("segmentation", data=pairs(tmp_path, val=0.5))
    for _ in range(5):
        batch = batch_of(task, "train")
        assert batch["image"].shape == (4, 1, 32, 32)
        assert batch["image"].dtype is torch.float32
        assert torch.equal(batch["image"][:, 0] > 0, batch["mask"] == 1)
        assert set(batch["image"].unique().tolist()) == {-2.0, 2.0}  # 0 and 1, in quarters around the middle


@pytest.mark.parametrize("depth", [np.uint8, np.uint16])
def test_small_images_are_padded_with_pixels_of_no_class(tmp_path: Path, depth: type) -> None:
    write_pairs(tmp_path, 4, size=(20, 60), depth=depth)
    task = made("segmentation", data=pairs(tmp_path, val=0.5))
    batch = batch_of(task, "train")
    ignored = batch["mask"] == 255
    assert batch["mask"].shape == (4, 32, 32)
    assert ignored.any()
    assert ((batch["image"][:, 0] > 0) == (batch["mask"] == 1))[~ignored].all()


def test_floating_images_keep_their_numbers_in_training() -> None:
    task = made("segmentation")
    image = 40 * torch.randn(3, 32, 32)
    sample = {"image": image, "mask": torch.zeros(32, 32, dtype=torch.uint8)}
    wanted = task.pixels.normalized(image).flatten().sort().values
    for _ in range(4):
        assert torch.equal(task.transform("train", sample)["image"].flatten().sort().values, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_colours_of_integers_are_changed_a_little(dtype: torch.dtype) -> None:
    task = made("segmentation")
    image = torch.randint(60, 200, (3, 32, 32)).to(dtype)
    seen = task.transform("train", {"image": image, "mask": torch.zeros(32, 32, dtype=torch.uint8)})["image"]
    whole = task.pixels.normalized(image)
    assert not torch.equal(seen.flatten().sort().values, whole.flatten().sort().values)


def test_a_share_of_the_folder_for_training(tmp_path: Path) -> None:
    write_pairs(tmp_path / "train", 5)
    write_pairs(tmp_path / "val", 2)
    task = made("segmentation", data=pairs(tmp_path, val=0.4))
    names = [s.name(n) for s in (task.source("train"), task.source("val")) for n in range(len(s))]
    assert len(names) == 5
    assert all(str(tmp_path / "train") in name for name in names)


def test_flips_can_be_left_out(tmp_path: Path) -> None:
    write_pairs(tmp_path, 2, size=(32, 32))
    task = made("segmentation", data=pairs(tmp_path, val=0.5, augment=False))
    source = task.source("train")
    for _ in range(4):
        assert torch.equal(task.transform("train", source.read(0))["mask"], source.read(0)["mask"])


@torch.no_grad()
def test_a_metric_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    for n, size in enumerate([(20, 30), (45, 33), (64, 10), (31, 31), (45, 33)]):
        write_pairs(tmp_path / str(n), 1, size)
        for folder in ("images", "masks"):
            (tmp_path / "val" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / str(n) / folder / "0.png").rename(tmp_path / "val" / folder / f"{n}.png")
    write_pairs(tmp_path / "train", 2)
    task = made("segmentation", data=pairs(tmp_path, val="val"))
    model, source = task.model().eval(), task.source("val")
    assert (len(task.source("train")), len(source)) == (2, 5)

    def judged(sizes: list[int]) -> dict[str, float]:
        metrics, numbers = task.metrics(), iter(range(5))
        for size in sizes:
            samples = [task.transform("val", source.read(next(numbers))) for _ in range(size)]
            task.loss(model, task.collate("val", samples), metrics)
        return {name: value.item() for name, value in metrics.compute().items()}

    assert judged([5]) == judged([1, 1, 1, 1, 1]) == judged([2, 3])


def test_training_sees_the_batch_and_evaluation_the_tiles() -> None:
    task = made("segmentation")
    model, shapes = task.model(), []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    task.loss(model, batch_of(task, "train", 6))
    assert shapes == [(6, 3, 32, 32)]
    shapes.clear()
    task.loss(model.eval(), batch_of(task, "val", 2))
    assert shapes == [(4, 3, 32, 32)] * 2  # two images of 48 pixels: four tiles each


def test_two_classes_are_one_logit_and_a_mask_of_0_and_255() -> None:
    task = made("segmentation", data={"classes": 2})
    model = task.model().eval()
    assert model.head.out_channels == 1
    found = task.predict(model, task.source("val").read(0)["image"])
    assert found.mask.shape == (48, 48)
    assert set(np.unique(found.mask)) <= {0, 255}
    assert found.values["pixels_background"] + found.values["pixels_shape"] == pytest.approx(1.0)
    assert found.values["pixels_shape"] == (found.mask == 255).mean()
    assert found.overlay.shape == (48, 48, 3)


def test_predictions_in_16_bits_are_nearly_the_same() -> None:
    task = made("segmentation")
    model, image = task.model().eval(), task.source("val").read(0)["image"]
    wide = task.predict(model, image).mask
    with resolve_precision_name("bf16").autocast(torch.device("cpu")):
        narrow = task.predict(model, image).mask
    assert (wide == narrow).mean() > 0.9


def test_truth_is_drawn_beside_the_image_and_the_ignored_is_grey() -> None:
    task = made("segmentation", data={"ignore_index": 0})
    batch = batch_of(task, "val", 1)
    shown = task.shown(task.model().eval(), batch)[0]
    assert list(shown.panels) == ["image", "truth", "prediction", "mistakes"]
    assert {picture.shape for picture in shown.panels.values()} == {(48, 48, 3)}
    assert shown.caption.startswith("IoU ")
    truth = shown.panels["truth"]
    assert ("no class", (128, 128, 128)) in task.legend()
    assert (truth[batch["mask"][0].numpy() == 0] == 128).all()
    assert not (truth[batch["mask"][0].numpy() == 1] == 128).all()


def test_each_image_is_judged_as_the_metric_would_alone() -> None:
    task = made("segmentation", data={"ignore_index": 9})
    draw = torch.Generator().manual_seed(0)
    truth, said = (torch.randint(0, 3, (4, 8, 8), generator=draw) for _ in range(2))
    truth[0, :4], truth[1] = 9, 9
    judged = task.judge(said, truth)
    for number in (0, 2, 3):
        alone = task.metrics()
        alone.update(said[number : number + 1], truth[number : number + 1])
        assert float(judged.figures["iou"][number]) == pytest.approx(float(alone.compute()["iou"]))
    assert judged.counts.sum() == 32 + 2 * 64
    assert judged.figures["accuracy"][2] == (said[2] == truth[2]).double().mean()


def test_its_preprocessing_is_what_validation_sees() -> None:
    task = made("segmentation")
    sample = task.source("val").read(0)
    assert torch.equal(task.signature().preprocessing(sample["image"])[0], task.transform("val", sample)["image"])


@pytest.mark.wording
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"overlap": 32}}, "data.overlap=32"),
        ({"data": {"names": ["a"]}}, "1 data.names"),
        ({"model": {"name": "fpn"}, "data": {"crop": 40}}, "multiples of 32"),
        ({"model": {"weights": "pretrained"}}, "smp-unet"),
    ],
)
def test_impossible_recipes(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(BadRecipe, match=words):
        made("segmentation", **sections).model()


@pytest.mark.wording
@pytest.mark.parametrize("model", [{"name": "unnet"}, {"name": "fpn", "encoder": "resnet43"}])
def test_names_that_are_not_known(model: dict[str, object]) -> None:
    with pytest.raises(UnknownName, match=r"did you mean '(unet|resnet34)'"):
        made("segmentation", model=model).model()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("encoder", "near"),
    [
        ("tu-resnet119", "did you mean 'tu-resnet1"),
        ("tu-resnet18.a9_in1k", "did you mean 'tu-resnet18.a"),
        ("tu-hf-hub:a/b", ""),
        ("tu-", ""),
    ],
)
def test_encoders_that_timm_has_not(encoder: str, near: str) -> None:
    with pytest.raises(UnknownName, match=r"model\.encoder 'tu-.*is not known") as caught:
        made("segmentation", model={"name": "fpn", "encoder": encoder}).model()
    assert near in caught.value.do
    assert "tu-" in caught.value.allowed


@pytest.mark.wording
def test_an_encoder_of_one_size_is_refused() -> None:
    with pytest.raises(BadRecipe, match=r"cannot be built with model\.encoder=tu-vit_tiny"):
        made("segmentation", model={"name": "fpn", "encoder": "tu-vit_tiny_patch16_224"}).model()


@pytest.mark.parametrize("name", ["smp-unet", "fpn", "deeplabv3plus", "segformer"])
def test_others_models_train_and_judge(name: str) -> None:
    task = made("segmentation", model={"name": name, "encoder": "resnet18"}, data={"crop": 64, "tile": 64})
    model = task.model().to(memory_format=torch.channels_last)
    with resolve_precision_name("bf16").autocast(torch.device("cpu")):
        loss = task.loss(model, batch_of(task, "train", 2))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        assert torch.isfinite(task.loss(model.eval(), batch_of(task, "val", 2)))


@pytest.mark.wording
def test_a_folder_for_validation_needs_one_for_training(tmp_path: Path) -> None:
    write_pairs(tmp_path / "val", 2)
    with pytest.raises(BadData, match="but no folder train"):
        made("segmentation", data=pairs(tmp_path, val="val")).source("train")


def test_masks_elsewhere(tmp_path: Path) -> None:
    write_pairs(tmp_path / "a", 3)
    (tmp_path / "a" / "masks").rename(tmp_path / "drawn")
    data = pairs(tmp_path / "a" / "images", masks=str(tmp_path / "drawn"), val=0.3)
    task = made("segmentation", data=data)
    assert len(task.source("train")) + len(task.source("val")) == 3
