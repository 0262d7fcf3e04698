import torch


def with_continue(model, loader, optimizer, scaler, window):
    for i, batch in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(batch) / window
        scaler.scale(loss).backward()
        if (i + 1) % window != 0:
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def in_two_branches(model, loader, optimizer, scaler, window):
    for i, batch in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(batch) / window
        scaler.scale(loss).backward()
        if (i + 1) % window == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
