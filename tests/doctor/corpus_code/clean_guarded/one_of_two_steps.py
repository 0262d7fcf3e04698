import torch


def update(loss, optimizer, scaler, amp):
    if amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if not amp:
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
