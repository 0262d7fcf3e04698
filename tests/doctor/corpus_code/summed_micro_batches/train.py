import torch

ACCUMULATE = 8
MICRO = 4


def train(model, loader, optimizer):
    for index, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch)
        loss.backward()
        if (index + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


def averaged(model, loader, optimizer):
    for index, batch in enumerate(loader):
        loss = model(batch)
        loss = loss / MICRO
        loss.backward()
        if (index + 1) % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
