from functools import partial

import torch

from cuda import NativeScaler

amp_autocast = partial(torch.autocast, device_type="cuda", dtype=torch.float16)
loss_scaler = NativeScaler()


def train(model, loader, optimizer, lr_scheduler, model_ema):
    for i, (x, y) in enumerate(loader):
        with amp_autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        model_ema.update(model, step=i)
        lr_scheduler.step_update(num_updates=i, metric=loss.item())
