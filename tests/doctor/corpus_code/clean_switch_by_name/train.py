import torch


def step(model, batch, optimizer, scaler, use_amp, max_norm):
    with torch.autocast("cuda", enabled=use_amp):
        loss = model(batch).mean()
    if use_amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if not use_amp:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if use_amp:
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()
    optimizer.step()
    return loss.detach()
