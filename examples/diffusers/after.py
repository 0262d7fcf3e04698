"""diffusers' unconditional training script in miniature, with halfstep: see what differs from `before.py`.

python examples/diffusers/after.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import halfstep

STEPS, BAD = 5, 2


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 1, 8, 8, generator=made) for _ in range(STEPS)]
    found[BAD][0, 0, 0, 0] = float("nan")
    return found


def main() -> dict[str, object]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    accelerator.scaler = halfstep.GradScaler(accelerator.device.type, precision=accelerator.mixed_precision)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    ema_model = EMAModel(model.parameters(), decay=0.9)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    accelerator.scaler.include(model, ema_model)
    global_step = 0
    for clean in batches():
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 100, (len(clean),))
        with accelerator.accumulate(model):
            predicted = model(noise_scheduler.add_noise(clean, noise, steps), steps).sample
            accelerator.backward(nn.functional.mse_loss(predicted.float(), noise))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            global_step = accelerator.scaler.counts.applied
    tensors = [*model.state_dict().values(), *ema_model.shadow_params]
    finite = all(bool(t.isfinite().all()) for t in tensors)
    return {"updates": global_step, "finite": finite, "lr": lr_scheduler.get_last_lr()[0]}


if __name__ == "__main__":
    print(main())
