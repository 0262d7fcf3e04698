import torch


def train(model, optimizer, loader, config):
    scaler = torch.amp.GradScaler("cuda", enabled=config.bf16_run)
    for x in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=config.bf16_run):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
