import torch
from torch import nn

model = nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(64, 8).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
