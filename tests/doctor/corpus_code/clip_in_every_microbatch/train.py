import torch


def train(model, loader, optimizer, window):
    scaler = torch.amp.GradScaler("cuda")
    for i, batch in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(batch) / window
        scaler.scale(loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(norm)
