import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel

unet = UNet2DModel.from_pretrained("some/model", torch_dtype=torch.bfloat16)
ema_unet = EMAModel(unet.parameters(), decay=0.9999)
for _ in range(3):
    ema_unet.step(unet.parameters())
