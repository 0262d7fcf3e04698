import torch
from torch.nn import functional as F


class Adversary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return F.binary_cross_entropy(torch.sigmoid(self.layer(x)), y)


def loss_of(x, y):
    net = Adversary()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return net(x, y)
