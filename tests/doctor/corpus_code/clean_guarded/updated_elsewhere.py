import torch

from other import finish_step

scaler = torch.amp.GradScaler("cuda")


def train(model, loader, optimizer):
    for batch in loader:
        with torch.autocast("cuda"):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        finish_step(scaler, optimizer)
