import torch

OLD = torch.cuda.get_device_capability() < (8, 0)
scaler = torch.amp.GradScaler("cuda") if OLD else None


def update(model, optimizer, batch):
    if scaler is not None:
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        return
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch)
    loss.backward()
    optimizer.step()
