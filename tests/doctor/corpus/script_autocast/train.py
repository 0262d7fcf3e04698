import torch

scaler = torch.amp.GradScaler(enabled=False)
with torch.autocast("cuda", dtype=torch.bfloat16):
    pass
