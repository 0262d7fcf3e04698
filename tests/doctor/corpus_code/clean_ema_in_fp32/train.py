import copy

import torch

model = torch.nn.Linear(8, 8).cuda().to(torch.bfloat16)
ema_model = copy.deepcopy(model).float()
for batch in [torch.randn(2, 8)] * 4:
    loss = model(batch.bfloat16()).float().mean()
    loss.backward()
    with torch.no_grad():
        for average, weight in zip(ema_model.parameters(), model.parameters()):
            average.mul_(0.999).add_(weight.float(), alpha=0.001)
