import copy

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel

accelerator = Accelerator(mixed_precision="fp16")
weight_dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.float32
vae = AutoencoderKL.from_pretrained("some/model", subfolder="vae")
unet = UNet2DConditionModel.from_pretrained("some/model", subfolder="unet")
noise_scheduler = DDPMScheduler.from_pretrained("some/model", subfolder="scheduler")
vae.to(accelerator.device, dtype=weight_dtype)
ema_unet = EMAModel(unet.parameters())
reference = copy.deepcopy(vae)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5, eps=1e-08)
unet, optimizer = accelerator.prepare(unet, optimizer)
for pixels in [torch.randn(1, 3, 64, 64)]:
    latents = vae.encode(pixels.to(weight_dtype)).latent_dist.sample()
    noise = torch.randn_like(latents)
    steps = torch.randint(0, 1000, (1,))
    noisy = noise_scheduler.add_noise(latents, noise, steps)
    loss = torch.nn.functional.mse_loss(unet(noisy, steps).sample.float(), noise.float())
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ema_unet.step(unet.parameters())
    sample = noise_scheduler.step(noise, 10, latents).prev_sample
