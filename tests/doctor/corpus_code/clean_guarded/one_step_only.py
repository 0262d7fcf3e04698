import torch


def smoke_test(model, optimizer, batch):
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda"):
        loss = model(batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
