import torch


def critic_step(critic, real, fake, optimizer, scaler):
    with torch.autocast("cuda", dtype=torch.float16):
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_(True)
        scores = critic(mixed)
        slope = torch.autograd.grad(scores.sum(), mixed, create_graph=True)[0]
        loss = scores.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
