import torch


def train(model, loader, optimizer, scaler):
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
            loss = model(x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def evaluate(model, loader, sampler):
    model.eval()
    with torch.inference_mode():
        return sum(model(x) for x in loader)


def main(model, loaders, optimizer, sampler):
    scaler = torch.amp.GradScaler("cuda")
    train(model, loaders[0], optimizer, scaler)
    evaluate(model, loaders[1], sampler)
