"""The loop of timm's train.py in miniature, with halfstep: see what differs from `before.py`.

python examples/timm/after.py
"""

from __future__ import annotations

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import Tensor, nn

import halfstep

UPDATES, BAD, CLIP, AMP = 8, 4, 1.0, torch.bfloat16


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(0)
    found = [(torch.randn(4, 3, 32, 32, generator=made), torch.arange(4) % 3) for _ in range(UPDATES)]
    found[BAD][0][0, 0, 0, 0] = float("nan")
    return found


def main(device: str = "cpu") -> dict[str, object]:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3).to(device)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    model_ema = ModelEmaV3(model, decay=0.9)
    schedule = CosineLRScheduler(optimizer, t_initial=UPDATES, t_in_epochs=False)
    loss_scaler = NativeScaler(device=device)
    loss_scaler._scaler = scaler = halfstep.GradScaler(device, precision=AMP)
    scaler.include(model, schedule, model_ema)
    num_updates = 0
    model.train()
    for x, y in batches():
        with torch.autocast(device, dtype=AMP):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=CLIP, parameters=model.parameters())
        else:
            loss.backward()
            dispatch_clip_grad(model.parameters(), CLIP)
            optimizer.step()
        num_updates = scaler.counts.applied
        model_ema.update(model, step=num_updates)
        schedule.step_update(num_updates=num_updates)
    tensors = [*model.state_dict().values(), *model_ema.state_dict().values()]
    finite = all(bool(t.isfinite().all()) for t in tensors)
    return {"updates": num_updates, "finite": finite, "lr": optimizer.param_groups[0]["lr"]}


if __name__ == "__main__":
    print(main())
