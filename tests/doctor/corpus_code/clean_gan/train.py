import torch
from torch import nn

generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
scaler = torch.amp.GradScaler("cuda")
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4)
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4)
bce = nn.BCEWithLogitsLoss()
for real in [torch.randn(4, 8)] * 10:
    with torch.autocast("cuda", dtype=torch.float16):
        fake = generator(torch.randn(4, 4))
        d_loss = bce(critic(real), torch.ones(4, 1)) + bce(critic(fake.detach()), torch.zeros(4, 1))
    scaler.scale(d_loss).backward()
    scaler.step(opt_d)
    opt_d.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        g_loss = bce(critic(fake), torch.ones(4, 1))
    scaler.scale(g_loss).backward()
    scaler.step(opt_g)
    opt_g.zero_grad()
    scaler.update()
