import torch
from torch import nn


def main():
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x in torch.randn(10, 8, 64):
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(epoch, loss.item())
