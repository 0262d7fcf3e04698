import torch
from torch import nn

DTYPE = torch.bfloat16


def train(model: nn.Module, loader) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for x, y in loader:
        with torch.autocast(device_type="cuda", dtype=DTYPE):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
