import torch
from torch import nn


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return y / (y.abs().amax(dim=-1, keepdim=True) + 1e-8)


net = Unit().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for x in torch.randn(3, 2, 8).cuda():
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x).mean()
        norm = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
    scaler.scale(loss + norm.mean()).backward()
    scaler.step(optimizer)
    scaler.update()
