from torch.nn.utils import clip_grad_value_


def update(scaler, loss, model, optimizer):
    scaler.scale(loss).backward()
    clip_grad_value_(model.parameters(), 0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
