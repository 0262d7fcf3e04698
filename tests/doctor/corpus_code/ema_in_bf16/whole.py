import copy

import torch


def train(loader):
    model = torch.nn.Linear(8, 8).cuda().to(torch.bfloat16)
    ema_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in loader:
        model(x).float().mean().backward()
        optimizer.step()
        for average, weight in zip(ema_model.parameters(), model.parameters()):
            average.data.mul_(0.999).add_(weight.data, alpha=0.001)
