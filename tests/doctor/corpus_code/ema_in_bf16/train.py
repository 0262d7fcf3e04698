import copy

import torch

model = torch.nn.Linear(8, 8).cuda()
ema = copy.deepcopy(model).bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for x in torch.randn(10, 2, 8).cuda():
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), model.parameters()):
            average.mul_(0.9999).add_(weight, alpha=0.0001)
