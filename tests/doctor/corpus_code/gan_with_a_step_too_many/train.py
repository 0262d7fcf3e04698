import torch


def train(generator, critic, loader, opt_g, opt_d):
    scaler = torch.amp.GradScaler("cuda")
    for real in loader:
        with torch.autocast("cuda"):
            d_loss = critic(real).mean() - critic(generator(real).detach()).mean()
        scaler.scale(d_loss).backward()
        scaler.step(opt_d)
        opt_d.step()
        opt_d.zero_grad()
        with torch.autocast("cuda"):
            g_loss = -critic(generator(real)).mean()
        scaler.scale(g_loss).backward()
        scaler.step(opt_g)
        opt_g.zero_grad()
        scaler.update()
