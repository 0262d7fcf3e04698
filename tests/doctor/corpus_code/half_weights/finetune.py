import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
model.cuda()
model.half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x in torch.randn(10, 4, 8).cuda():
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
