import torch


def train_step(model, optimizer, batch):
    with torch.amp.autocast("cuda", dtype=torch.float16):
        loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
