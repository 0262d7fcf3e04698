import copy

import torch

model = torch.nn.Linear(8, 8).to(torch.bfloat16)
ema_model = copy.deepcopy(model)
ema_model.float()
for _ in range(3):
    for average, weight in zip(ema_model.parameters(), model.parameters()):
        average.mul_(0.999).add_(weight, alpha=0.001)
