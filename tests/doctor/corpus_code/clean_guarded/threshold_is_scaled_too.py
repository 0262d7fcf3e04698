import torch


def update(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    limit = 1.0 * scaler.get_scale()
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
