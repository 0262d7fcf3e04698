"""ResNet-50 on ImageNet-100, in a loop of your own: halfstep chooses the precision and takes the steps.

    python train_imagenet100.py --data_dir imagenet100 --mixed_precision --precision_type bf16 --batch_size 64

`imagenet100` holds train/CLASS/*.jpg and val/CLASS/*.jpg. The same run from a recipe: halfstep train imagenet100.
"""

from __future__ import annotations

import argparse

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import halfstep

NORMAL = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--mixed_precision", action="store_true")
    parser.add_argument("--precision_type", choices=["fp16", "bf16"], default="fp16")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--num_workers", type=int, default=8)
    parser.add_argument("--image_size", type=int, default=224)
    return parser.parse_args()


def loaders(given: argparse.Namespace) -> tuple[DataLoader, DataLoader, int]:
    size = given.image_size
    augmented = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), NORMAL])
    plain = v2.Compose([v2.ToImage(), v2.Resize(size * 8 // 7), v2.CenterCrop(size), NORMAL])
    train = ImageFolder(f"{given.data_dir}/train", augmented)
    val = ImageFolder(f"{given.data_dir}/val", plain)
    pins = torch.accelerator.is_available()  # what is pinned can be sent while the device computes
    options = {"batch_size": given.batch_size, "num_workers": given.num_workers, "pin_memory": pins}
    return DataLoader(train, shuffle=True, drop_last=True, **options), DataLoader(val, **options), len(train.classes)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, stepper: halfstep.Stepper, loader: DataLoader) -> float:
    model.eval()
    right = total = 0
    with stepper.precision.inference(stepper.device):
        for images, labels in loader:
            right += (model(images.to(stepper.device)).argmax(1).cpu() == labels).sum().item()
            total += len(labels)
    model.train()
    return right / total


def main() -> None:
    given = arguments()
    train, val, classes = loaders(given)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = timm.create_model("resnet50", num_classes=classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), given.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(train))
    precision = given.precision_type if given.mixed_precision else "fp32"
    stepper = halfstep.Stepper(model, optimizer, precision=precision, clip_norm=1.0, schedule=schedule)
    print("\n".join([f"precision {stepper.precision}", *stepper.choice.reasons]))
    for epoch in range(given.epochs):
        for images, labels in train:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            report = stepper.step(loss_fn, (images, labels.to(device, non_blocking=True)))
            if not report.applied:
                print(report)
        right = accuracy(model, stepper, val)
        print(f"epoch {epoch + 1}: loss {report.loss:.4f}, accuracy {right:.4f}, {stepper.observed}")
    save_model(model, "resnet50.safetensors")


if __name__ == "__main__":
    main()
