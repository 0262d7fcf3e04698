import torch


def train(model, loader, optimizer, scheduler):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for epoch in range(10):
        for x in loader:
            with torch.autocast("cuda"):
                loss = model(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scheduler.step()
