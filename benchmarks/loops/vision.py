"""Pictures: networks of timm, segmentation_models_pytorch and torchvision, layers frozen and thawed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops.harness import (
    Case,
    adamw,
    by_hand,
    ce,
    labelled,
    loop,
    normal,
    poisoned,
    promise,
    require,
    require_same,
    sgd,
    skips,
    trains,
    whole,
)
from halfstep import Ema, Window

PICTURES = labelled(2, n=2, shape=(3, 32, 32), classes=4)


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def picture_case(make: Any, **options: Any) -> Any:
    def build() -> Case:
        model = make()
        return Case(model, sgd(model, 0.01, momentum=0.9), ce, options=options)

    return build


@loop
def conv_net_with_batch_norm() -> str:
    return promise(picture_case(conv_net, clip_norm=1.0), labelled(4, n=4, shape=(3, 16, 16)))


@loop
def conv_net_channels_last_bf16() -> str:
    def make() -> nn.Module:
        return conv_net().to(memory_format=torch.channels_last)

    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in labelled(3, n=4, shape=(3, 16, 16))]
    return promise(picture_case(make), batches, precision="bf16")


@loop
def timm_resnet() -> str:
    import timm

    def make() -> nn.Module:
        return timm.create_model("resnet10t", num_classes=4)

    return promise(picture_case(make), PICTURES)


@loop
def timm_vit() -> str:
    import timm

    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}

    def make() -> nn.Module:
        return timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1, **small)

    return promise(picture_case(make, clip_norm=1.0), PICTURES)


@loop
def timm_vit_bf16_ema() -> str:
    import timm

    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 4}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **small)
    case = Case(model, adamw(model, 1e-3), ce, options={"ema": Ema(model, 0.9)})
    case.start(precision="bf16")
    trains(case, PICTURES)
    skips(case, poisoned(PICTURES[0]))
    with case.stepper.evaluating(ema=True) as worn:
        worn(PICTURES[0][0])
    trains(case, PICTURES)
    return f"4 steps, a skip undone, average worn; {case.stepper.observed}"


@loop
def smp_unet_segmentation() -> str:
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss("binary")

    def loss(m: nn.Module, b: Any) -> Tensor:
        out = m(b[0])
        return dice(out, b[1]) + F.binary_cross_entropy_with_logits(out, b[1])

    def build() -> Case:
        model = smp.Unet("timm-mobilenetv3_small_minimal_100", encoder_weights=None, decoder_channels=(8, 8, 8, 8, 8))
        return Case(model, adamw(model, 1e-3), loss)

    batches = [(normal(2, 3, 32, 32, seed=i), whole(2, 2, 1, 32, 32, seed=i).float()) for i in range(2)]
    return promise(build, batches)


@loop
def torchvision_resnet_as_a_feature_extractor() -> str:
    """A frozen backbone in eval mode, a trained head; `train()` on the head only."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    backbone = resnet18(num_classes=8).requires_grad_(False).eval()
    model = nn.Linear(8, 4)

    def loss(m: nn.Module, b: Any) -> Tensor:
        with torch.no_grad():
            features = backbone(b[0])
        return F.cross_entropy(m(features), b[1])

    case = Case(model, sgd(model), loss, beside=[backbone])
    case.start()
    trains(case, PICTURES)
    skips(case, poisoned(PICTURES[0]))
    return "head trained, backbone untouched"


def _hand_and_ours(act: Any, steps: int = 6) -> str:
    """The same loop twice, with `act(model, optimizer, i)` before each step."""
    states = []
    batches = labelled(steps, n=4, shape=(3, 16, 16))
    for ours in (False, True):
        torch.manual_seed(0)
        model = conv_net()
        case = Case(model, torch.optim.AdamW(model.parameters(), 1e-3), ce)
        case.start()
        for i, batch in enumerate(batches):
            act(model, case.optimizer, i)
            if ours:
                skips(case, poisoned(batch))
                require(case.stepper.step(ce, batch).applied, "not applied")
            else:
                by_hand(case, batch)
        states.append(case.state())
    require_same(*states, "compared with the loop by hand")
    return f"{steps} steps bitwise as by hand, {steps} skips bitwise undone"


@loop
def gradual_unfreezing() -> str:
    """The head first, then one more layer every two steps; the optimizer has had all of them from the start."""

    def act(model: nn.Module, _: Any, i: int) -> None:
        model.requires_grad_(False)
        model[9].requires_grad_(True)
        if i >= 2:
            model[4].requires_grad_(True)
        if i >= 4:
            model.requires_grad_(True)

    return _hand_and_ours(act)


@loop
def layers_frozen_for_a_while() -> str:
    def act(model: nn.Module, _: Any, i: int) -> None:
        model[0].requires_grad_(not 2 <= i < 4)

    return _hand_and_ours(act)


@loop
def batch_norm_frozen_half_way() -> str:
    """`m.eval()` on BatchNorm layers while the rest trains."""

    def act(model: nn.Module, _: Any, i: int) -> None:
        model[1].train(i < 3)

    return _hand_and_ours(act)


@loop
def parameters_added_by_add_param_group() -> str:
    """Layers join the optimizer when they are thawed."""
    states = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = conv_net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        case = Case(model, optimizer, ce)
        case.start()
        for i, batch in enumerate(labelled(4, n=4, shape=(3, 16, 16))):
            if i == 2:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-4})
            if ours:
                skips(case, poisoned(batch))
                require(case.stepper.step(ce, batch).applied, "not applied")
            else:
                by_hand(case, batch)
        states.append(case.state())
    require_same(*states, "compared with the loop by hand")
    return "4 steps bitwise as by hand"


@loop
def head_replaced_for_another_task() -> str:
    """`model[-1] = nn.Linear(...)` and a new optimizer, a new Stepper, in one process."""
    torch.manual_seed(0)
    model = conv_net()
    first = Case(model, adamw(model), ce)
    first.start()
    trains(first, labelled(2, n=4, shape=(3, 16, 16)))
    model[9] = nn.Linear(8, 3)
    second = Case(model, adamw(model), ce)
    second.start()
    batches = labelled(3, n=4, shape=(3, 16, 16), classes=3)
    trains(second, batches)
    skips(second, poisoned(batches[0]))
    return "the new head is trained by the new Stepper"


@loop
def progressive_resizing() -> str:
    """Another picture size every step."""
    batches = [(normal(4, 3, s, s, seed=s), whole(4, 4, seed=s)) for s in (8, 16, 12, 20)]
    return promise(picture_case(conv_net), batches)


@loop
def mixup_and_label_smoothing() -> str:
    def loss(m: nn.Module, b: Any) -> Tensor:
        x, y = b
        order = torch.randperm(len(x))
        lam = torch.distributions.Beta(0.4, 0.4).sample()
        out = m(lam * x + (1 - lam) * x[order])
        smooth = {"label_smoothing": 0.1}
        return lam * F.cross_entropy(out, y, **smooth) + (1 - lam) * F.cross_entropy(out, y[order], **smooth)

    def build() -> Case:
        model = conv_net()
        return Case(model, sgd(model), loss)

    return promise(build, labelled(3, n=4, shape=(3, 16, 16)))


@loop
def batch_norm_sees_each_micro_batch() -> str:
    """Statistics move with each micro-batch, as by hand, and all go back if the last one is bad."""
    x, y = labelled(1, n=12, shape=(3, 16, 16))[0]
    window = Window([(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)])
    return promise(picture_case(conv_net), [window, window])
