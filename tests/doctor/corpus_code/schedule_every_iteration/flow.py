import torch


def train(model, loader, optimizer, scheduler, model_ema):
    scaler = torch.amp.GradScaler("cuda", enabled=True)
    for batch in loader:
        with torch.autocast("cuda"):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        model_ema.update(model)
        optimizer.zero_grad()
