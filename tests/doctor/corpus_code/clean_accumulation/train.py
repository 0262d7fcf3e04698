import torch
from torch import nn


def train(model, loader, optimizer, scheduler, window):
    scaler = torch.amp.GradScaler("cuda")
    total = 0.0
    for step, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = nn.functional.cross_entropy(model(x), y) / window
        scaler.scale(loss).backward()
        total += loss.item()
        if (step + 1) % window == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
    return total
